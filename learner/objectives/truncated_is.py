"""Truncated importance sampling: the policy gradient, each weight cut at a bound.

With c_t the ratio of the token (importance_level = "token"), or the product over its sequence ("sequence"):

    loss_t = -sg(min(c_t, ratio_max)) * A_t * exp(logprob_t - sg(logprob_t))

whose gradient is -min(c_t, ratio_max) * A_t * d logprob_t. Ionides, "Truncated Importance Sampling" (2008); for engines
whose logprobs differ from the trainer's: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (2025). The bias grows where weights are cut, the variance stays bounded.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.objectives.tokens import LOG_RATIO_LIMIT, Losses, Tokens, one


def truncated_is(tokens: Tokens, *, ratio_max: float, importance_level: Literal["token", "sequence"]) -> Losses:
    """The losses of a row's trained tokens."""
    ratio = importance_ratio(tokens, importance_level)
    loss = -ratio.clamp(max=ratio_max) * tokens.advantages * one(tokens.logprobs)
    return Losses(loss, torch.zeros_like(ratio, dtype=torch.bool), clipped_high=ratio > ratio_max)


def importance_ratio(tokens: Tokens, level: Literal["token", "sequence"]) -> Tensor:
    """Current over behaviour probability of each token, or of the whole sequence it belongs to; no gradient, [m]."""
    log_ratio = tokens.log_ratio.detach()
    if level == "sequence":
        log_ratio = tokens.sums(log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(log_ratio)
