"""Activation: active when every member serves the version; a bad replica delays nobody for ever."""

from __future__ import annotations

import pytest

from learner.activation import Activation, Pace, ReplicaView, backoff, live_versions

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


# ------------------------------------------------------------------------------------------------- who is waited for


def serving(id: str, *names: str) -> ReplicaView:
    return ReplicaView(id, frozenset(names), {})


def test_everybody_present_is_waited_for_from_the_announcement() -> None:
    pace = Pace(timeout=10.0)
    assert pace.announce("v1", [serving("a"), serving("b")], 5.0) == {"a": 5.0, "b": 5.0}


def test_a_version_that_is_superseded_gives_nobody_more_time() -> None:
    pace = Pace(timeout=10.0)
    pace.announce("v1", [serving("a"), serving("b"), serving("c")], 0.0)
    assert pace.announce("v2", [serving("a", "v1"), serving("b"), serving("c", "v1")], 6.0) == {
        "a": 6.0, "b": 0.0, "c": 6.0,
    }  # fmt: skip
    assert pace.announce("v3", [serving("a", "v1", "v2"), serving("b", "v1"), serving("c", "v1")], 8.0) == {
        "a": 8.0, "b": 6.0, "c": 6.0,
    }  # fmt: skip


def test_a_replica_that_joined_since_is_waited_for_from_its_coming() -> None:
    pace = Pace(timeout=10.0)
    pace.announce("v1", [serving("a")], 0.0)
    pace.observe([serving("a"), serving("late")], 7.0)
    assert pace.announce("v2", [serving("a"), serving("late")], 8.0) == {"a": 0.0, "late": 7.0}


def test_one_that_was_left_behind_is_no_member_until_it_confirms_a_version_in_time() -> None:
    pace = Pace(timeout=10.0)
    pace.announce("v1", [serving("a"), serving("b")], 0.0)
    pace.leave("v1", {"b": "slow"})
    pace.activated("v1")
    late = [serving("a", "v1"), serving("b", "v1")]
    pace.observe(late, 12.0)  # it confirms, but after the time that it had: the next version would wait as long again
    assert pace.left_behind("v1", late) == {}, "it serves what it has confirmed"
    assert pace.announce("v2", late, 20.0) == {"a": 20.0}
    assert pace.left_behind("v2", late) == {"b": "slow"}
    in_time = [serving("a", "v2"), serving("b", "v1", "v2")]
    pace.observe(in_time, 21.0)
    assert pace.announce("v3", in_time, 30.0) == {"a": 30.0, "b": 30.0}


def test_what_it_confirmed_before_does_not_bring_back_one_that_was_left_behind() -> None:
    pace = Pace(timeout=10.0)
    pace.announce("v1", [serving("a", "v1"), serving("b", "v1")], 0.0)
    pace.activated("v1")
    pace.announce("v2", [serving("a", "v1"), serving("b", "v1")], 1.0)
    pace.leave("v2", {"b": "bad shapes"})
    assert pace.announce("v3", [serving("a", "v1", "v2"), serving("b", "v1")], 2.0) == {"a": 2.0}


def test_a_version_that_is_announced_again_gives_everybody_the_whole_time_anew() -> None:
    pace = Pace(timeout=10.0)
    pace.announce("v1", [serving("a"), serving("b")], 0.0)
    pace.leave("v1", {"a": "slow", "b": "slow"})
    assert pace.announce("v1", [serving("a"), serving("b")], 12.0) == {}
    confirmed = [serving("a", "v1"), serving("b", "v1")]
    pace.observe(confirmed, 15.0)
    assert pace.announce("v2", confirmed, 20.0).keys() == {"a", "b"}


def test_who_is_gone_is_forgotten() -> None:
    pace = Pace(timeout=10.0)
    pace.announce("v1", [serving("a"), serving("b")], 0.0)
    pace.leave("v1", {"b": "slow"})
    pace.observe([serving("a")], 1.0)
    assert pace.announce("v2", [serving("a"), serving("b")], 2.0) == {"a": 0.0, "b": 2.0}


@pytest.mark.parametrize("load_seconds", [3, 9, 11, 25, 70, 10_000])
@pytest.mark.parametrize("step_seconds", [1, 7, 15, 60])
def test_a_replica_that_is_always_too_slow_costs_one_timeout_in_all(load_seconds: int, step_seconds: int) -> None:
    """Second by second: one quick replica, one that takes `load_seconds` for the newest version it sees."""
    timeout, versions, waited = 10.0, 12, 0
    pace = Pace(timeout)
    now, confirmed = 0, set[str]()
    loading: tuple[str, int] | None = None
    for number in range(1, versions + 1):
        name = f"v{number}"

        def views(name: str = name) -> list[ReplicaView]:
            return [serving("quick", name), ReplicaView("slow", frozenset(confirmed), {})]

        since = pace.announce(name, views(), now)
        subject = Activation(number, name, frozenset(since), now, timeout, 1, since)
        until = now + step_seconds
        active = False
        while not active or now < until:
            if loading is None and name not in confirmed:
                loading = (name, now + load_seconds)
            if loading is not None and now >= loading[1]:
                confirmed.add(loading[0])
                loading = None
            pace.observe(views(), now)
            if not active:
                active = subject.observe(views(), now) == "active"
                pace.leave(name, subject.expelled)
                waited += not active
            if active:
                pace.activated(name)
            now += 1
    assert waited <= (timeout if load_seconds >= timeout else versions * load_seconds)
