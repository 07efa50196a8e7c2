"""Masked importance sampling: the policy gradient, without what is too far off-policy.

With c_t the ratio of the token (importance_level = "token"), or the product over its sequence ("sequence"):

    loss_t = -sg(c_t) * A_t * exp(logprob_t - sg(logprob_t))    where ratio_min <= c_t <= ratio_max, else 0

IcePop ("Small Leak Can Sink a Great Ship", 2025) for tokens; masked sequences: Liu et al., "When Speed Kills Stability"
(2025). A weight beyond the bounds says that the logprobs disagree, not that the token is worth more.
"""

from __future__ import annotations

from typing import Literal

import torch

from learner.objectives.tokens import Losses, Tokens, one
from learner.objectives.truncated_is import importance_ratio


def masked_is(
    tokens: Tokens, *, ratio_min: float, ratio_max: float, importance_level: Literal["token", "sequence"]
) -> Losses:
    """The losses of a row's trained tokens."""
    ratio = importance_ratio(tokens, importance_level)
    low, high = ratio < ratio_min, ratio > ratio_max
    weight = torch.where(low | high, 0, ratio)
    return Losses(-weight * tokens.advantages * one(tokens.logprobs), clipped_low=low, clipped_high=high)
