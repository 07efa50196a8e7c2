"""How ratios are measured here: ours and the raw limit in turn, in one process, the median of the pairs' ratios.

The machine drifts; a pair measured within a second or two drifts together, two medians taken apart do not.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from typing import NamedTuple


class Row(NamedTuple):
    """One comparison. `ours` and `raw` are medians in `unit`, `ratio` the median of ours over raw pair by pair."""

    name: str
    ours: float
    raw: float
    ratio: float
    unit: str
    target: float


async def compare(
    name: str,
    ours: Callable[[], Awaitable[float]],
    raw: Callable[[], Awaitable[float]],
    *,
    unit: str,
    target: float,
    rounds: int = 7,
) -> Row:
    """Measure both `rounds` times in turn, after one uncounted round. Each call returns a rate: more is better."""
    await ours()
    await raw()
    pairs = []
    for number in range(rounds):
        if number % 2:
            second, first = await raw(), await ours()
        else:
            first, second = await ours(), await raw()
        pairs.append((first, second))
    return Row(
        name,
        statistics.median(first for first, _ in pairs),
        statistics.median(second for _, second in pairs),
        statistics.median(first / second for first, second in pairs),
        unit,
        target,
    )


def show(rows: list[Row]) -> str:
    """A table of comparisons."""
    lines = [f"{'':58} {'ours':>10} {'raw':>10} {'ratio':>7} {'target':>7}"]
    for row in rows:
        mark = "" if row.ratio >= row.target else "  below target"
        lines.append(
            f"{row.name + ' (' + row.unit + ')':58} {row.ours:>10.1f} {row.raw:>10.1f} {row.ratio:>7.2f}"
            f" {row.target:>7.2f}{mark}"
        )
    return "\n".join(lines)
