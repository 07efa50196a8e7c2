"""Activation: when a committed version becomes the one the fleet serves. A pure state machine.

Pushed in: which replicas are present and what each has confirmed or refused. Read out: whether the version is
active, still loading, or failed, and who is left behind and why. It owns no task and no clock: time comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    confirmed. With fewer than that it fails once `timeout` is over, or at once where no replica is present; the last
    active version stays in force.
    """

    version: int
    name: str
    members: frozenset[str]
    announced: float
    timeout: float
    min_replicas: int
    since: Mapping[str, float] = field(default_factory=dict)
    """Since when each member has been waited for, where that is not since the announcement."""
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
            elif now - self.since.get(member, self.announced) >= self.timeout:
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


class Pace:
    """Which replicas the next version waits for, and since when. Pure: one for all activations of an epoch.

    - A replica has been waited for since the first announcement that followed the newest version it has confirmed: a
      version that is superseded before it was active gives nobody more time.
    - One that was left behind is not waited for again until it has confirmed a version in time: however slow it is, it
      costs the run one timeout, not one for each version. It serves what it has confirmed all the while.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._announced: dict[str, float] = {}
        """The newest active version and those announced after it, by name, oldest first."""
        self._seen: dict[str, float] = {}
        self._left: dict[str, tuple[str, float]] = {}
        """Reason, and when the version was announced at which it was left behind."""

    def announce(self, name: str, replicas: Collection[ReplicaView], now: float) -> dict[str, float]:
        """A version is offered to everybody; returns its members with the time since which each is waited for.

        Announced again after it failed everywhere, it gives everybody the whole time anew.
        """
        self._announced.pop(name, None)
        self._announced[name] = now
        self.observe(replicas, now)
        return {replica.id: self._since(replica, now) for replica in replicas if replica.id not in self._left}

    def observe(self, replicas: Collection[ReplicaView], now: float) -> None:
        """Take in what the replicas say at `now`."""
        self._seen = {replica.id: self._seen.get(replica.id, now) for replica in replicas}
        self._left = {id: left for id, left in self._left.items() if id in self._seen}
        for replica in replicas:
            _, when = self._left.get(replica.id, ("", 0.0))
            if any(
                name in replica.confirmed and when <= announced and now - announced < self._timeout
                for name, announced in self._announced.items()
            ):
                self._left.pop(replica.id, None)

    def leave(self, name: str, expelled: Mapping[str, str]) -> None:
        """The activation of `name` does not wait for these any more."""
        for replica, reason in expelled.items():
            if replica in self._seen:
                self._left[replica] = (reason, self._announced[name])

    def activated(self, name: str) -> None:
        """What was announced before `name` is of no interest any more."""
        while next(iter(self._announced), name) != name:
            del self._announced[next(iter(self._announced))]

    def left_behind(self, name: str, replicas: Collection[ReplicaView]) -> dict[str, str]:
        """The replicas that are there and lack version `name`, not waited for, with the reason."""
        return {
            replica.id: self._left[replica.id][0]
            for replica in replicas
            if replica.id in self._left and name not in replica.confirmed
        }

    def _since(self, replica: ReplicaView, now: float) -> float:
        since = now
        for name in reversed(self._announced):
            if name in replica.confirmed:
                break
            since = self._announced[name]
        return max(since, self._seen[replica.id])


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
