"""The ledger: every issued group, until it is closed once. Pure state; it travels in each commit.

Invariant: `issued == open + trained + dropped + skipped + failed + expired`, and each id leaves `open` at most once.
Not counters but a set of ids: a group that arrives twice, or from before a restart, is found not to be open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from broker.errors import FarflungError

Outcome = Literal["trained", "dropped", "skipped", "failed", "expired"]
"""trained: its tokens moved the weights. dropped: too stale. skipped: no signal, all rewards equal. failed: an actor
or its environment gave up. expired: nothing was heard of it in time."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class LedgerError(FarflungError):
    """The ledger was asked for the impossible. A bug in Farflung, never a fault of the network."""


class Ledger:
    """Open group ids with their task index, the cursor of the next task, and the count of each outcome."""

    def __init__(self) -> None:
        self.cursor = 0
        self._open: dict[str, int] = {}
        self.closed: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self.late = 0
        """Groups that arrived with an id that was not open. Not part of the balance."""

    @property
    def issued(self) -> int:
        return self.cursor

    @property
    def open_groups(self) -> int:
        return len(self._open)

    def is_open(self, group: str) -> bool:
        return group in self._open

    def open_ids(self) -> dict[str, int]:
        """Open group ids with their task index, in the order of issue."""
        return dict(self._open)

    def issue(self, group: str) -> int:
        """Open `group` for the task under the cursor; returns the task's index and moves the cursor on."""
        if group in self._open:
            raise LedgerError(f"group {group} is open already")
        index = self.cursor
        self._open[group] = index
        self.cursor += 1
        return index

    def close(self, group: str, outcome: Outcome) -> bool:
        """Close `group` as `outcome`. False, and counted late, when it is not open."""
        if self._open.pop(group, None) is None:
            self.late += 1
            return False
        self.closed[outcome] += 1
        return True

    def check(self) -> None:
        """Raise LedgerError unless the balance is exact."""
        closed = sum(self.closed.values())
        if self.issued != len(self._open) + closed:
            raise LedgerError(f"issued {self.issued} != open {len(self._open)} + closed {closed}")

    def counts(self) -> dict[str, int]:
        """issued, open, each outcome and late, for people and for the summary."""
        outcomes = {str(outcome): number for outcome, number in self.closed.items()}
        return {"issued": self.issued, "open": self.open_groups, **outcomes, "late": self.late}

    def to_state(self, without: Iterable[tuple[str, Outcome]] = ()) -> dict[str, Any]:
        """What a commit stores; `without` are closings that take effect with this very commit."""
        copy = Ledger()
        copy.cursor, copy._open, copy.closed, copy.late = self.cursor, dict(self._open), dict(self.closed), self.late
        for group, outcome in without:
            copy.close(group, outcome)
        copy.check()
        return {"cursor": copy.cursor, "open": copy._open, "closed": dict(copy.closed), "late": copy.late}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        """The reverse of to_state. Raises LedgerError when the balance is not exact."""
        ledger = cls()
        ledger.cursor = int(state["cursor"])
        ledger._open = {str(group): int(index) for group, index in state["open"].items()}
        for outcome in OUTCOMES:
            ledger.closed[outcome] = int(state["closed"].get(outcome, 0))
        ledger.late = int(state["late"])
        ledger.check()
        return ledger
