"""What an evaluation says of a version: means over tasks, pass@k, and how sure they are. Pure arithmetic.

The samples of one task are correlated, so a task counts as one observation: every figure is the mean of one value a
task, and its interval is that of a mean over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

import msgspec

CONFIDENCE = 0.95

Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Half the width of a normal distribution's 95%, in standard deviations."""


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One task's samples: the reward and the sampled tokens of each, and how many were cut."""

    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its 95% interval; no interval for a single task."""

    mean: float
    low: float | None = None
    high: float | None = None


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The chance that one of `k` samples of a task is a success, estimated from `successes` of `samples`.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv:2107.03374, equation 1). Raises ValueError unless
    0 <= successes <= samples and 1 <= k <= samples.
    """
    if not (0 <= successes <= samples and 1 <= k <= samples):
        raise ValueError(f"expected 0 <= successes <= samples and 1 <= k <= samples, got {successes}, {samples}, {k}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << place for place in range(most.bit_length())]


def estimate(values: Sequence[float], *, bounds: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """The mean of `values`, one a task, and its normal interval: mean +- 1.96 s / sqrt(n), cut at `bounds`.

    Too narrow for a handful of tasks, and of no width where all tasks have the same value.
    """
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    half = Z * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(bounds[0], mean - half), min(bounds[1], mean + half))


def figures_of(scores: Sequence[TaskScore], *, success: float) -> dict[str, float]:
    """The figures of an evaluation by name: `reward`, `pass_at_1`, `pass_at_2`, ... each with `_low` and `_high`;
    `length`, the mean of sampled tokens, and `truncated`, the share of samples that a limit cut.

    A sample is a success when its reward is at least `success`. Every score has the same number of samples; needs one.
    """
    samples = len(scores[0].rewards)
    found = _named("reward", estimate([fmean(score.rewards) for score in scores]))
    for k in powers_of_two(samples):
        chances = [pass_at_k(samples, sum(reward >= success for reward in score.rewards), k) for score in scores]
        found |= _named(f"pass_at_{k}", estimate(chances, bounds=(0.0, 1.0)))
    found["length"] = fmean(length for score in scores for length in score.lengths)
    found["truncated"] = sum(score.truncated for score in scores) / (samples * len(scores))
    return found


def _named(name: str, found: Estimate) -> dict[str, float]:
    figures = {name: found.mean}
    if found.low is not None and found.high is not None:
        figures |= {f"{name}_low": found.low, f"{name}_high": found.high}
    return figures


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation, as it lies in the store."""

    run: str
    incarnation: str
    version: int
    adapter: str | None
    """The adapter that served every token; None: the base model."""
    step: int
    """The step that made the version."""
    source: str
    samples: int
    """Of each task."""
    tasks: int
    """Tasks that the figures are of: those whose samples all came to a reward."""
    failed_tasks: int
    """Tasks that are not among them."""
    failures: list[str] = []
    """Why not, the first few reasons."""
    success: float
    temperature: float
    top_p: float
    max_new_tokens: int
    figures: dict[str, float]
    seconds: float
    time: float
    """When it ended, in seconds since 1970 by its evaluator's clock."""

    def flat(self) -> dict[str, Any]:
        """One flat JSON object, as a line of `evals.jsonl`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in plain.items() if name != "figures"} | self.figures

    def numbers(self) -> dict[str, float]:
        """What trackers, plots and gauges are told."""
        told = {"tasks": self.tasks, "failed_tasks": self.failed_tasks, "seconds": self.seconds}
        return {**self.figures, **{name: float(value) for name, value in told.items()}, "version": float(self.version)}


def sentence(figures: Mapping[str, float]) -> str:
    """Figures in a line, for people; `figures` as `Evaluation.numbers` names them."""
    named = [("reward", "reward")]
    named += [(f"pass_at_{k}", f"pass@{k}") for k in powers_of_two(1 << 20) if f"pass_at_{k}" in figures]
    shown = [f"{label} {_shown(name, figures)}" for name, label in named]
    failed = figures.get("failed_tasks", 0.0)
    tasks = f"{figures['tasks']:.0f} tasks" + (f", {failed:.0f} more failed" if failed else "")
    return f"{', '.join(shown)} ({tasks})"


def _shown(name: str, figures: Mapping[str, float]) -> str:
    low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{figures[name]:.3f}{interval}"
