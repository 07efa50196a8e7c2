"""A run's figures by step, drawn: on the terminal in braille dots, and to a PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.errors import ConfigError

CURVES = (
    "reward", "eval_reward", "k3", "ratio", "entropy", "length", "staleness", "grad_norm", "tokens_per_second", "mfu",
)  # fmt: skip
"""What is drawn unless told otherwise: whether it learns, whether it is stable, whether the hardware is used."""

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character's dots, by row and column."""


def values_of(records: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a figure, where it was logged. Raises ConfigError, with the names there are, for none."""
    points = [(float(record["step"]), float(record[name])) for record in records if name in record]
    if records and not points:
        known = ", ".join(sorted({key for record in records for key in record} - {"step"}))
        raise ConfigError(f"no step logged {name!r}; the figures there are: {known}")
    return [step for step, _ in points], [value for _, value in points]


def terminal_plot(steps: Sequence[float], values: Sequence[float], *, width: int = 60, height: int = 6) -> list[str]:
    """A curve as `height` lines of text, at most `width` characters of braille and a scale at the left.

    More points than columns of dots are averaged, column by column.
    """
    if not values:
        return []
    columns = min(2 * width, max(2, len(values)))
    first, last = steps[0], steps[-1]
    span = (last - first) or 1.0
    sums, counts = [0.0] * columns, [0] * columns
    for step, value in zip(steps, values, strict=True):
        column = min(columns - 1, int((step - first) / span * (columns - 1) + 0.5))
        sums[column] += value
        counts[column] += 1
    low, high = min(values), max(values)
    scale = (4 * height - 1) / ((high - low) or 1.0)
    cells = [[0] * ((columns + 1) // 2) for _ in range(height)]
    before: int | None = None
    for column in range(columns):
        if not counts[column]:
            continue
        row = 4 * height - 1 - round((sums[column] / counts[column] - low) * scale)
        for dot in range(min(row, row if before is None else before), max(row, row if before is None else before) + 1):
            cells[dot // 4][column // 2] |= DOTS[dot % 4][column % 2]
        before = row
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"] if height > 1 else [f"{high:.4g}"]
    margin = max(len(label) for label in labels)
    return [
        f"{label:>{margin}} ┤" + "".join(chr(0x2800 + bits) for bits in line)
        for label, line in zip(labels, cells, strict=True)
    ]


def png_plot(path: Path, title: str, records: Sequence[Mapping[str, float]], names: Sequence[str]) -> None:
    """Write every curve, one below the other, to a PNG. Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib: `pip install matplotlib`, or leave --out away for the terminal alone"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(names) // 3)
    figure, axes = pyplot.subplots(rows, min(3, len(names)), figsize=(12, 2.6 * rows), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        axis.plot(*values_of(records, name), linewidth=1.2)
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    figure.suptitle(title)
    figure.supxlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
