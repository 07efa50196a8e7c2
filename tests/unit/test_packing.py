"""Packing: every trained token once, within the budget, and each token sees its own sequence and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.packing import PackedRow, TokenSequence, pack, tiles


def sequence(prompt: list[int], reply: list[int], group: str = "g", mask: list[int] | None = None) -> TokenSequence:
    ids = np.array([*prompt, *reply], dtype=np.int32)
    trained = np.array([0] * len(prompt) + (mask or [1] * len(reply)), dtype=np.bool_)
    behaviour = np.where(trained, -0.01 * ids - 1, 0).astype(np.float32)
    return TokenSequence(ids, behaviour, trained, advantage=float(len(reply)), group=group, weight=0.5 + len(prompt))


@st.composite
def steps(draw: st.DrawFn) -> list[TokenSequence]:
    """Groups with one prompt, and now and then a member whose prompt goes on or differs, or has no trained token."""
    sequences = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
        for _ in range(draw(st.integers(1, 5))):
            own = prompt
            match draw(st.sampled_from(["same", "same", "same", "longer", "other"])):
                case "longer":
                    own = prompt + draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
                case "other":
                    own = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
            reply = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
            mask = draw(st.lists(st.integers(0, 1), min_size=len(reply), max_size=len(reply)))
            sequences.append(sequence(own, reply, f"g{group}", mask))
    return sequences


def seen_by(row: PackedRow, token: int, visible: np.ndarray[Any, Any]) -> tuple[list[int], list[int]]:
    """The ids that a token sees, in the order of their positions, and those positions."""
    seen = np.flatnonzero(visible[token])
    seen = seen[np.argsort(row.position_ids[seen], kind="stable")]
    return row.token_ids[seen].tolist(), row.position_ids[seen].tolist()


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(8, 120))
def test_every_trained_token_is_predicted_once_from_exactly_its_own_past(
    sequences: list[TokenSequence], budget: int
) -> None:
    packing = pack(sequences, budget)
    found = []
    for row in packing.rows:
        visible = row.visible()
        for at in range(len(row.target)):
            index, offset = int(row.sequence[at]), int(row.offset[at])
            source = sequences[index]
            found.append((index, offset))
            past, positions = seen_by(row, int(row.predictor[at]), visible)
            assert past == source.token_ids[:offset].tolist()
            assert positions == list(range(offset))
            assert row.target[at] == source.token_ids[offset]
            assert row.behaviour[at] == source.behaviour[offset]
            assert row.advantage[at] == source.advantage
            assert row.weight[at] == source.weight
    wanted = [(i, int(t)) for i, source in enumerate(sequences) for t in np.flatnonzero(source.trained)]
    assert sorted(found) == wanted


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(8, 120))
def test_rows_keep_the_budget_unless_one_sequence_exceeds_it(sequences: list[TokenSequence], budget: int) -> None:
    packing = pack(sequences, budget)
    for row in packing.rows:
        assert len(row) <= budget or (row.offset.max() > budget and len({s.prefix for s in row.segments}) <= 2)
    assert packing.computed_tokens <= packing.plain_tokens
    assert 0 <= packing.fill <= 1
    assert packing.saved_tokens == packing.plain_tokens - packing.computed_tokens


@settings(max_examples=50, deadline=None)
@given(steps(), st.integers(8, 120))
def test_the_same_sequences_give_the_same_rows(sequences: list[TokenSequence], budget: int) -> None:
    first, second = pack(sequences, budget), pack(list(sequences), budget)
    assert len(first.rows) == len(second.rows)
    for one, other in zip(first.rows, second.rows, strict=True):
        assert one.segments == other.segments
        for name in ("token_ids", "position_ids", "predictor", "target", "sequence", "offset"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(8, 200), st.integers(1, 100))
def test_tiles_show_each_token_what_the_rows_mask_shows(
    sequences: list[TokenSequence], budget: int, limit: int
) -> None:
    for row in pack(sequences, budget).rows:
        rebuilt = np.zeros((len(row), len(row)), dtype=np.bool_)
        cut = tiles(row, limit)
        assert np.concatenate([tile.queries for tile in cut]).tolist() == list(range(len(row)))
        for tile in cut:
            rebuilt[np.ix_(tile.queries, tile.keys)] = tile.visible
            starts = {segment.start for segment in row.segments}
            assert len(tile.queries) <= limit or len(starts & set(tile.queries.tolist())) == 1
        np.testing.assert_array_equal(rebuilt, row.visible())


def test_eight_groups_of_eight_compute_each_prompt_once() -> None:
    random = np.random.default_rng(0)
    prompts = random.integers(0, 1000, (8, 44)).tolist()
    group = [sequence(prompts[g], random.integers(0, 1000, 16).tolist(), f"g{g}") for g in range(8) for _ in range(8)]
    packing = pack(group, 2048)
    # the sixteenth token of a reply predicts nothing
    assert packing.computed_tokens == 8 * (44 + 8 * 15)
    assert packing.plain_tokens == 3840
    assert packing.trained_tokens == 64 * 16
    assert len(packing.rows) == 1


def test_a_group_that_is_too_large_repeats_its_prompt() -> None:
    group = [sequence(list(range(40)), [i] * 21) for i in range(8)]
    packing = pack(group, 100)
    assert len(packing.rows) == 3
    assert all(row.token_ids[:40].tolist() == list(range(40)) for row in packing.rows)
    assert packing.computed_tokens == 3 * 40 + 8 * 20


def test_a_sequence_longer_than_the_budget_gets_a_row_of_its_own() -> None:
    packing = pack([sequence([1, 2], [3] * 10), sequence([1, 2], [4] * 300)], 64)
    assert sorted(len(row) for row in packing.rows) == [11, 301]


def test_groups_do_not_share_prompts() -> None:
    packing = pack([sequence([1, 2, 3], [4, 5], "a"), sequence([1, 2, 3], [4, 5], "b")], 64)
    assert packing.computed_tokens == 8


def test_a_rewritten_history_still_shares_the_prompt_it_begins_with() -> None:
    packing = pack([sequence([1, 2, 3], [4, 5]), sequence([1, 2, 3], [6, 7]), sequence([1, 2, 3, 8, 9], [4, 5])], 64)
    assert packing.computed_tokens == 3 + 1 + 1 + 3


def test_sequences_without_trained_tokens_cost_nothing() -> None:
    packing = pack([sequence([1, 2], [3, 4], mask=[0, 0])], 64)
    assert packing.rows == ()
    assert packing.fill == 0.0


def test_a_first_token_cannot_be_trained_on() -> None:
    with pytest.raises(ValueError, match="first token"):
        pack([sequence([], [1, 2])], 64)


def test_arrays_of_different_lengths_are_refused() -> None:
    whole = sequence([1], [2, 3])
    with pytest.raises(ValueError, match="one length"):
        pack([TokenSequence(whole.token_ids, whole.behaviour[:-1], whole.trained, 1.0, "g")], 64)
