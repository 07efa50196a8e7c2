"""The clipped surrogate of PPO, per token, with the behaviour policy's logprobs as the denominator.

With r_t = exp(logprob_t - behaviour_t), the step's loss is

    -1/N * sum_t w_t * min(r_t * A_t, clip(r_t, 1 - low, 1 + high) * A_t)

PPO, arXiv:1707.06347, equation 7; the asymmetric bounds and the sum over the N trained tokens of the whole step, not
over each sequence's mean, are DAPO's (arXiv:2503.14476, sections 3.1 and 3.3). N is given, not counted here, so that
the gradient does not depend on how the step is split into rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""The log ratio is held within this, so that one absurd token gives a large number and not infinity."""


@dataclass(frozen=True, slots=True)
class ClipSums:
    """Detached sums over tokens, scalar tensors; divided by the step's trained tokens they are means."""

    ratio: Tensor
    clipped_low: Tensor
    """Tokens whose gradient vanished at the lower bound (negative advantage)."""
    clipped_high: Tensor
    """Tokens whose gradient vanished at the upper bound (positive advantage)."""
    k1: Tensor
    """-log r: an unbiased estimate of KL(behaviour || current), of high variance."""
    k3: Tensor
    """r - 1 - log r: unbiased and never negative. Both: Schulman, "Approximating KL divergence" (2020)."""

    @classmethod
    def none(cls, device: torch.device) -> ClipSums:
        """The sums over no tokens."""
        zero = torch.zeros((), device=device)
        return cls(ratio=zero, clipped_low=zero, clipped_high=zero, k1=zero, k3=zero)

    def __add__(self, other: ClipSums) -> ClipSums:
        return ClipSums(
            ratio=self.ratio + other.ratio,
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            k1=self.k1 + other.k1,
            k3=self.k3 + other.k3,
        )


def ppo_clip(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    step_tokens: int,
) -> tuple[Tensor, ClipSums]:
    """This row's share of the step's loss (a scalar), and the sums for the metrics.

    All four tensors are [tokens]; `logprobs` carries the gradient. `step_tokens` is N, the trained tokens of the step.
    """
    log_ratio = (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate).sum() / step_tokens
    with torch.no_grad():
        sums = ClipSums(
            ratio=ratio.sum(),
            clipped_low=((ratio < 1 - clip_low) & (advantages < 0)).sum(),
            clipped_high=((ratio > 1 + clip_high) & (advantages > 0)).sum(),
            k1=-log_ratio.sum(),
            k3=(ratio - 1 - log_ratio).sum(),
        )
    return loss, sums
