"""A row's share of a step's loss: the run's objective, the KL to the reference, and the sums for the metrics.

    loss = sum over the row's tokens of weight_t * (loss_t + kl_coef * kl_t)

The weights are those of `normalisation`, so the rows' losses and gradients add up to the step's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from broker.runspec import AlgorithmSection
from learner.objectives import OBJECTIVES
from learner.objectives.kl import kl
from learner.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Sums:
    """Detached sums over tokens, scalar tensors; divided by the step's trained tokens they are means."""

    ratio: Tensor
    """r = current / behaviour probability"""
    clipped_low: Tensor
    clipped_high: Tensor
    """Tokens whose gradient the objective cut off at its lower and upper bound."""
    k1: Tensor
    """-log r: an unbiased estimate of KL(behaviour || current), of high variance."""
    k3: Tensor
    """r - 1 - log r: unbiased and never negative. Both: Schulman, "Approximating KL divergence" (2020)."""
    kl: Tensor
    """The estimate of KL(current || reference) that the loss uses; 0 without one."""

    @classmethod
    def none(cls, device: torch.device) -> Sums:
        """The sums over no tokens."""
        zero = torch.zeros((), device=device)
        return cls(*(zero for _ in fields(cls)))

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def row_loss(
    tokens: Tokens, weights: Tensor, algorithm: AlgorithmSection, reference: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """The share of one row in the step's loss (a scalar), and its sums.

    `weights` [m] is what each token counts in the whole step. `reference` [m] are the logprobs under the reference
    policy; needed with `kl_coef`.
    """
    divergence = torch.zeros_like(tokens.logprobs)
    if algorithm.kl_coef and reference is not None:
        divergence = kl(tokens, reference, algorithm.kl_estimator)
    if algorithm.kl_coef and algorithm.kl_estimator == "k1":
        tokens = replace(tokens, advantages=tokens.advantages - algorithm.kl_coef * divergence.detach())
    losses = OBJECTIVES[algorithm.objective](tokens, **algorithm.parameters)
    per_token = losses.loss
    if algorithm.kl_coef and algorithm.kl_estimator != "k1":
        per_token = per_token + algorithm.kl_coef * divergence
    with torch.no_grad():
        log_ratio = tokens.log_ratio
        sums = Sums(
            ratio=log_ratio.exp().sum(),
            clipped_low=losses.clipped_low.sum(),
            clipped_high=losses.clipped_high.sum(),
            k1=-log_ratio.sum(),
            k3=(log_ratio.exp() - 1 - log_ratio).sum(),
            kl=divergence.sum(),
        )
    return (weights * per_token).sum(), sums
