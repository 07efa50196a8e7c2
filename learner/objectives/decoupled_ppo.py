"""Decoupled PPO: clip against a proximal policy, correct for the behaviour policy.

With p_t a proximal policy's logprob, u_t = exp(logprob_t - p_t), and sg the stop of the gradient:

    loss_t = -sg(min(exp(p_t - behaviour_t), ratio_max)) * min(u_t * A_t, clip(u_t, 1 - clip_low, 1 + clip_high) * A_t)

arXiv:2110.00641; for asynchronous training of language models: AReaL, arXiv:2505.24298. The clip
then limits the update, not the staleness of the data.

proximal = "recomputed": the policy as the step finds it. A step is one update, so p_t = sg(logprob_t), u_t is 1, and
nothing is clipped.
proximal = "interpolated": p_t = behaviour_t / d + (1 - 1 / d) * sg(logprob_t) for a token that is d > 0 versions old,
and sg(logprob_t) for a fresh one (A-3PO, arXiv:2512.06547): the older the token, the nearer is its proximal policy to
the current one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.objectives.tokens import LOG_RATIO_LIMIT, Losses, Tokens, surrogate


def decoupled_ppo(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    ratio_max: float,
    proximal: Literal["recomputed", "interpolated"],
) -> Losses:
    """The losses of a row's trained tokens."""
    near = tokens.logprobs.detach() if proximal == "recomputed" else _interpolated(tokens)
    weight = (near - tokens.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=ratio_max)
    ratio = (tokens.logprobs - near).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    losses = surrogate(ratio, tokens.advantages, clip_low, clip_high)
    return Losses(weight * losses.loss, losses.clipped_low, losses.clipped_high)


def _interpolated(tokens: Tokens) -> Tensor:
    share = torch.where(tokens.staleness > 0, 1 / tokens.staleness.clamp(min=1), 0).to(tokens.logprobs.dtype)
    return share * tokens.behaviour + (1 - share) * tokens.logprobs.detach()
