"""How many tokens a request will probably sample, learned from those that ended. Pure.

The estimate is the running mean of the same prompt's continuations in the same run, drawn towards the run's own mean
while there are few of them, and never more than the request asks for. Until the first has ended, it is half of that.
"""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 16_384
"""Prompts whose lengths are remembered."""

FADE = 0.05
"""Weight of the newest continuation in a run's mean."""

TRUST = 4.0
"""Continuations of one prompt that count as much as the run's mean."""

MOST = 32.0
"""Continuations of one prompt after which older ones fade."""


class Lengths:
    """Running means of continuation lengths."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, float] = OrderedDict()
        self._prompts: OrderedDict[tuple[str, int], tuple[float, float]] = OrderedDict()

    def expected(self, run: str, prompt: int, most: int) -> float:
        """Tokens to expect of a request of `run`, whose prompt hashes to `prompt`, and that asks for `most`
        at most.
        """
        mean = self._runs.get(run)
        if mean is None:
            return most / 2
        count, total = self._prompts.get((run, prompt), (0.0, 0.0))
        return min(float(most), (total + TRUST * mean) / (count + TRUST))

    def ended(self, run: str, prompt: int, tokens: int) -> None:
        """A continuation of `tokens` tokens has ended."""
        self._runs[run] = self._runs.get(run, float(tokens)) * (1 - FADE) + tokens * FADE
        self._runs.move_to_end(run)
        key = (run, prompt)
        count, total = self._prompts.pop(key, (0.0, 0.0))
        if count >= MOST:
            count, total = count * (1 - 1 / MOST), total * (1 - 1 / MOST)
        self._prompts[key] = (count + 1.0, total + tokens)
        if len(self._prompts) > REMEMBERED:
            self._prompts.popitem(last=False)
        if len(self._runs) > REMEMBERED:
            self._runs.popitem(last=False)
