"""On-policy distillation: the reverse KL to a teacher, estimated on what the student sampled.

With T_t the teacher's logprob of the sampled token and sg the stop of the gradient:

    loss_t = sg(min(r_t, ratio_max)) * sg(logprob_t - T_t) * logprob_t

Each token's gradient is (logprob_t - T_t) * d logprob_t, an unbiased estimate of that of KL(student || teacher) at this
place of the reply, weighted by r_t for the policy that sampled. arXiv:2306.13649 (GKD) and arXiv:2306.08543 (MiniLLM,
its single-step part). Advantages are not used: every reply teaches.
"""

from __future__ import annotations

from learner.objectives.tokens import Losses, Tokens


def distillation(tokens: Tokens, *, ratio_max: float) -> Losses:
    """The losses of a row's trained tokens. Raises ValueError without the teacher's logprobs."""
    if tokens.teacher is None:
        raise ValueError("distillation needs the teacher's logprobs of the trained tokens")
    ratio = tokens.log_ratio.exp().detach()
    penalty = (tokens.logprobs - tokens.teacher).detach()
    losses = Losses.unclipped(ratio.clamp(max=ratio_max) * penalty * tokens.logprobs)
    return Losses(losses.loss, losses.clipped_low, clipped_high=ratio > ratio_max)
