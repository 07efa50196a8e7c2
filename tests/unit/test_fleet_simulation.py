"""The fleet in simulated time: our placement near the bound and balanced, the published rule as it was published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.contenders import Ours, Published, RoundRobin
from tests.benchmarks.fleet import replay
from tests.benchmarks.traces import BASE, SCENARIOS, asks, bound, stream

SHORT = replace(SCENARIOS["s2"], groups=240, prompts=240)


@pytest.mark.parametrize("told", [True, False])
def test_placement_is_near_the_bound_balanced_and_seldom_spills(told: bool) -> None:
    subject = Ours(SHORT, told=told)
    outcome = replay(SHORT, subject)
    shares = {kind: number / outcome.requests for kind, number in subject.placements.items()}
    assert outcome.hit >= bound(asks(SHORT)) - 0.003
    assert outcome.balance <= 1.11
    assert shares["unmatched"] <= 0.126
    assert shares["spill"] <= 0.015


def test_the_published_rule_shows_what_was_published() -> None:
    """It splits groups, because its limit is a group's size; it hits less than ours and far more than round robin."""
    published, ours, robin = Published(SHORT), Ours(SHORT), RoundRobin(SHORT)
    outcomes = [replay(SHORT, router) for router in (published, ours, robin)]
    shares = {kind: number / outcomes[0].requests for kind, number in published.placements.items()}
    assert 0.015 < shares["spill"] < 0.08
    assert 0.10 < shares["unmatched"] < 0.20
    assert shares["affinity"] == pytest.approx(1 - shares["spill"] - shares["unmatched"])
    assert outcomes[2].hit + 0.1 < outcomes[0].hit < outcomes[1].hit - 0.01
    assert outcomes[1].balance <= outcomes[0].balance + 0.02


def test_two_routers_are_as_good_as_one() -> None:
    one, two = (replay(SHORT, Ours(SHORT, routers=routers)) for routers in (1, 2))
    assert two.hit >= one.hit - 0.01
    assert two.balance <= one.balance * 1.05


def test_a_large_fleet_whose_replicas_die_serves_every_request_within_its_memory() -> None:
    scenario = replace(BASE, replicas=64, blocks=512, groups=600, prompts=600, most=100, spread=64, in_flight=1024)
    subject = Ours(scenario, told=False, max_bytes=1_000_000)
    outcome = replay(scenario, subject, trace=stream(scenario), die_every=200)
    assert outcome.requests == 4800
    assert outcome.deaths == 24
    assert outcome.hit > 0.75
    placer = subject.placers[0]
    assert placer.memory() <= 1_000_000
    placer.expire(1e9)
    assert all(placer.load(replica) == 0.0 for replica in placer.replicas())


def test_a_streamed_trace_has_the_same_requests() -> None:
    small = replace(SHORT, groups=20)
    assert sorted((ask.group, ask.member, ask.adapter) for ask in stream(small)) == sorted(
        (ask.group, ask.member, ask.adapter) for ask in asks(small)
    )
