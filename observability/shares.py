"""Shares of time: how much of the last minute something was so. Pure: time comes in."""

from __future__ import annotations

import math


class _Fading:
    """An amount and the time it came in, both forgotten with a time constant of `memory` seconds."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._amount = 0.0
        self._time = 0.0
        self._since: float | None = None

    def read(self, now: float) -> float:
        """Amount over time, as of `now`; 0 before anything was said."""
        self._advance(now)
        return self._amount / self._time if self._time > 0 else 0.0

    def _advance(self, now: float, per_second: float = 0.0) -> None:
        """Let the time up to `now` pass, in which `per_second` came in all along."""
        if self._since is None:
            self._since = now
            return
        elapsed = max(0.0, now - self._since)
        self._since = now
        keep = math.exp(-elapsed / self._memory)
        passed = self._memory * (1 - keep)
        self._amount = self._amount * keep + per_second * passed
        self._time = self._time * keep + passed


class Share(_Fading):
    """The recent share (0..1) of time in which a value held, forgetting with a time constant of `memory` seconds.

    `set(value, now)` says that `value` (0..1) holds from `now` on.
    """

    def __init__(self, memory: float = 30.0) -> None:
        super().__init__(memory)
        self._value = 0.0

    def set(self, value: float, now: float) -> None:
        self._advance(now)
        self._value = value

    def _advance(self, now: float, per_second: float = 0.0) -> None:
        super()._advance(now, self._value)


class Rate(_Fading):
    """A recent rate per second, forgetting with a time constant of `memory` seconds."""

    def __init__(self, memory: float = 15.0) -> None:
        super().__init__(memory)

    def add(self, amount: float, now: float) -> None:
        self._advance(now)
        self._amount += amount
