"""Attention over a flat batch: all tokens of one step side by side in a single row, none of them padding.

The model's linear layers, norms and embeddings see `[1, tokens, ...]`; only attention must know which tokens belong
together. transformers lets a library name an attention function of its own (`AttentionInterface`), and calls it after
the rotary embedding with whatever keyword the forward was given. `ragged_attention` is that function and `step` that
keyword: each part of the step writes its new keys and values where its sequence keeps them and attends to them there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.engines.rows import Band

ATTENTION = "farflung_ragged"
"""The name under which transformers knows `ragged_attention`."""

MASK_MULTIPLE = 8
"""Keys are read in multiples of this many: the CUDA kernels want masks whose rows are aligned."""

Place = slice | Tensor
"""Which of the step's tokens a part owns."""


class Part(Protocol):
    """Some tokens of a step that attend in one call.

    `query` is [tokens, heads, head_dim], `key` and `value` are [tokens, kv_heads, head_dim], over all tokens of the
    step; the part writes its own tokens' rows of `out` (shaped like `query`). `window` is the layer's sliding window.
    """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One forward.

    `segments` are (first token, end, adapter) and cover the tokens in order; `keep` lists the tokens whose logits
    are wanted.
    """

    token_ids: list[int]
    positions: list[int]
    parts: list[Part]
    segments: list[tuple[int, int, str | None]]
    keep: list[int]


@dataclass(slots=True)
class PromptPart:
    """A chunk of one prompt: tokens `start` to `start + count` of the sequence that `cache` belongs to.

    `cache` [2, layers, n, kv_heads, head_dim] holds the sequence's tokens before `start` already.
    """

    cache: Tensor
    start: int
    count: int
    tokens: slice
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        end = self.start + self.count
        keys, values = self.cache[0, layer], self.cache[1, layer]
        keys[self.start : end] = key[self.tokens]
        values[self.start : end] = value[self.tokens]
        mask = self._mask(window, query)
        attended = scaled_dot_product_attention(
            query[self.tokens].transpose(0, 1).unsqueeze(0),
            keys[:end].transpose(0, 1).unsqueeze(0),
            values[:end].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None and self.count > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[self.tokens] = attended[0].transpose(0, 1)

    def _mask(self, window: int | None, query: Tensor) -> Tensor | None:
        if window not in self._masks:
            end = self.start + self.count
            narrow = window is not None and end > window
            if narrow or (self.start > 0 and self.count > 1):
                at = torch.arange(self.start, end, device=query.device)[:, None]
                keys = torch.arange(end, device=query.device)[None]
                self._masks[window] = _additive(_visible(keys, at, window), query.dtype)
            else:
                self._masks[window] = None
        return self._masks[window]


@dataclass(slots=True)
class BandPart:
    """One new token of each row of a band. `lengths` [rows] are the tokens that each row holds before this one."""

    band: Band
    lengths: list[int]
    tokens: Place
    _slots: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        cache, capacity, rows = self.band.cache, self.band.capacity, len(self.lengths)
        if self._slots is None:
            places = [row * capacity + length for row, length in enumerate(self.lengths)]
            self._slots = torch.tensor(places, device=query.device)
        keys, values = cache[0, layer], cache[1, layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, key[self.tokens])
        values.flatten(0, 1).index_copy_(0, self._slots, value[self.tokens])
        mask = self._mask(window, query)
        reach = mask.shape[-1]
        heads, kv_heads = query.shape[1], key.shape[1]
        # The heads that share keys stand as queries beside each other, so that no key is copied for them.
        attended = scaled_dot_product_attention(
            query[self.tokens].reshape(rows, kv_heads, heads // kv_heads, -1),
            keys[:rows, :reach].transpose(1, 2),
            values[:rows, :reach].transpose(1, 2),
            attn_mask=mask,
            scale=scaling,
        )
        out[self.tokens] = attended.reshape(rows, heads, -1)

    def _mask(self, window: int | None, query: Tensor) -> Tensor:
        """[rows, 1, 1, reach], additive."""
        if window not in self._masks:
            reach = -(-(max(self.lengths) + 1) // MASK_MULTIPLE) * MASK_MULTIPLE
            at = torch.tensor(self.lengths, device=query.device)[:, None]
            keys = torch.arange(min(reach, self.band.capacity), device=query.device)[None]
            self._masks[window] = _additive(_visible(keys, at, window), query.dtype)[:, None, None, :]
        return self._masks[window]


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    `query` is [1, heads, tokens, head_dim]; the result is [1, tokens, heads, head_dim]. Raises NotImplementedError
    for the variants of attention that it does not compute (soft-capping, sinks, position biases).
    """
    if softcap is not None or s_aux is not None or position_bias is not None or attention_mask is not None:
        raise NotImplementedError("attention with soft-capping, sinks, biases or a mask of the model's own")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat_query, flat_key, flat_value = (states[0].transpose(0, 1) for states in (query, key, value))
    out = torch.empty_like(flat_query, memory_format=torch.contiguous_format)
    layer: int = module.layer_idx  # type: ignore[assignment]
    for part in step.parts:
        part.attend(layer, flat_query, flat_key, flat_value, out, scaling, sliding_window)
    return out.unsqueeze(0), None


def _visible(keys: Tensor, at: Tensor, window: int | None) -> Tensor:
    """Whether the token at position `at` sees the one at position `keys`."""
    visible = keys <= at
    return visible if window is None else visible & (keys > at - window)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
