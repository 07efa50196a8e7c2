"""How much of the device a step used: model FLOPs over what the device could have done in that time (MFU).

Counted is what the mathematics needs: each weight of a linear layer once forwards and once backwards (2 FLOPs each; the
base is frozen, so it has no gradient of its own), the adapter's weights once more, and attention over exactly the pairs
that see each other. Recomputation by gradient checkpointing does not count, nor does the logits' chunking.
PaLM, arXiv:2204.02311, appendix B, with the backward pass of a frozen base.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from learner.packing import PackedRow

KNOWN_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Dense bfloat16 FLOPs a second by a part of the device's name (data sheets). The first that fits holds."""

MEASURED_SIZE = 1024
"""Rows and columns of the matrices that are multiplied where no peak is known."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the count needs to know of a model."""

    frozen: int
    """Weights of the decoder's linear layers that are not trained."""
    trained: int
    head: int
    """Weights of the output head."""
    attention: int
    """Layers * attention heads * head size."""

    @classmethod
    def of(cls, decoder: nn.Module, head: nn.Module) -> Shape:
        """Read the shape off a decoder (a `transformers` model without its head) and its head."""
        matrices = [p for p in decoder.parameters() if p.dim() == 2]
        embeddings = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
        config = decoder.config.get_text_config()  # type: ignore[operator, union-attr]
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            frozen=sum(p.numel() for p in matrices if not p.requires_grad and id(p) not in embeddings),
            trained=sum(p.numel() for p in matrices if p.requires_grad),
            head=sum(p.numel() for p in head.parameters() if p.dim() == 2),
            attention=config.num_hidden_layers * config.num_attention_heads * head_size,
        )


def row_flops(shape: Shape, row: PackedRow) -> float:
    """Forward and backward FLOPs of one row. A token sees as many as its position says, itself included."""
    tokens, trained = len(row), len(row.target)
    pairs = float(np.sum(row.position_ids + 1))
    linear = tokens * (4 * shape.frozen + 6 * shape.trained) + trained * 4 * shape.head
    # Scores and mixing, 2 FLOPs each a pair and channel; backwards twice that.
    return linear + pairs * shape.attention * (4 + 8)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second that `device` is known or measured to reach in `dtype`."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        known = next((peak for part, peak in KNOWN_PEAKS.items() if part in name), None)
        if known is not None:
            return known
    return _measured(device.type, dtype, torch.get_num_threads())


@cache
def _measured(device: str, dtype: torch.dtype, threads: int) -> float:
    """The best of five products of two matrices; `threads` tells measurements apart."""
    matrix = torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=dtype, device=device)
    best = 0.0
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * MEASURED_SIZE**3 / (time.perf_counter() - began))
    return best
