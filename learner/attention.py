"""Attention over a packed row: by FlexAttention on a GPU, tile by tile on a CPU.

`transformers` would take the row's mask as one 4D tensor and hand it to SDPA unchanged, which is right and slow: the
work grows with the row's length squared, and nearly all of it is masked out (a third of a step for 1,300 tokens of a
135M model on a CPU). Registered as an attention implementation of its own, this computes only the tiles of
`packing.tiles`, those of like size in one call of `transformers`' own SDPA; or it gives FlexAttention the mask as a
rule: token k is seen from k up to the end of what descends from its segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from learner.packing import PackedRow, Tile, tiles

IMPLEMENTATION = "farflung_tiles"
"""The name under which `transformers` knows it (`attn_implementation`)."""

TILE = 256
"""Tokens a tile. Enough to share a tile among short replies; so few that masked work stays below a tenth."""

PADDING = 1.5
"""Tiles share a call until it would compute this many times the scores that they have by themselves."""


@dataclass(frozen=True, slots=True)
class TileCall:
    """Tiles that are computed in one call, padded to the largest."""

    queries: Tensor
    """int64 [tiles, q], places in the row; what is padded stands for place 0 and is thrown away"""
    keys: Tensor
    """int64 [tiles, k], places in the row; what is padded is seen by nobody"""
    bias: Tensor | None
    """[tiles, 1, q, k], added to the scores: 0 or -inf. None: plainly causal, nothing padded"""


@dataclass(frozen=True, slots=True)
class RowAttention:
    """How the attention of one row is computed; made once and shared by all layers."""

    calls: tuple[TileCall, ...]
    restore: Tensor
    """int64 [n], where each of the row's tokens stands among all calls' outputs"""


def row_attention(row: PackedRow, device: torch.device, dtype: torch.dtype) -> RowAttention | BlockMask:
    """How the attention of `row` is computed on `device`. `dtype` is that of the queries."""
    return block_mask(row, device) if device.type == "cuda" else tiled(row, device, dtype)


def block_mask(row: PackedRow, device: torch.device) -> BlockMask:
    """The row's mask for FlexAttention."""
    until = torch.from_numpy(row.seen_until()).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until[key])

    return create_block_mask(sees, None, None, len(row), len(row), device=device)


def tiled(row: PackedRow, device: torch.device, dtype: torch.dtype) -> RowAttention:
    """Cut `row` into tiles and gather tiles of like size into calls."""
    calls: list[TileCall] = []
    restore = np.zeros(len(row), dtype=np.int64)
    done = 0
    for lot in _alike(tiles(row, TILE)):
        q, k = _largest(lot)
        queries = np.zeros((len(lot), q), dtype=np.int64)
        keys = np.zeros((len(lot), k), dtype=np.int64)
        visible = np.zeros((len(lot), 1, q, k), dtype=np.bool_)
        # A query that sees nothing would give a softmax over nothing.
        visible[..., 0] = True
        for place, tile in enumerate(lot):
            own, seen = len(tile.queries), len(tile.keys)
            queries[place, :own] = tile.queries
            keys[place, :seen] = tile.keys
            visible[place, 0, :own, :seen] = tile.visible
            restore[tile.queries] = done + place * q + np.arange(own)
        done += queries.size
        causal = len(lot) == 1 and q == k and bool(np.array_equal(visible[0, 0], np.tri(q, dtype=np.bool_)))
        calls.append(
            TileCall(
                queries=torch.from_numpy(queries).to(device),
                keys=torch.from_numpy(keys).to(device),
                bias=None if causal else _bias(torch.from_numpy(visible).to(device), dtype),
            )
        )
    return RowAttention(tuple(calls), torch.from_numpy(restore).to(device))


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _alike(cut: Sequence[Tile]) -> list[list[Tile]]:
    """Tiles, largest first, in lots that padding does not blow up."""
    lots: list[list[Tile]] = []
    for tile in sorted(cut, key=lambda tile: -tile.visible.size):
        if lots:
            grown = [*lots[-1], tile]
            q, k = _largest(grown)
            if len(grown) * q * k <= PADDING * sum(each.visible.size for each in grown):
                lots[-1] = grown
                continue
        lots.append([tile])
    return lots


def _largest(lot: Sequence[Tile]) -> tuple[int, int]:
    """The most queries and the most keys of any tile."""
    return max(len(tile.queries) for tile in lot), max(len(tile.keys) for tile in lot)


def tiled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row: RowAttention | BlockMask | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it: query [1, heads, n, d], key and value [1, key heads, n, d].

    Returns [1, n, heads, d]. Without `row` it is plain SDPA, causal unless a mask says otherwise.
    """
    if row is None:
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
        return output, None
    if isinstance(row, BlockMask):
        scale = kwargs.get("scaling")
        mixed = _flex(query.device.type)(
            query, key, value, block_mask=row, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return mixed.transpose(1, 2).contiguous(), None
    outputs = []
    for call in row.calls:
        gathered = (
            _gather(states, places) for states, places in ((query, call.queries), (key, call.keys), (value, call.keys))
        )
        outputs.append(sdpa_attention_forward(module, *gathered, call.bias, **kwargs)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, row.restore)[None], None


@cache
def _flex(device: str) -> Any:
    """FlexAttention, compiled where it has a kernel; on a CPU as it is, for tests."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """[1, heads, n, d] at `places` [tiles, length], as [tiles, heads, length, d]."""
    chosen = states[0].transpose(0, 1).index_select(0, places.flatten())
    return chosen.view(*places.shape, *chosen.shape[1:]).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, tiled_attention)
