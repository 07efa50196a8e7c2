"""Logprobs of chosen tokens from hidden states, without ever holding logits for all of them.

A token's logprob is one number, so its gradient with respect to the hidden state is one vector of the hidden size:

    d logprob_t / d h_t = (W[y_t] - softmax(W h_t / T) W) / T

The forward pass computes it while a chunk's logits exist and keeps it; the backward pass only scales it. That costs
what an ordinary forward and backward costs, recomputes nothing, and serves any objective that is a function of the
logprobs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LOGITS_AT_ONCE = 1 << 24
"""Logits that exist at one time, 64 MB in float32: chunks large enough for full speed, small beside a model."""


def token_logprobs(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` [m] (int64) under softmax(head(hidden) / temperature), and that distribution's entropy.

    `hidden` is [m, hidden size]. Both results are float32 [m], in nats. The logprobs carry a gradient to `hidden`
    only (the head is frozen), the entropy none.
    """
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, temperature
    )
    return results


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        rows = max(1, LOGITS_AT_ONCE // len(weight))
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = functional.linear(hidden[chunk], weight, bias).float().div_(temperature)
            all_logprobs = logits.log_softmax(-1)
            del logits
            probabilities = all_logprobs.exp()
            logprobs[chunk] = all_logprobs.gather(1, targets[chunk, None])[:, 0]
            entropy[chunk] = -torch.linalg.vecdot(probabilities, all_logprobs)
            if slope is not None:
                expected = probabilities.to(weight.dtype) @ weight
                slope[chunk] = (weight[targets[chunk]] - expected) / temperature
        if slope is not None:
            ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradients[0][:, None] * slope).to(slope.dtype), None, None, None, None
