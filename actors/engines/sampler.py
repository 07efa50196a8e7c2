"""Draws one token per row from logits, each row by its own rules and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.engines.base import Sampling

BLOCK = 256
"""The inverse of the distribution function is searched in two levels, blocks of this many tokens and then tokens:
summing 50,000 probabilities one after the other in double precision for each row would take longer than a layer."""


def sample(
    logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[np.random.Generator]
) -> tuple[list[int], list[float]]:
    """One token id and its logprob for each row of `logits` [rows, vocabulary].

    A row with temperature 0 takes its most likely token, with the logprob of the unscaled logits. Any other row draws
    by inversion of its distribution function at one uniform number of its generator, so its draw does not depend on
    which rows stand beside it; the logprob is that of the distribution drawn from, after temperature, top_k and
    top_p. Logits that are not numbers give a logprob that is not finite.
    """
    if not samplings:
        return [], []
    scores = logits.float()
    if any(sampling.temperature not in (0.0, 1.0) for sampling in samplings):
        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        scores = scores / torch.tensor(temperatures, device=scores.device)[:, None]
    filtered = [row for row, rules in enumerate(samplings) if rules.temperature and (rules.top_k or rules.top_p < 1)]
    if filtered:
        scores = scores.clone()
        for row in filtered:
            scores[row] = _restrict(scores[row], samplings[row].top_k, samplings[row].top_p)
    logprobs = torch.log_softmax(scores, dim=-1)
    random = [row for row, sampling in enumerate(samplings) if sampling.temperature]
    uniform = [generators[row].random() for row in random]
    if len(random) == len(samplings):
        picked = _invert(logprobs.exp(), uniform)
    else:
        picked = logprobs.argmax(dim=-1)
        if random:
            rows = torch.tensor(random, device=logits.device)
            picked[rows] = _invert(logprobs[rows].exp(), uniform)
    chosen = logprobs.gather(1, picked[:, None])[:, 0]
    return picked.tolist(), chosen.tolist()


def _invert(weights: Tensor, uniform: Sequence[float]) -> Tensor:
    """For each row of `weights` [rows, n] the first index whose cumulative weight exceeds `uniform` of the total."""
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).reshape(len(weights), -1, BLOCK)
    upto = weights.sum(dim=-1).double().cumsum(dim=-1)
    target = torch.tensor(uniform, dtype=torch.float64, device=weights.device)[:, None] * upto[:, -1:]
    block = (upto <= target).sum(dim=-1, keepdim=True).clamp_(max=upto.shape[1] - 1)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = weights.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0].double()
    index = (inside.cumsum(dim=-1) <= target - before).sum(dim=-1)
    # Rounding may place the target beyond the block's last weight; what has no weight is never drawn.
    last = BLOCK - 1 - (inside.flip(-1) > 0).int().argmax(dim=-1)
    return block[:, 0] * BLOCK + torch.minimum(index, last)


def _restrict(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """`scores` [n] with -inf outside the `top_k` best, then outside the smallest set that holds `top_p` of the rest."""
    ranked, order = scores.sort(descending=True, stable=True)
    if top_k:
        ranked[top_k:] = float("-inf")
    if top_p < 1:
        probabilities = ranked.softmax(dim=-1)
        ranked[probabilities.cumsum(dim=-1) - probabilities >= top_p] = float("-inf")
        ranked[0] = scores[order[0]]
    return torch.empty_like(scores).scatter_(0, order, ranked)
