"""Supervised cross-entropy on the trained tokens.

    loss_t = -logprob_t

In a run the sequences are the sampled ones whose advantage is positive: the policy imitates the better part of its own
replies (rejection sampling fine-tuning; RAFT, arXiv:2304.06767). Given demonstrations, it is plain fine-tuning.
"""

from __future__ import annotations

from learner.objectives.tokens import Losses, Tokens


def cross_entropy(tokens: Tokens) -> Losses:
    """The losses of a row's trained tokens."""
    return Losses.unclipped(-tokens.logprobs)
