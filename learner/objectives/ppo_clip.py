"""The clipped surrogate of PPO, with asymmetric bounds and a second clip for what was punished.

With r_t = exp(logprob_t - behaviour_t):

    l_t    = min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)
    loss_t = -l_t                              where A_t >= 0
    loss_t = -max(l_t, dual_clip * A_t)        where A_t < 0

PPO, arXiv:1707.06347, equation 7; asymmetric bounds: DAPO, arXiv:2503.14476, section 3.1; the dual clip:
arXiv:1912.09729. Without the last, a punished token that has become likely pulls with an unbounded weight r_t.
"""

from __future__ import annotations

import torch

from learner.objectives.tokens import Losses, Tokens, surrogate


def ppo_clip(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float) -> Losses:
    """The losses of a row's trained tokens. `dual_clip` 0 means none."""
    ratio = tokens.log_ratio.exp()
    losses = surrogate(ratio, tokens.advantages, clip_low, clip_high)
    if not dual_clip:
        return losses
    punished = tokens.advantages < 0
    bounded = torch.minimum(losses.loss, -dual_clip * tokens.advantages)
    return Losses(
        loss=torch.where(punished, bounded, losses.loss),
        clipped_low=losses.clipped_low,
        clipped_high=losses.clipped_high | (punished & (ratio > dual_clip)),
    )
