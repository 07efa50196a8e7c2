"""The KV cache of the running batch: preallocated rows of unequal length, grown and compacted in place.

Rows live in bands. A band is one buffer whose rows all have room for the same number of tokens (128, 256, 512, ...),
so that a batch of ragged rows wastes at most half of the memory and of the attention work, whatever its longest row.
A row that is full moves to the next band; a row that ends gives its place to the band's last one. Within a band the
rows are therefore always 0..n-1: attention reads a view, and nothing is gathered or concatenated in a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_BAND = 128
"""Tokens per row of the smallest band: below it, more bands cost more calls than they save reads."""

FIRST_ROOM = 32
"""A new row is placed where at least this many tokens fit behind its prompt, so that few rows move soon."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token's keys and values look like: [2 (keys, values), layers, kv_heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def tokens(self, count: int) -> Tensor:
        """An uninitialised cache of one sequence of `count` tokens: [2, layers, count, kv_heads, head_dim]."""
        shape = (2, self.layers, count, self.kv_heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(eq=False, slots=True)
class Row:
    """One running sequence's place. `length` counts the tokens whose keys and values are stored."""

    band: Band
    index: int
    length: int


class Band:
    """Rows with room for `capacity` tokens each: `cache` is [2, layers, rows, capacity, kv_heads, head_dim]."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self._shape = shape
        self.cache = self._allocate(0)

    def add(self, length: int) -> Row:
        """A new row whose first `length` tokens the caller fills."""
        if len(self.rows) == self.cache.shape[2]:
            grown = self._allocate(max(4, 2 * len(self.rows)))
            grown[:, :, : len(self.rows)] = self.cache
            self.cache = grown
        row = Row(self, len(self.rows), length)
        self.rows.append(row)
        return row

    def remove(self, row: Row) -> None:
        """Free `row`; the band's last row takes its place."""
        last = self.rows.pop()
        if last is not row:
            self.cache[:, :, row.index, : last.length] = self.cache[:, :, last.index, : last.length]
            self.rows[row.index] = last
            last.index = row.index

    @property
    def size(self) -> int:
        """Tokens that the buffer has room for."""
        return int(self.cache.shape[2]) * self.capacity

    def free(self) -> None:
        """Give the buffer back; the band must be empty."""
        self.cache = self._allocate(0)

    def tokens(self, row: Row) -> Tensor:
        """A view of what `row` holds: [2, layers, length, kv_heads, head_dim]."""
        return self.cache[:, :, row.index, : row.length]

    def clear(self, row: Row) -> None:
        """Zero `row`, whatever a failed step left in it."""
        self.cache[:, :, row.index].zero_()

    def _allocate(self, rows: int) -> Tensor:
        shape = self._shape
        # Zeros, for what lies behind a row's length is masked, and masking does not silence a NaN.
        return torch.zeros(
            (2, shape.layers, rows, self.capacity, shape.kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )


class Rows:
    """All rows of the running batch, of at most `limit` tokens together.

    Bands that have emptied keep their buffers for the rows to come, unless all buffers together exceed `limit`.
    """

    def __init__(self, shape: CacheShape, limit: int) -> None:
        self._shape = shape
        self._limit = limit
        self._bands: dict[int, Band] = {}

    @property
    def bands(self) -> list[Band]:
        """The bands that hold a row, smallest rows first."""
        return [band for _, band in sorted(self._bands.items()) if band.rows]

    def add(self, tokens: Tensor, room: int) -> Row:
        """A row that starts with a copy of `tokens` [2, layers, n, ...] and will take at most `room` more."""
        length = tokens.shape[2]
        row = self._band(length + min(room, FIRST_ROOM)).add(length)
        row.band.tokens(row).copy_(tokens)
        return row

    def make_room(self, rows: Iterable[Row]) -> None:
        """See that each of `rows` has room for one more token, moving those that are full to the next band."""
        for row in rows:
            band = row.band
            if row.length < band.capacity:
                continue
            moved = self._band(row.length + 1).add(row.length)
            moved.band.tokens(moved).copy_(band.tokens(row))
            band.remove(row)
            row.band, row.index = moved.band, moved.index
            row.band.rows[row.index] = row

    def remove(self, rows: Iterable[Row]) -> None:
        """Free `rows`, the last ones of each band first, so that as few others as possible move."""
        for row in sorted(rows, key=lambda row: row.index, reverse=True):
            row.band.remove(row)
        if sum(band.size for band in self._bands.values()) > self._limit:
            for band in self._bands.values():
                if not band.rows:
                    band.free()

    def _band(self, tokens: int) -> Band:
        capacity = SMALLEST_BAND
        while capacity < tokens:
            capacity *= 2
        capacity = max(tokens, min(capacity, self._limit))
        if capacity not in self._bands:
            self._bands[capacity] = Band(self._shape, capacity)
        return self._bands[capacity]
