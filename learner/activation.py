"""Activation: when a committed version becomes the one the fleet serves. A pure state machine.

Pushed in: which replicas are present and what each has confirmed or refused. Read out: whether the version is
active, still loading, or failed, and who is left behind and why. It owns no task and no clock: time comes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["loading", "active", "failed"]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What one present replica says of itself."""

    id: str
    confirmed: frozenset[str]
    refused: Mapping[str, str]


@dataclass
class Activation:
    """One version's way from committed to active.

    Members are the replicas present at the announcement. The version is active when every member has confirmed, been
    expelled (it refused, left, or did not confirm within `timeout` seconds), and at least `min_replicas` have
    confirmed. With fewer than that it has failed: the last active version stays in force.
    """

    version: int
    name: str
    members: frozenset[str]
    announced: float
    timeout: float
    min_replicas: int
    expelled: dict[str, str] = field(default_factory=dict)
    """Members that are no longer waited for, with the reason. They are admitted again once they confirm."""

    def observe(self, replicas: Iterable[ReplicaView], now: float) -> State:
        """Take in what the replicas say at `now` and judge."""
        present = {replica.id: replica for replica in replicas}
        confirmed = {replica.id for replica in present.values() if self.name in replica.confirmed}
        for member in self.members - confirmed:
            view = present.get(member)
            if view is None:
                self.expelled.setdefault(member, "it left while loading")
            elif self.name in view.refused:
                self.expelled[member] = view.refused[self.name]
            elif now - self.announced >= self.timeout:
                self.expelled.setdefault(member, f"it did not confirm within {self.timeout:.0f} s")
        for member in confirmed:
            self.expelled.pop(member, None)
        waiting = self.members - confirmed - set(self.expelled)
        if waiting:
            return "loading"
        if len(confirmed) >= self.min_replicas:
            return "active"
        # Nobody is left to wait for. Replicas that joined since may still come to the rescue until the time is up.
        return "failed" if now - self.announced >= self.timeout or not present else "loading"


BACKOFF = (2.0, 5.0, 10.0, 30.0)
"""Seconds between two attempts to activate a version that failed everywhere."""


def backoff(attempt: int) -> float:
    """Seconds to wait before attempt number `attempt` (1: the first retry)."""
    return BACKOFF[min(attempt, len(BACKOFF)) - 1]


def live_versions(*, head: int, active: int, max_staleness: int, known: Iterable[int]) -> list[int]:
    """The versions that replicas keep loaded, oldest first: every one that a trainable group may still be sampled
    under, the active one, and the newest committed one. The base model, version 0, needs no slot.

    With the one being offered that is at most `max_staleness + 2`, however far `active` is behind: versions that were
    skipped, or that the next step would find too old, are not among them.
    """
    return sorted(
        version
        for version in set(known)
        if version > 0 and (head - max_staleness <= version <= active or version in (active, head))
    )
