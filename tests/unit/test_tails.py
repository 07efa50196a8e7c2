"""Lengths and durations of closed groups: right within a bucket, bounded, and the same after a resume."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import decode
from learner.tails import FIGURES, Spread, Tails, figures_in
from tests.unit.test_session import checkpoint


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=200), st.integers(1, 100))
def test_a_percentile_is_within_a_bucket_of_the_truth_and_the_mean_is_exact(values: list[float], percent: int) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert exact / 1.0906 <= spread.percentile(percent) <= exact * 1.0906
    assert spread.mean == pytest.approx(sum(values) / len(values))


def test_a_spread_stays_small_however_many_and_however_wild_its_values_are() -> None:
    spread = Spread()
    for number in range(5000):
        spread.add(random.Random(number).expovariate(1.0) * 10.0 ** (number % 40 - 20))
    spread.add(0.0)
    assert len(spread.to_state()["buckets"]) <= 201
    assert spread.count == 5001
    assert Spread().percentile(99) == Spread().mean == 0.0


def test_what_was_used_and_what_was_lost_are_told_apart() -> None:
    tails = Tails()
    tails.add("trained", [10, 20], 1.0)
    tails.add("skipped", [30], 3.0)
    tails.add("dropped", [400], 90.0)
    tails.add("expired", [], 120.0)
    tails.add("failed", [7], None)
    figures = tails.figures()
    assert figures["used_tokens_mean"] == 20.0
    assert figures["used_seconds_mean"] == 2.0
    assert figures["dropped_tokens_p50"] == pytest.approx(400, rel=0.1)
    assert figures["expired_seconds_p99"] == pytest.approx(120, rel=0.1)
    assert "expired_tokens_mean" not in figures, "nobody knows what a group sampled of which nothing was heard"
    assert "failed_seconds_mean" not in figures
    assert set(figures) <= set(FIGURES)
    assert figures_in({**figures, "reward": 1.0}) == figures


def test_they_travel_in_a_commit_with_the_closings_that_take_effect_with_it() -> None:
    tails = Tails()
    tails.add("dropped", [5], 6.0)
    stored = msgspec.structs.replace(checkpoint(1, 1), tails=tails.to_state([("trained", [3], 2.0)]))
    assert "used_tokens_mean" not in tails.figures(), "a commit that fails leaves no trace"
    again = Tails.from_state(decode(stored.encode(), type(stored)).tails)
    assert again.figures()["used_tokens_mean"] == 3.0
    assert again.figures()["dropped_seconds_mean"] == 6.0
    again.add("trained", [5], 2.0)
    assert again.figures()["used_tokens_mean"] == 4.0


def test_a_commit_of_a_release_without_them_begins_anew() -> None:
    assert Tails.from_state(checkpoint(1, 1).tails).figures() == {}
