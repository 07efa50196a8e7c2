"""How stale a run gets, and what it drops, against `max_staleness`: a simulation of credit, buffer and activation.

    python -m tests.benchmarks.staleness

The rules are the learner's own (`learner.credit`, `learner.buffer`); time is made up. An actor slot runs one group at a
time, lognormal in length (sigma 0.6), under the version that is active when it begins; a group whose version falls
behind while it runs is cancelled and counts as dropped. A step takes as long as its groups do on a learner of constant
speed; a version is active a while after its commit. The tables are in docs/staleness.md.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from learner.buffer import Buffer
from learner.credit import CreditRule

GROUPS_PER_STEP = 8
SLOTS = 8
STEPS = 600
STEP_SECONDS = 1.0
ACTIVATION_SECONDS = 0.25
SIGMA = 0.6


@dataclass
class Outcome:
    """What a simulated run came to."""

    trained: int = 0
    dropped: int = 0
    staleness: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def dropped_share(self) -> float:
        return self.dropped / max(1, self.dropped + self.trained)

    @property
    def mean_staleness(self) -> float:
        return sum(self.staleness) / max(1, len(self.staleness))

    @property
    def speed(self) -> float:
        """Steps a second, in units of the learner's own speed."""
        return self.trained / GROUPS_PER_STEP / self.seconds * STEP_SECONDS


def simulate(rule: CreditRule, supply: float, *, steps: int = STEPS, seed: int = 0) -> Outcome:
    """One run. `supply` is how many groups all slots finish in the time in which the learner trains one."""
    chance = random.Random(seed)
    mean = SLOTS * STEP_SECONDS / GROUPS_PER_STEP / supply
    events: list[tuple[float, int, str, Any]] = []
    order, ids = itertools.count(), itertools.count()
    buffer, outcome = Buffer(), Outcome()
    head = active = 0
    now = 0.0
    queued: list[int] = []
    running: dict[int, int] = {}
    open_groups: set[int] = set()
    step: list[int] | None = None

    def after(seconds: float, kind: str, what: Any) -> None:
        heapq.heappush(events, (now + seconds, next(order), kind, what))

    def drop(group: int) -> None:
        open_groups.discard(group)
        outcome.dropped += 1

    while outcome.trained < steps * rule.groups_per_step:
        for held in buffer.take_stale(rule, head):
            drop(held.ready.index)
        if step is None and (batch := buffer.take(rule.groups_per_step)) is not None:
            outcome.staleness += [head - held.version for held in batch]
            step = [held.ready.index for held in batch]
            after(STEP_SECONDS, "committed", None)
        waiting = buffer.mean_staleness(head)
        while rule.credit(head=head, active=active, open_groups=len(open_groups), waiting_staleness=waiting) > 0:
            group = next(ids)
            open_groups.add(group)
            queued.append(group)
        while queued and len(running) < SLOTS:
            group = queued.pop(0)
            running[group] = active
            after(mean * chance.lognormvariate(-(SIGMA**2) / 2, SIGMA), "finished", group)
        now, _, kind, what = heapq.heappop(events)
        if kind == "committed":
            assert step is not None
            outcome.trained += len(step)
            open_groups.difference_update(step)
            step = None
            head += 1
            after(ACTIVATION_SECONDS, "active", head)
            for group in [g for g, version in running.items() if rule.too_stale(version=version, head=head)]:
                del running[group]
                drop(group)
        elif kind == "active":
            active = max(active, what)
        elif what in running:
            version = running.pop(what)
            ready = SimpleNamespace(group=what, version=version, index=what)
            finished: Any = SimpleNamespace(id=str(what), version=version, ready=ready)
            buffer.add(finished)
    outcome.seconds = now
    return outcome


def table(supply: float, bound: float | None) -> list[str]:
    lines = [
        "| max_staleness | dropped | mean staleness | steps/s, of the learner's own |",
        "| --- | --- | --- | --- |",
    ]
    for max_staleness in range(9):
        rule = CreditRule(GROUPS_PER_STEP, max_staleness, 1, None if bound is None else bound * max(1, max_staleness))
        found = simulate(rule, supply)
        lines.append(
            f"| {max_staleness} | {100 * found.dropped_share:.1f}% | {found.mean_staleness:.2f} | {found.speed:.2f} |"
        )
    return lines


def main() -> None:
    for title, supply, bound in (
        ("Learner-bound: generation makes twice what the learner trains", 2.0, None),
        ("Generation-bound: generation makes half of what the learner trains", 0.5, None),
        ("Learner-bound, with mean_staleness = max_staleness / 4", 2.0, 0.25),
    ):
        print(f"## {title}\n", *table(supply, bound), "", sep="\n")


if __name__ == "__main__":
    main()
