"""The KL divergence from the current policy to a reference, estimated on tokens that the behaviour policy sampled.

With d_t = logprob_t - reference_t, r_t = exp(logprob_t - behaviour_t), and sg the stop of the gradient:

    k1_t = d_t                       unbiased, of high variance
    k2_t = d_t^2 / 2                 biased a little
    k3_t = exp(-d_t) - 1 + d_t       unbiased, never negative

Schulman, "Approximating KL Divergence" (2020). The expectation is over the current policy, so each estimate is weighted
by r_t (for k3 as in DeepSeek-V3.2, arXiv:2512.02556). What enters the loss is

    k1: nothing; kl_coef * sg(d_t) is taken from the advantage, which the objective weights by its own ratio
    k2: sg(r_t) * k2_t
    k3: r_t * k3_t

and the gradient of each is r_t * d_t * d logprob_t, that of the divergence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.objectives.tokens import LOG_RATIO_LIMIT, Tokens

Estimator = Literal["k1", "k2", "k3"]


def kl(tokens: Tokens, reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimate for each token, in nats, weighted unless it is k1; [m]. `reference` [m]: its logprobs."""
    difference = (tokens.logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = tokens.log_ratio.exp()
    match estimator:
        case "k1":
            return difference
        case "k2":
            return ratio.detach() * difference.square() / 2
        case "k3":
            return ratio * (torch.exp(-difference) - 1 + difference)
