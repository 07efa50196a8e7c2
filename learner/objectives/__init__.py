"""Objectives: what a step minimises, one a file, each with its formula and source.

An objective gives a loss for each trained token of a row; `normalisation` says what each token counts in the whole
step. Names and parameters are those of `broker.runspec.OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable

from learner.objectives.cispo import cispo
from learner.objectives.cross_entropy import cross_entropy
from learner.objectives.dapo import dapo
from learner.objectives.decoupled_ppo import decoupled_ppo
from learner.objectives.distillation import distillation
from learner.objectives.gspo import gspo
from learner.objectives.importance_sampling import importance_sampling
from learner.objectives.masked_is import masked_is
from learner.objectives.ppo_clip import ppo_clip
from learner.objectives.tokens import Losses, Tokens
from learner.objectives.truncated_is import truncated_is

OBJECTIVES: dict[str, Callable[..., Losses]] = {
    "importance_sampling": importance_sampling,
    "ppo_clip": ppo_clip,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
    "truncated_is": truncated_is,
    "masked_is": masked_is,
    "cross_entropy": cross_entropy,
    "distillation": distillation,
}
"""By the name that a run's `algorithm.objective` gives."""

__all__ = ["OBJECTIVES", "Losses", "Tokens"]
