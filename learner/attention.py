"""Attention over a packed row, tile by tile.

`transformers` would take the row's mask as one 4D tensor and hand it to SDPA unchanged, which is right and slow: the
work grows with the row's length squared, and nearly all of it is masked out (a third of a step for 1,300 tokens of a
135M model on a CPU). Registered as an attention implementation of its own, this computes only the tiles of
`packing.tiles`, each with `transformers`' own SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from learner.packing import PackedRow, tiles

IMPLEMENTATION = "farflung_tiles"
"""The name under which `transformers` knows it (`attn_implementation`)."""

TILE = 256
"""Tokens a tile. Enough to share a call among short replies; so few that masked work stays below a tenth."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A `packing.Tile` with its mask on the device: `bias` [1, 1, queries, keys] is added to the scores."""

    length: int
    prefix: tuple[int, int, int] | None
    bias: Tensor | None


def attention_tiles(row: PackedRow, device: torch.device, dtype: torch.dtype) -> list[AttentionTile]:
    """The tiles of `row`, made once and shared by all layers."""
    found = []
    for tile in tiles(row, TILE):
        bias = None
        if tile.visible is not None:
            seen = torch.from_numpy(tile.visible).to(device)
            bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))[None, None]
        found.append(AttentionTile(tile.stop - tile.start, tile.prefix, bias))
    return found


def tiled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tiles: Sequence[AttentionTile] | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it: query [1, heads, n, d], key and value [1, key heads, n, d].

    Returns [1, n, heads, d]. Without `tiles` it is plain SDPA, causal unless a mask says otherwise.
    """
    if tiles is None:
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
        return output, None
    lengths = [tile.length for tile in tiles]
    queries, keys, values = (torch.split(states, lengths, dim=2) for states in (query, key, value))
    outputs = []
    for index, tile in enumerate(tiles):
        seen = [keys[index], values[index]]
        if tile.prefix is not None:
            home, start, stop = tile.prefix
            seen = [torch.cat((states[home][:, :, start:stop], states[index]), dim=2) for states in (keys, values)]
        outputs.append(sdpa_attention_forward(module, queries[index], *seen, tile.bias, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(IMPLEMENTATION, tiled_attention)
