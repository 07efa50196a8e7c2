"""DAPO: the clipped surrogate with a higher upper bound, normalised by the step's tokens.

    loss_t = -min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)

averaged over the tokens of the step and not over each sequence's mean, so that a long reply counts by its length.
arXiv:2503.14476, equation 8. Its other two parts stand elsewhere: the soft punishment of overlong replies in
`learner.shaping`, the replacement of groups without signal in `learner.buffer`.
"""

from __future__ import annotations

from learner.objectives.tokens import Losses, Tokens, surrogate


def dapo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Losses:
    """The losses of a row's trained tokens."""
    return surrogate(tokens.log_ratio.exp(), tokens.advantages, clip_low, clip_high)
