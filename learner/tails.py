"""How long closed groups had been, by what became of them: what is dropped for being slow biases the run, so it shows.

Pure state of bounded size; like the ledger it travels in each commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from learner.ledger import Outcome

Kind = Literal["used", "dropped", "failed", "expired"]
"""used: a step was made of it, trained or skipped. The others are the ledger's outcomes."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Measure = Literal["tokens", "seconds"]
"""tokens: sampled, of each episode. seconds: a group's, from its lease to its end, by the clock of who had it."""

MEASURES: tuple[Measure, ...] = get_args(Measure)

PERCENTILES = (50, 90, 99)

STEPS_PER_DOUBLING = 4
"""Buckets this fine place a percentile within 9% of the truth."""

SMALLEST, LARGEST = 2.0**-10, 2.0**40
"""What lies beyond is counted in the outermost buckets: 200 of them hold any length and any duration."""

Closing = tuple[Outcome, Sequence[int], float | None]
"""A closed group: its outcome, the sampled tokens of each episode, its seconds if they are known."""


FIGURES = tuple(
    f"{kind}_{measure}_{figure}"
    for kind in KINDS
    for measure in MEASURES
    for figure in ("mean", *(f"p{percent}" for percent in PERCENTILES))
)
"""The names of all figures there may be."""


def figures_in(readings: Mapping[str, float]) -> dict[str, float]:
    """The figures of groups' lengths and durations among other readings."""
    return {name: readings[name] for name in FIGURES if name in readings}


class Spread:
    """How some positive numbers are spread: their count, sum and maximum, and a histogram of logarithmic buckets."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)
        bucket = math.floor(STEPS_PER_DOUBLING * math.log2(min(max(value, SMALLEST), LARGEST)))
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value that `percent` of all do not exceed, within 9%; 0 of nothing."""
        wanted = math.ceil(self.count * percent / 100)
        for bucket, number in sorted(self._buckets.items()):
            wanted -= number
            if wanted <= 0:
                return min(self.largest, float(2.0 ** ((bucket + 0.5) / STEPS_PER_DOUBLING)))
        return 0.0

    def to_state(self) -> dict[str, Any]:
        buckets = {str(bucket): number for bucket, number in self._buckets.items()}
        return {"count": self.count, "total": self.total, "largest": self.largest, "buckets": buckets}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Spread:
        spread = cls()
        spread.count, spread.total = int(state["count"]), float(state["total"])
        spread.largest = float(state["largest"])
        spread._buckets = {int(bucket): int(number) for bucket, number in state["buckets"].items()}
        return spread


class Tails:
    """Lengths and durations of every group that was closed."""

    def __init__(self) -> None:
        self._spreads: dict[tuple[Kind, Measure], Spread] = {}

    def add(self, outcome: Outcome, tokens: Sequence[int], seconds: float | None) -> None:
        """Take in a closed group: `tokens` sampled in each episode, `seconds` if they are known."""
        kind: Kind = "used" if outcome in ("trained", "skipped") else outcome  # type: ignore[assignment]
        for value in tokens:
            self._spread(kind, "tokens").add(float(value))
        if seconds is not None:
            self._spread(kind, "seconds").add(seconds)

    def _spread(self, kind: Kind, measure: Measure) -> Spread:
        return self._spreads.setdefault((kind, measure), Spread())

    def figures(self) -> dict[str, float]:
        """`{kind}_{tokens|seconds}_{mean|p50|p90|p99}`, of what there is something to say about."""
        figures = {}
        for kind in KINDS:
            for measure in MEASURES:
                spread = self._spreads.get((kind, measure))
                if spread is not None:
                    figures[f"{kind}_{measure}_mean"] = spread.mean
                    for percent in PERCENTILES:
                        figures[f"{kind}_{measure}_p{percent}"] = spread.percentile(percent)
        return figures

    def to_state(self, also: Iterable[Closing] = ()) -> dict[str, Any]:
        """What a commit stores; `also` are closings that take effect with this very commit."""
        copy = Tails.from_state({f"{kind}.{measure}": s.to_state() for (kind, measure), s in self._spreads.items()})
        for closing in also:
            copy.add(*closing)
        return {f"{kind}.{measure}": spread.to_state() for (kind, measure), spread in copy._spreads.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Tails:
        """The reverse of to_state. What another release calls by another name is left out."""
        tails = cls()
        for kind in KINDS:
            for measure in MEASURES:
                if f"{kind}.{measure}" in state:
                    tails._spreads[kind, measure] = Spread.from_state(state[f"{kind}.{measure}"])
        return tails
