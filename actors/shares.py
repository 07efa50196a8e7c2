"""Whose turn it is: dividing an actor's episode slots among runs. Pure: state in, the next run out; time comes in.

Rules, in this order:
- The run whose groups hold the fewest slots goes first; of equals, the one that has begun the fewest episodes.
- A group that is finished and waits to be handed over (its run's groups stream is full, the store is away) holds slots
  against its own run alone: it counts in that run's order, and against the limit that no run exceeds by itself, but the
  slots are free for the others.
- A run below its equal share whose next group does not fit has the free slots kept for it, or small groups would take
  them one by one for ever. One whose group is larger than its share has them kept only when it holds none and has begun
  no more than the others; a group larger than all slots runs alone.
- Idle shares are lent, to groups that give them back soon. Nobody takes a slot away from a group under way, so a run
  whose groups are slow gets more than its share only of what no other run has used lately: a queue that is empty for a
  moment must not cost its run every slot for an hour.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

LENT_SECONDS = 10.0
"""Groups that take no longer are quick: a run may well wait this long for its share."""

LATELY_SECONDS = 60.0
"""A run that has begun nothing for this long has its share lent to slow groups too."""

MEMORY = 0.8
"""How much of what is known of a run's groups is kept at each that ends."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One run's claim on slots, in episodes. `size`: of its next group. `waits`: it has a task to begin with."""

    run: str
    size: int
    working: int
    """Episodes of its groups that are under way."""
    blocked: int
    """Episodes of its groups that are finished and wait to be handed over."""
    waits: bool
    oldest: float = 0.0
    """Seconds since the oldest of the groups under way was begun."""

    @property
    def held(self) -> int:
        return self.working + self.blocked


@dataclass(frozen=True, slots=True)
class Turn:
    """The run that is next. `fits`: its group may begin now; else the free slots are kept until it does."""

    run: str
    fits: bool


class Shares:
    """Divides `slots` among runs; remembers what each has begun, and how long its groups take."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._begun: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def next_run(self, demands: Collection[Demand], now: float) -> Turn | None:
        """Whose group is to begin next; None while no run that waits may begin one."""
        self._admit(demands)
        sharing = [demand for demand in demands if demand.waits or demand.working or self._lately(demand.run, now)]
        waiting = [demand for demand in demands if demand.waits and not self._at_its_limit(demand)]
        free = self._slots - sum(demand.working for demand in demands)
        for demand in sorted(waiting, key=lambda demand: (demand.held, self._begun[demand.run], demand.run)):
            in_share = (demand.held + demand.size) * len(sharing) <= self._slots
            if demand.size <= free or free == self._slots:
                if in_share or demand.held == 0 or self._may_borrow(demand, sharing, free):
                    return Turn(demand.run, fits=True)
            elif in_share or (demand.held == 0 and self._is_due(demand, waiting)):
                return Turn(demand.run, fits=False)
        return None

    def begin(self, run: str, size: int, now: float) -> None:
        """A group of `size` episodes of `run` begins."""
        self._begun[run] = self._begun.get(run, 0) + size
        self._last[run] = now

    def end(self, run: str, seconds: float) -> None:
        """The episodes of a group are over, `seconds` after it was begun."""
        self._seconds[run] = MEMORY * self._seconds.get(run, seconds) + (1 - MEMORY) * seconds

    def _admit(self, demands: Collection[Demand]) -> None:
        """Who had nothing to begin has saved up nothing: it goes on level with the least of those that had."""
        busy = {demand.run for demand in demands if demand.waits or demand.working}
        floor = min((begun for run, begun in self._begun.items() if run in busy), default=0)
        self._begun = {demand.run: max(floor, self._begun.get(demand.run, floor)) for demand in demands}
        self._last = {run: last for run, last in self._last.items() if run in self._begun}
        self._seconds = {run: seconds for run, seconds in self._seconds.items() if run in self._begun}

    def _lately(self, run: str, now: float) -> bool:
        return run in self._last and now - self._last[run] < LATELY_SECONDS

    def _at_its_limit(self, demand: Demand) -> bool:
        """Whether a run holds all that it could have if it were alone, what it cannot hand over included."""
        return demand.held > 0 and demand.held + demand.size > self._slots

    def _is_due(self, demand: Demand, waiting: Collection[Demand]) -> bool:
        return all(self._begun[demand.run] <= self._begun[other.run] for other in waiting)

    def _may_borrow(self, demand: Demand, sharing: Collection[Demand], free: int) -> bool:
        """Whether a run may go beyond its share: its groups end soon, or what the others have a claim to stays free."""
        if demand.run in self._seconds and max(self._seconds[demand.run], demand.oldest) <= LENT_SECONDS:
            return True
        claimed = sum(self._claim(other, len(sharing)) for other in sharing if other.run != demand.run)
        return free - demand.size >= claimed

    def _claim(self, demand: Demand, sharing: int) -> int:
        """The slots that a run may still come for: whole groups up to its share, one at least if it holds none."""
        if demand.size == 0:
            return 0
        groups = min(self._slots // sharing - demand.working, self._slots - demand.held) // demand.size
        return max(groups, 1 if demand.held == 0 else 0, 0) * demand.size
