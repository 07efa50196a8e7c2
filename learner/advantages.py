"""How much better than its siblings an episode was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Advantage = Literal["grpo", "grpo_no_std", "dr_grpo", "rloo"]

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL does, so that nearly equal rewards are not blown up."""

EQUAL = 1e-9
"""Rewards that differ by less than this, relative to the largest, differ by rounding only."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that it teaches anything."""
    if len(rewards) < 2:
        return False
    values = np.asarray(rewards, dtype=np.float64)
    return bool(np.ptp(values) > EQUAL * max(1.0, float(np.abs(values).max())))


def group_advantages(rewards: Sequence[float], kind: Advantage) -> npt.NDArray[np.float64]:
    """The advantage of each episode of one group, float64 [episodes]; zeros when the rewards do not differ.

    grpo: (r - mean) / (std + 1e-4), std with n - 1 as TRL has it (DeepSeekMath, arXiv:2402.03300, section 4.1).
    grpo_no_std, dr_grpo: r - mean, without the bias towards groups of little variance (Dr. GRPO, arXiv:2503.20783).
    rloo: r - the mean of the others' r, an unbiased baseline (arXiv:2402.14740).

    Raises ValueError when a reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if not has_signal(rewards):
        return np.zeros(len(values))
    centred: npt.NDArray[np.float64] = values - values.mean()
    match kind:
        case "grpo":
            return np.asarray(centred / (values.std(ddof=1) + STD_EPSILON))
        case "rloo":
            return centred * len(values) / (len(values) - 1)
        case "grpo_no_std" | "dr_grpo":
            return centred
