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
    """Groups of prefix trees of any depth; now and then a member whose prompt differs, or that has no trained token."""
    sequences = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
        for _ in range(draw(st.integers(1, 5))):
            own = prompt
            match draw(st.sampled_from(["same", "same", "longer", "turn", "turn", "other"])):
                case "longer":
                    own = prompt + draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
                case "turn":  # goes on from a sibling, as a forked turn does
                    own = draw(st.sampled_from(sequences)).token_ids.tolist() if sequences else prompt
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
        assert len(row) <= budget or (row.offset.max() > budget and len(row.segments) == 1)
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
            if len(tile.queries) > limit:
                (segment,) = (s for s in row.segments if s.start == tile.queries[0])
                assert segment.parent is None and segment.stop == tile.queries[-1] + 1, "a long root, and nothing else"
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


def forked() -> list[TokenSequence]:
    """An agent's turns in three levels: a prompt, two first replies, and what was said on after each."""
    prompt, first, second, third = list(range(10)), [11] * 6, [12] * 7, [20] * 5
    return [
        sequence([*prompt, *first, *third], [30] * 5),
        sequence([*prompt, *first, *third], [31] * 4),
        sequence([*prompt, *first, 22], [32] * 3),
        sequence([*prompt, *second], [33] * 2),
        sequence(prompt, [*first, 40, 41]),
    ]


def test_what_forked_turns_have_in_common_is_computed_once_at_every_level() -> None:
    packing = pack(forked(), 200)
    (row,) = packing.rows
    # prompt; first, third and both replies, 22 and its reply, 40; second and its reply. A last token is no input.
    assert packing.computed_tokens == 10 + (6 + (5 + 4 + 3) + (1 + 2) + 1) + (7 + 1)
    depth = []
    for segment in row.segments:
        depth.append(0 if segment.parent is None else depth[segment.parent] + 1)
    assert max(depth) == 3


def test_equal_replies_are_computed_once() -> None:
    packing = pack([sequence(list(range(9)), [5, 6, 7, 8])] * 8, 64)
    assert packing.computed_tokens == 12
    assert packing.trained_tokens == 32


def realistic(seed: int, groups: int = 128, size: int = 8) -> list[TokenSequence]:
    """Lengths as runs have them: lognormal prompts of about 120 and replies of about 250 tokens, cut at 1,024."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = random.integers(0, 30_000, int(np.clip(random.lognormal(np.log(120), 0.5), 20, 480)))
        for _ in range(size):
            reply = random.integers(0, 30_000, int(np.clip(random.lognormal(np.log(250), 0.7), 8, 1024)))
            made.append(sequence(prompt.tolist(), reply.tolist(), f"g{group}"))
    return made


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_of_a_realistic_step_are_full_and_repeat_little(seed: int) -> None:
    step = realistic(seed)
    packing, at_once = pack(step, 8192), pack(step, 10**9)
    assert packing.fill >= 0.97
    assert packing.computed_tokens <= 1.02 * at_once.computed_tokens
    assert packing.trained_tokens == at_once.trained_tokens


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
