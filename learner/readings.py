"""The figures of a step, by the names people know, and the file that gets a line of them per step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
        "signal_groups": float(figures.signal_groups),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "ratio": stats.ratio_mean,
        "clip_low": stats.clip_low_fraction,
        "clip_high": stats.clip_high_fraction,
        "k1": stats.k1,
        "k3": stats.k3,
        "entropy": stats.entropy,
        "lr": stats.lr,
        "packed_fill": stats.packed_fill,
        "truth_mean": report.overall.mean,
        "truth_p99": report.overall.percentile99,
        "sampled_tokens": float(figures.sampled_tokens),
        "trained_tokens": float(stats.trained_tokens),
        "computed_tokens": float(stats.computed_tokens),
        "tokens_per_second": stats.computed_tokens / max(seconds["train"], 1e-9),
        **{f"seconds_{part}": value for part, value in seconds.items()},
    }


class StepLog:
    """Appends steps to `steps.jsonl` in `directory`; without a directory, nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / STEP_LOG if directory is not None else None

    def begin(self) -> None:
        """A new incarnation: the file starts empty."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def keep_until(self, step: int) -> int:
        """Going on from `step`: drop torn lines and those of steps that do not count any more.

        Returns the last step that needs no more logging.
        """
        if self._path is None:
            return step
        if not self._path.exists():
            return 0
        lines = self._path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if kept != lines:
            draft = self._path.with_suffix(".draft")
            draft.write_text("".join(kept))
            draft.replace(self._path)
        return int(json.loads(kept[-1])["step"]) if kept else 0

    def append(self, record: Mapping[str, float]) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
