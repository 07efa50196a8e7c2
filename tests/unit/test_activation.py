"""Activation: active when every member serves the version; a bad replica delays nobody for ever."""

from __future__ import annotations

import pytest

from learner.activation import Activation, ReplicaView, backoff, live_versions

NAME = "run-v000001-aaaaaaaa"


def view(id: str, *, has: bool = False, refuses: str = "") -> ReplicaView:
    return ReplicaView(id, frozenset({NAME} if has else ()), {NAME: refuses} if refuses else {})


def activation(*members: str, min_replicas: int = 1) -> Activation:
    return Activation(1, NAME, frozenset(members), announced=0.0, timeout=10.0, min_replicas=min_replicas)


def test_a_version_is_active_once_all_members_have_confirmed() -> None:
    subject = activation("a", "b")
    assert subject.observe([view("a", has=True), view("b")], 1.0) == "loading"
    assert subject.observe([view("a", has=True), view("b", has=True)], 2.0) == "active"


def test_a_member_that_refuses_is_left_behind_with_its_reason() -> None:
    subject = activation("a", "b")
    assert subject.observe([view("a", has=True), view("b", refuses="bad shapes")], 1.0) == "active"
    assert subject.expelled == {"b": "bad shapes"}


def test_a_slow_member_is_waited_for_until_the_time_is_up_and_no_longer() -> None:
    subject = activation("a", "b")
    assert subject.observe([view("a", has=True), view("b")], 9.9) == "loading"
    assert subject.observe([view("a", has=True), view("b")], 10.0) == "active"
    assert "within 10 s" in subject.expelled["b"]


def test_a_member_that_dies_while_loading_is_not_waited_for() -> None:
    subject = activation("a", "b")
    assert subject.observe([view("a", has=True)], 1.0) == "active"
    assert "left" in subject.expelled["b"]


def test_an_expelled_member_is_admitted_again_once_it_confirms() -> None:
    subject = activation("a", "b", min_replicas=2)
    assert subject.observe([view("a", has=True), view("b", refuses="once")], 1.0) == "loading"
    assert subject.observe([view("a", has=True), view("b", has=True)], 2.0) == "active"
    assert subject.expelled == {}


def test_too_few_replicas_fail_the_version_only_when_the_time_is_up() -> None:
    subject = activation("a", min_replicas=2)
    assert subject.observe([view("a", has=True)], 1.0) == "loading"
    assert subject.observe([view("a", has=True)], 11.0) == "failed"


def test_a_replica_that_joins_later_comes_to_the_rescue_but_is_not_waited_for() -> None:
    subject = activation("a")
    assert subject.observe([view("a", has=True), view("late")], 1.0) == "active"
    rescued = activation("a")
    assert rescued.observe([view("a", refuses="broken"), view("late", has=True)], 1.0) == "active"


def test_with_nobody_there_it_fails_at_once() -> None:
    assert activation().observe([], 0.0) == "failed"


@pytest.mark.parametrize("max_staleness", range(5))
def test_live_versions_and_the_one_being_offered_never_need_more_than_the_promised_slots(max_staleness: int) -> None:
    for head in range(12):
        for active in range(head + 1):
            live = live_versions(head=head, active=active, max_staleness=max_staleness, known=range(head + 1))
            # With an active version this far behind there is no credit, so no step and no offer follows.
            offering = 1 if head - active <= max_staleness else 0
            assert len(live) + offering <= max_staleness + 2, (head, active, live)
            assert active == 0 or active in live
            assert head == 0 or head in live


def test_versions_that_a_trainable_group_may_be_sampled_under_stay() -> None:
    assert live_versions(head=7, active=7, max_staleness=2, known=range(8)) == [5, 6, 7]
    assert live_versions(head=8, active=7, max_staleness=2, known=range(9)) == [6, 7, 8]


def test_backoff_grows_and_is_bounded() -> None:
    waits = [backoff(attempt) for attempt in range(1, 10)]
    assert waits == sorted(waits)
    assert waits[-1] == 30.0
