"""Block hashes: chained, seeded with the adapter and the salt, the same however a sequence is cut into calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.blocks import BLOCK, HASH, START, chain, extend, usable_block


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 150_000, length).astype(np.int32)


def hashes(chained: bytes) -> list[bytes]:
    return [chained[at : at + HASH] for at in range(0, len(chained), HASH)]


def test_a_block_is_known_by_everything_before_it() -> None:
    prompt = tokens(1, 100)
    assert len(chain("v1", prompt)) == 100 // BLOCK * HASH
    assert chain("v1", prompt[:70]) == chain("v1", prompt)[: 70 // BLOCK * HASH]
    changed = prompt.copy()
    changed[20] += 1
    before, after = hashes(chain("v1", prompt)), hashes(chain("v1", changed))
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after)


def test_blocks_in_another_order_are_others() -> None:
    one, other = tokens(1, BLOCK), tokens(2, BLOCK)
    assert not set(hashes(chain(None, np.concatenate([one, other])))) & set(
        hashes(chain(None, np.concatenate([other, one])))
    )


def test_blocks_of_one_version_or_salt_never_match_those_of_another() -> None:
    prompt = tokens(1, 64)
    chains = [chain("run-v1", prompt), chain("run-v2", prompt), chain(None, prompt), chain("run-v1", prompt, salt="s")]
    assert len({block for chained in chains for block in hashes(chained)}) == 16


@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from([2, 16, 64]))
def test_a_chain_can_be_extended_where_it_ended(first: int, second: int, block: int) -> None:
    prompt = tokens(3, (first + second) * block)
    start, point = extend("v", START, prompt[: first * block], block=block)
    more, end = extend("v", point, prompt[first * block :], block=block)
    assert start + more == chain("v", prompt, block=block)
    assert end.blocks == first + second


def test_a_hundred_thousand_blocks_have_as_many_hashes() -> None:
    seen = set()
    for seed in range(100):
        small = np.random.default_rng(seed).integers(0, 3, 1000 * BLOCK).astype(np.int32)
        seen.update(hashes(chain("v", small)))
    assert len(seen) == 100_000


@pytest.mark.parametrize("size", [0, -16, 1, 17, 1 << 20])
def test_a_block_size_that_makes_no_sense_counts_as_the_usual(size: int) -> None:
    assert usable_block(size) == BLOCK
    assert usable_block(32) == 32
