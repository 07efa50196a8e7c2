"""What objectives take and give: the trained tokens of one packed row, and a loss for each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""The log ratio is held within this, so that one absurd token gives a large number and not infinity."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The m trained tokens of a row, [m] each. A sequence is never cut: all of its trained tokens are here."""

    logprobs: Tensor
    """Under the current policy; the only one that carries a gradient."""
    behaviour: Tensor
    """Under the policy that sampled."""
    advantages: Tensor
    staleness: Tensor
    """int64, versions between the policy that sampled the token and the head."""
    sequence: Tensor
    """int64, which sequence a token belongs to: 0 .. the row's sequences - 1."""
    teacher: Tensor | None = None
    """Under a teacher, where the objective learns from one."""

    @property
    def log_ratio(self) -> Tensor:
        """log(current / behaviour), within LOG_RATIO_LIMIT."""
        return (self.logprobs - self.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def sums(self, values: Tensor) -> Tensor:
        """The sum of `values` over each token's whole sequence, [m]."""
        return self._totals(values)[self.sequence]

    def means(self, values: Tensor) -> Tensor:
        """The mean of `values` over each token's whole sequence, [m]."""
        return (self._totals(values) / self._totals(torch.ones_like(values)))[self.sequence]

    def _totals(self, values: Tensor) -> Tensor:
        count = int(self.sequence.max()) + 1 if len(self.sequence) else 0
        return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, self.sequence, values)


@dataclass(frozen=True, slots=True)
class Losses:
    """An objective's loss of each token, before it is weighted, and which tokens' gradient it cut off."""

    loss: Tensor
    """[m]"""
    clipped_low: Tensor
    """bool [m], no gradient since the ratio is below its lower bound"""
    clipped_high: Tensor
    """bool [m], no gradient, or a bounded one, since the ratio is above its upper bound"""

    @classmethod
    def unclipped(cls, loss: Tensor) -> Losses:
        """Losses of an objective that cuts nothing off."""
        none = torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss, none, none)


def surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Losses:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A): PPO's clipped surrogate (arXiv:1707.06347, eq. 7).

    All [m]; `ratio` carries the gradient.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Losses(
        loss=-torch.minimum(ratio * advantages, clipped * advantages),
        clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
    )


def one(logprobs: Tensor) -> Tensor:
    """1 for each token, with the gradient of its logprob: a factor that turns a weight into a policy gradient."""
    return (logprobs - logprobs.detach()).exp()
