"""Shares of time: how much of the last minute something was so. Pure: time comes in."""

from __future__ import annotations

import math


class Share:
    """The recent share (0..1) of time in which a value held, forgetting with a time constant of `memory` seconds.

    `set(value, now)` says that `value` (0..1) holds from `now` on.
    """

    def __init__(self, memory: float = 30.0) -> None:
        self._memory = memory
        self._value = 0.0
        self._since: float | None = None
        self._held = 0.0
        self._total = 0.0

    def set(self, value: float, now: float) -> None:
        self._advance(now)
        self._value = value

    def read(self, now: float) -> float:
        """The share as of `now`; 0 before anything was said."""
        self._advance(now)
        return self._held / self._total if self._total > 0 else 0.0

    def _advance(self, now: float) -> None:
        if self._since is None:
            self._since = now
            return
        elapsed = max(0.0, now - self._since)
        self._since = now
        keep = math.exp(-elapsed / self._memory)
        self._held = self._held * keep + self._value * self._memory * (1 - keep)
        self._total = self._total * keep + self._memory * (1 - keep)


class Rate:
    """A recent rate per second, forgetting with a time constant of `memory` seconds."""

    def __init__(self, memory: float = 15.0) -> None:
        self._memory = memory
        self._amount = 0.0
        self._time = 0.0
        self._since: float | None = None

    def add(self, amount: float, now: float) -> None:
        self._advance(now)
        self._amount += amount

    def read(self, now: float) -> float:
        """Amount per second, as of `now`; 0 before anything was added."""
        self._advance(now)
        return self._amount / self._time if self._time > 0 else 0.0

    def _advance(self, now: float) -> None:
        if self._since is None:
            self._since = now
            return
        elapsed = max(0.0, now - self._since)
        self._since = now
        keep = math.exp(-elapsed / self._memory)
        self._amount *= keep
        self._time = self._time * keep + self._memory * (1 - keep)
