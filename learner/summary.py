"""How a run stands, or ended, by its last commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from broker.errors import RunConflict
from broker.messages import Head, decode
from broker.registry import Registry
from broker.store import Store
from learner.checkpoint import Checkpoint
from learner.ledger import Ledger
from learner.tails import Tails

TARGET_STEPS = 5
"""`target_reward` is compared with the mean reward of this many steps."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended, or what it had come to when its learner left."""

    run: str
    steps: int
    reward_first5: float
    reward_last5: float
    groups: dict[str, int]
    tails: dict[str, float]
    """Lengths and durations of the groups, by what became of them (`Tails.figures`)."""
    head: int
    adapter_key: str
    adapter_name: str
    seconds: float
    done: bool

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object, as `farflung up --json` prints it."""
        plain = asdict(self)
        del plain["groups"], plain["tails"]
        return plain | {f"groups_{name}": number for name, number in self.groups.items()} | self.tails


def summarize(
    head: Head, rewards: Sequence[float], groups: dict[str, int], tails: dict[str, float], seconds: float, *, done: bool
) -> Finished:
    """Put a summary together from a run's head and its history."""
    return Finished(
        run=head.run,
        steps=head.step,
        reward_first5=_mean(rewards[:TARGET_STEPS]),
        reward_last5=_mean(rewards[-TARGET_STEPS:]),
        groups=groups,
        tails=tails,
        head=head.head,
        adapter_key=head.adapter.key if head.adapter else "",
        adapter_name=head.adapter.name if head.adapter else "",
        seconds=seconds,
        done=done,
    )


async def summary_of(registry: Registry, store: Store, run: str) -> Finished:
    """How a run stands by its last commit. Raises RunConflict when there is no such run."""
    found = await registry.head(run)
    if found is None:
        raise RunConflict(f"there is no run {run}; `farflung runs list` shows those there are")
    head = found[0]
    rewards: list[float] = []
    counts = Ledger().counts()
    tails = Tails()
    seconds = 0.0
    if head.checkpoint is not None:
        checkpoint = decode(await store.get(head.checkpoint), Checkpoint)
        rewards, seconds = checkpoint.rewards, checkpoint.seconds
        counts = Ledger.from_state(checkpoint.ledger).counts()
        tails = Tails.from_state(checkpoint.tails)
    return summarize(head, rewards, counts, tails.figures(), seconds, done=head.state == "finished")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
