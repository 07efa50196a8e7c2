"""GSPO: the clipped surrogate with one ratio for a whole sequence.

    s_i    = exp(mean over i's tokens of logprob_t - behaviour_t)
    loss_t = -min(s_i * A_t, clip(s_i, 1 - clip_low, 1 + clip_high) * A_t)

arXiv:2507.18071, equations 5 and 7: the reward belongs to the sequence, so the correction does too. s_i is a geometric
mean, hence the tiny bounds. What is averaged over tokens with `normalisation = "sequence"` is the paper's objective. A
conversation that was forked is several sequences here, each with a ratio of its own.
"""

from __future__ import annotations

from learner.objectives.tokens import Losses, Tokens, surrogate


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Losses:
    """The losses of a row's trained tokens."""
    return surrogate(tokens.means(tokens.log_ratio).exp(), tokens.advantages, clip_low, clip_high)
