"""The truth check, on numbers: one wrong replica of two is caught, rounding is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from broker.messages import Floats
from broker.runspec import AlgorithmSection
from broker.trajectories import Episode, Row
from learner.truth import choose, compare, spans, tolerance_of, verdict


def row(turns: list[tuple[int, int]]) -> Row:
    """One prompt token, then for each turn `n` sampled tokens under `version`, then one environment token."""
    mask, versions = [0], [-1]
    for count, version in turns:
        mask += [1] * count + [0]
        versions += [version] * count + [-1]
    return Row.of(np.arange(len(mask)), np.where(mask, -1.0, 0.0), mask, versions)


def episode(index: int, rows: list[Row], replicas: list[str]) -> Episode:
    return Episode(index=index, rows=rows, reward=0.0, parts={}, turns=[], truncated=False, replicas=replicas)


def noise(scale: float, tokens: int = 50, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(-1, scale, tokens).astype(np.float32)


def test_one_wrong_replica_of_two_is_caught_and_named() -> None:
    right, wrong = noise(0.5), noise(0.5, seed=1)
    report = compare([right] * 20, [right] * 19 + [wrong], [(3, "good")] * 19 + [(3, "bad")])
    assert report.pairs[3, "good"].mean == 0
    assert report.pairs[3, "bad"].tokens == 50
    assert report.overall.tokens == 1000
    reason = verdict(report, 1e-3, "float32")
    assert reason is not None
    assert "version 3 on replica bad" in reason
    assert "good" not in reason


def test_when_every_replica_is_wrong_the_advice_is_another() -> None:
    report = compare([noise(1)] * 2, [noise(1, seed=1)] * 2, [(0, "a"), (0, "b")])
    reason = verdict(report, 1e-3, "float32")
    assert reason is not None
    assert "temperature" in reason


def test_rounding_passes_and_a_long_tail_passes_in_bfloat16_only() -> None:
    recorded = np.full(100, -1.0, dtype=np.float32)
    assert verdict(compare([recorded], [recorded + 1e-4], [(1, "a")]), 1e-3, "float32") is None
    tail = recorded.copy()
    tail[:5] += 4e-3
    report = compare([recorded], [tail], [(1, "a")])
    assert verdict(report, 1e-3, "bfloat16") is None
    assert verdict(report, 1e-3, "float32") is not None


def test_the_bound_follows_the_type_unless_the_configuration_names_one() -> None:
    assert [tolerance_of(AlgorithmSection(), dtype) for dtype in ("float32", "bfloat16")] == [1e-3, 0.08]
    assert tolerance_of(AlgorithmSection(truth_tolerance=0.5), "float32") == 0.5


def test_a_logprob_that_is_no_number_fails() -> None:
    recorded = np.full(4, -1.0, dtype=np.float32)
    report = compare([recorded], [np.full(4, math.nan, dtype=np.float32)], [(1, "a")])
    assert verdict(report, 1e-3, "bfloat16") is not None


def test_nothing_scored_is_nothing_wrong() -> None:
    report = compare([], [], [])
    assert report.overall.tokens == 0
    assert verdict(report, 1e-3, "float32") is None


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        compare([noise(1, 4)], [noise(1, 5)], [(0, "a")])


def test_each_turn_belongs_to_the_replica_that_served_it_across_rows() -> None:
    found = spans([episode(0, [row([(2, 4), (3, 4)]), row([(1, 4)])], ["a", "b", "c"])])
    assert [(s.row, s.version, s.replica, s.tokens.tolist()) for s in found] == [
        (0, 4, "a", [0, 1]),
        (0, 4, "b", [2, 3, 4]),
        (1, 4, "c", [0]),
    ]


def test_replicas_that_do_not_match_the_turns_share_the_blame() -> None:
    found = spans([episode(0, [row([(2, 4)])], ["a", "b"]), episode(1, [row([(1, 4)])], [])])
    assert [s.replica for s in found] == ["a+b", "unknown"]


def test_every_pair_is_chosen_before_any_twice_and_always_the_same() -> None:
    episodes = [episode(i, [row([(4, 7)])], ["a"]) for i in range(6)]
    episodes += [episode(6, [row([(4, 7)])], ["b"]), episode(7, [row([(4, 6)])], ["a"])]
    chosen = choose(episodes, 4)
    assert [(s.version, s.replica, s.episode) for s in chosen] == [(6, "a", 7), (7, "a", 0), (7, "b", 6), (7, "a", 1)]
    assert [s.episode for s in choose(episodes, 1)] == [7, 0, 6]
    assert len(choose(episodes, 100)) == 8
    assert [s.episode for s in choose(episodes, 4)] == [s.episode for s in chosen]


def test_a_row_without_sampled_tokens_is_not_chosen() -> None:
    assert choose([episode(0, [Row.of([1, 2], [0, 0], [0, 0], [-1, -1])], [])], 4) == []
