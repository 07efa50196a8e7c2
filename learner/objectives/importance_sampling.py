"""The policy gradient on off-policy tokens, each corrected by its own ratio.

With r_t = exp(logprob_t - behaviour_t):

    loss_t = -r_t * A_t,    gradient  -r_t * A_t * d logprob_t

The first-order surrogate of TRPO (arXiv:1502.05477), token by token. Nothing bounds r_t: for data that is
nearly on-policy.
"""

from __future__ import annotations

from learner.objectives.tokens import Losses, Tokens


def importance_sampling(tokens: Tokens) -> Losses:
    """The losses of a row's trained tokens."""
    return Losses.unclipped(-tokens.log_ratio.exp() * tokens.advantages)
