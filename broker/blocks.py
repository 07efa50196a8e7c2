"""How token sequences are cut into KV-cache blocks and hashed: replicas and routers mean the same by a block.

A block's hash covers its tokens, every token before them, and the space it lies in: the adapter's name and the cache
salt. Blocks of two versions therefore never match. A chain is the hashes of successive blocks, HASH bytes each, in one
`bytes`: two chains agree up to the first block in which their prompts differ, and nowhere after.

The hash is made for speed, in nine numpy calls whatever the length: a block is a multilinear sum of its tokens, folded;
a chain's hashes are the running sums of its blocks, each multiplied with a constant of its position, on top of the
space's seed. It is no cryptographic hash: whoever collides one on purpose gets a request placed badly.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from broker.messages import Ids

BLOCK = 16
"""Tokens in a block where the engine says nothing else, as in vLLM."""

HASH = 8
"""Bytes of a block's hash."""

Words = npt.NDArray[np.uint64]

_HALF = np.uint64(32)
_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_LAST = np.uint64(0x94D049BB133111EB)


def usable_block(size: int) -> int:
    """`size` where it can be a block's; BLOCK where a replica reports nonsense (it must be even, 2 to 4096)."""
    return size if 2 <= size <= 4096 and size % 2 == 0 else BLOCK


class Point(NamedTuple):
    """Where a chain stands: how many blocks it has, and its last hash as a number."""

    blocks: int
    total: int


START = Point(0, 0)


def end_of(chained: bytes) -> Point:
    """Where a chain that begins at START ends."""
    return Point(len(chained) // HASH, int.from_bytes(chained[-HASH:], sys.byteorder))


def chain(adapter: str | None, tokens: Ids, *, salt: str = "", block: int = BLOCK) -> bytes:
    """Hashes of the full blocks of `tokens` (int32 [n]): HASH bytes for each of the n // block blocks."""
    count = len(tokens) // block
    return _sums(tokens, count, block, 0, _seed(adapter or "", salt)).tobytes() if count else b""


def extend(
    adapter: str | None, point: Point, tokens: Ids, *, salt: str = "", block: int = BLOCK
) -> tuple[bytes, Point]:
    """Hashes of the full blocks of `tokens` (int32 [n]) that follow the blocks before `point`; where the chain ends."""
    count = len(tokens) // block
    if not count:
        return b"", point
    before = np.uint64(point.total) if point.blocks else _seed(adapter or "", salt)
    sums = _sums(tokens, count, block, point.blocks, before)
    return sums.tobytes(), Point(point.blocks + count, int(sums[-1]))


def _sums(tokens: Ids, count: int, block: int, start: int, before: np.uint64) -> Words:
    """uint64 [count]: the hashes of the first `count` blocks of `tokens`, which are a chain's from `start` on."""
    words: Words = np.ndarray((count, block // 2), np.uint64, np.ascontiguousarray(tokens))
    sums: Words = words @ _weights(block // 2)
    sums ^= sums >> _HALF
    sums *= _positions(start, count)
    np.add.accumulate(sums, out=sums)
    sums += before
    return sums


@lru_cache(maxsize=4096)
def _seed(adapter: str, salt: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(f"{adapter}\0{salt}".encode(), digest_size=8).digest(), "little"))


@lru_cache(maxsize=16)
def _weights(count: int) -> Words:
    return _odd(0, count)


_table: Words = np.zeros(0, np.uint64)


def _positions(start: int, count: int) -> Words:
    """A multiplier for each of `count` positions from `start` on."""
    global _table
    if start + count > len(_table):
        _table = _odd(1 << 32, max(4096, 2 * (start + count)))
    return _table[start : start + count]


def _odd(start: int, count: int) -> Words:
    """`count` odd constants: splitmix64 from `start` on."""
    state: np.ndarray[Any, np.dtype[np.uint64]] = np.arange(start, start + count, dtype=np.uint64)
    state = state * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * _FACTOR
    state = (state ^ (state >> np.uint64(27))) * _LAST
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
