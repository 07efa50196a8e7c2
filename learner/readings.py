"""The figures of a step, by the names people know, and the file that gets a line of them per step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from learner.batch import BatchFigures
from learner.truth import TruthReport

if TYPE_CHECKING:
    from learner.model import StepStats

STEP_LOG = "steps.jsonl"
"""The file in the run directory that gets one line per step."""


def step_figures(
    figures: BatchFigures, stats: StepStats, report: TruthReport, seconds: Mapping[str, float]
) -> dict[str, float]:
    """One flat table of a step. `seconds`: wait, train and commit."""
    return {
        "reward": figures.reward,
        "reward_std": figures.reward_std,
        "staleness": figures.staleness_mean,
        "staleness_max": float(figures.staleness_max),
        "length": figures.length_mean,
        "truncated": figures.truncated,
        "episodes": float(figures.episodes),
        "signal_groups": float(figures.signal_groups),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "ratio": stats.ratio_mean,
        "clip_low": stats.clip_low_fraction,
        "clip_high": stats.clip_high_fraction,
        "k1": stats.k1,
        "k3": stats.k3,
        "kl": stats.kl,
        "entropy": stats.entropy,
        "lr": stats.lr,
        "packed_fill": stats.packed_fill,
        "mfu": stats.mfu,
        "peak_memory": float(stats.peak_memory),
        "truth_mean": report.overall.mean,
        "truth_p99": report.overall.percentile99,
        "sampled_tokens": float(figures.sampled_tokens),
        "trained_tokens": float(stats.trained_tokens),
        "computed_tokens": float(stats.computed_tokens),
        "tokens_per_second": stats.computed_tokens / max(seconds["train"], 1e-9),
        **{f"seconds_{part}": value for part, value in (*seconds.items(), *stats.seconds.items())},
    }


class StepLog:
    """Appends steps to `steps.jsonl` in `directory`, or other records to a file `name`; without a directory, nowhere.

    Whoever begins, or goes on, puts a file of its own in the place of the one that was there. So a learner that was
    displaced without knowing it writes into a file that nobody sees any more.
    """

    def __init__(self, directory: Path | None, name: str = STEP_LOG) -> None:
        self._path = directory / name if directory is not None else None
        self._file: IO[str] | None = None

    def begin(self) -> None:
        """A new incarnation: the file starts empty."""
        self._replace([])

    def keep_until(self, step: int) -> int:
        """Going on from `step`: drop torn lines and those of steps that do not count any more.

        Returns the last step that needs no more logging.
        """
        if self._path is None:
            return step
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        self._replace(kept)
        return int(json.loads(kept[-1])["step"]) if kept else 0

    def _replace(self, lines: Sequence[str]) -> None:
        if self._path is None:
            return
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".draft")
        self._file = draft.open("w")
        self._file.writelines(lines)
        self._file.flush()
        draft.replace(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Log one step, or whatever the file is of."""
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
