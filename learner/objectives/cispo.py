"""CISPO: the policy gradient with a clipped importance weight.

With sg the stop of the gradient:

    loss_t = -sg(min(r_t, ratio_max)) * A_t * logprob_t

MiniMax-M1, arXiv:2506.13585, equations 4 and 5, without a lower bound as there. Clipping the weight, not the update,
keeps every token's gradient, rare and decisive ones included.
"""

from __future__ import annotations

from learner.objectives.tokens import Losses, Tokens


def cispo(tokens: Tokens, *, ratio_max: float) -> Losses:
    """The losses of a row's trained tokens."""
    ratio = tokens.log_ratio.exp().detach()
    losses = Losses.unclipped(-ratio.clamp(max=ratio_max) * tokens.advantages * tokens.logprobs)
    return Losses(losses.loss, losses.clipped_low, clipped_high=ratio > ratio_max)
