"""Finished groups that wait to be trained on. Pure: no task, no socket, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from broker.messages import GroupReady
from broker.trajectories import Group
from learner.credit import CreditRule
from learner.priority import Priority, oldest


class Acknowledged(Protocol):
    """A delivery that is held until its group is closed."""

    async def ack(self, timeout: float = 5.0) -> bool: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A group in hand, and the delivery to acknowledge once it is closed for good."""

    ready: GroupReady
    group: Group
    delivery: Acknowledged
    headers: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.ready.group

    @property
    def version(self) -> int:
        return self.ready.version


class Buffer:
    """Groups by id, taken in the order of a priority: oldest first, unless told otherwise."""

    def __init__(self, priority: Priority = oldest) -> None:
        self._priority = priority
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, group: str) -> bool:
        return group in self._held

    def add(self, held: Held) -> None:
        self._held[held.id] = held

    def take_stale(self, rule: CreditRule, head: int) -> list[Held]:
        """Remove and return what the step that starts from `head` may not use any more."""
        stale = [held for held in self._held.values() if rule.too_stale(version=held.version, head=head)]
        for held in stale:
            del self._held[held.id]
        return stale

    def take_flat(self, teaches: Callable[[Group], bool], limit: int) -> list[Held]:
        """Remove and return up to `limit` groups that teach nothing, in order, so that others replace them.

        Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2), bounded: where nothing teaches, the run goes on.
        """
        flat = [held for held in self._in_order() if not teaches(held.group)][:limit]
        for held in flat:
            del self._held[held.id]
        return flat

    def _in_order(self) -> list[Held]:
        return sorted(self._held.values(), key=self._priority)

    def mean_staleness(self, head: int) -> float:
        """Versions that the waiting groups are behind `head`, in the mean; 0 when none wait."""
        return sum(head - held.version for held in self._held.values()) / max(1, len(self._held))

    def take(self, count: int) -> list[Held] | None:
        """Remove and return the next `count` groups; None, and nothing removed, while there are fewer."""
        if len(self._held) < count:
            return None
        chosen = self._in_order()[:count]
        for held in chosen:
            del self._held[held.id]
        return chosen
