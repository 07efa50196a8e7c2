"""Credit, by brute force: what the formula promises is what a simulated run shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.credit import CreditRule
from tests.benchmarks.staleness import GROUPS_PER_STEP, simulate


@pytest.mark.parametrize("publish_every", [1, 2, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("groups_per_step", [1, 3, 8])
def test_with_everything_active_the_oldest_trained_group_is_exactly_max_staleness_old(
    groups_per_step: int, max_staleness: int, publish_every: int
) -> None:
    rule = CreditRule(groups_per_step, max_staleness, publish_every)
    head = 0
    queue: list[int] = []
    ages: list[int] = []
    for step in range(1, 20 * publish_every + 1):
        while rule.credit(head=head, active=head, open_groups=len(queue)) > 0:
            queue.append(head)
        assert len(queue) == rule.window
        batch, queue = queue[:groups_per_step], queue[groups_per_step:]
        ages += [head - version for version in batch]
        assert not any(rule.too_stale(version=version, head=head) for version in batch)
        if step % publish_every == 0:
            head += 1
    assert max(ages) == max_staleness


@given(
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    moves=st.lists(st.sampled_from(["step", "activate", "issue"]), max_size=200),
)
def test_however_activation_lags_no_group_is_issued_that_could_only_be_dropped(
    groups_per_step: int, max_staleness: int, moves: list[str]
) -> None:
    rule = CreditRule(groups_per_step, max_staleness, 1)
    head = active = 0
    queue: list[int] = []
    for move in moves:
        if move == "issue" and rule.credit(head=head, active=active, open_groups=len(queue)) > 0:
            queue.append(active)
        elif move == "activate" and active < head:
            active = head
        elif move == "step" and len(queue) >= groups_per_step:
            batch, queue = queue[:groups_per_step], queue[groups_per_step:]
            assert not any(rule.too_stale(version=version, head=head) for version in batch)
            head += 1
        assert len(queue) <= rule.window


def test_credit_shrinks_as_the_served_version_falls_behind_and_comes_back() -> None:
    rule = CreditRule(groups_per_step=8, max_staleness=1, publish_every=1)
    assert rule.credit(head=5, active=5, open_groups=0) == 16
    assert rule.credit(head=5, active=4, open_groups=0) == 8
    assert rule.credit(head=5, active=3, open_groups=0) == 0
    assert rule.credit(head=5, active=5, open_groups=16) == 0


def test_credit_shrinks_while_what_waits_is_too_stale_but_never_below_a_step() -> None:
    rule = CreditRule(groups_per_step=8, max_staleness=3, publish_every=1, mean_staleness=1.0)
    for staleness, window in ((0.0, 32), (1.0, 32), (2.0, 16), (3.0, 10), (100.0, 8)):
        assert rule.credit(head=9, active=9, open_groups=0, waiting_staleness=staleness) == window
    # While the served version lags, that window may be the smaller one.
    assert rule.credit(head=9, active=6, open_groups=0, waiting_staleness=1.5) == 8
    assert rule.credit(head=9, active=5, open_groups=0, waiting_staleness=1.5) == 0
    unbounded = CreditRule(groups_per_step=8, max_staleness=3, publish_every=1)
    assert unbounded.credit(head=9, active=9, open_groups=0, waiting_staleness=3.0) == 32


@pytest.mark.parametrize("supply", [2.0, 0.5])
def test_a_bound_on_what_waits_makes_training_fresher_and_hardly_slower(supply: float) -> None:
    plain = simulate(CreditRule(GROUPS_PER_STEP, 6, 1), supply, steps=200)
    bounded = simulate(CreditRule(GROUPS_PER_STEP, 6, 1, mean_staleness=1.5), supply, steps=200)
    assert plain.mean_staleness <= 6
    assert bounded.speed > 0.97 * plain.speed
    if supply > 1:
        assert plain.mean_staleness > 5.5
        assert bounded.mean_staleness < 4.5
    assert bounded.dropped_share <= plain.dropped_share + 0.01


def test_the_learner_is_never_starved_by_its_own_freshness() -> None:
    """With the tightest bound each step still finds its groups: what is open is at least a step's worth."""
    found = simulate(CreditRule(GROUPS_PER_STEP, 4, 1, mean_staleness=0.01), 2.0, steps=100)
    assert found.trained >= 100 * GROUPS_PER_STEP
    assert found.speed > 0.4
