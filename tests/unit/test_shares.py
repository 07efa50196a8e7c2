"""Sharing slots: nobody waits for ever, nothing lies idle, and what a run cannot hand over costs it alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.shares import LATELY_SECONDS, Demand, Shares, Turn

NOW = 100.0


def demand(
    run: str, size: int = 8, working: int = 0, blocked: int = 0, waits: bool = True, oldest: float = 0.0
) -> Demand:
    return Demand(run=run, size=size, working=working, blocked=blocked, waits=waits, oldest=oldest)


def test_the_run_that_holds_least_goes_first_and_equals_take_turns() -> None:
    shares = Shares(64)
    assert shares.next_run([demand("a", working=16), demand("b", working=8)], NOW) == Turn("b", fits=True)
    order = []
    for _ in range(4):
        turn = shares.next_run([demand("a"), demand("b")], NOW)
        assert turn is not None
        order.append(turn.run)
        shares.begin(turn.run, 8, NOW)
    assert order in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def test_idle_slots_are_lent_to_quick_groups_and_to_slow_ones_when_nobody_has_used_them_lately() -> None:
    shares = Shares(64)
    shares.begin("quick", 8, NOW)
    shares.begin("slow", 8, NOW)
    shares.end("quick", 2.0)
    shares.end("slow", 600.0)
    away = demand("quick", waits=False)
    assert shares.next_run([demand("slow", working=24), away], NOW) == Turn("slow", fits=True)
    assert shares.next_run([demand("slow", working=32), away], NOW) is None, "the other may come for its half"
    later = NOW + LATELY_SECONDS
    assert shares.next_run([demand("slow", working=32), away], later) == Turn("slow", fits=True)
    away = demand("slow", waits=False)
    assert shares.next_run([demand("quick", working=56), away], NOW) == Turn("quick", fits=True)
    assert shares.next_run([demand("quick", working=56, oldest=600.0), away], NOW) is None, "it was quick"


def test_of_a_run_of_which_nothing_is_known_the_others_are_protected() -> None:
    shares = Shares(8)
    shares.begin("old", 2, NOW)
    away = demand("old", size=2, waits=False)
    assert shares.next_run([demand("new", size=4), away], NOW) == Turn("new", fits=True)
    assert shares.next_run([demand("new", size=4, working=4), away], NOW) is None


def test_a_run_that_is_stuck_lends_its_share_but_what_it_may_still_come_for() -> None:
    shares = Shares(8)
    shares.begin("stuck", 2, NOW)
    assert shares.next_run([demand("slow", size=4, working=4), demand("stuck", size=2, blocked=4)], NOW) == Turn(
        "stuck", fits=True
    )
    stuck = demand("stuck", size=2, blocked=4, waits=False)
    assert shares.next_run([demand("slow", size=4, working=4), stuck], NOW) is None
    stuck = demand("stuck", size=2, blocked=8, waits=False)
    assert shares.next_run([demand("slow", size=4, working=4), stuck], NOW) == Turn("slow", fits=True)


def test_a_run_alone_with_its_tasks_gets_every_slot() -> None:
    shares = Shares(64)
    assert shares.next_run([demand("a", working=56), demand("b", waits=False)], NOW) == Turn("a", fits=True)
    assert shares.next_run([demand("a", working=64), demand("b", waits=False)], NOW) is None


def test_what_cannot_be_handed_over_takes_no_slot_from_others_and_is_the_runs_own_limit() -> None:
    shares = Shares(64)
    full = demand("full", blocked=64)
    assert shares.next_run([full], NOW) is None
    assert shares.next_run([full, demand("other", working=56)], NOW) == Turn("other", fits=True)
    assert shares.next_run([demand("full", blocked=32), demand("other", working=24)], NOW) == Turn("other", fits=True)
    assert shares.next_run([demand("full", working=8, blocked=56), demand("other", waits=False)], NOW) is None


def test_slots_are_kept_for_a_run_below_its_share_whose_group_does_not_fit() -> None:
    shares = Shares(64)
    assert shares.next_run([demand("small", size=2, working=60), demand("large", size=16)], NOW) == Turn(
        "large", fits=False
    )
    # At its share it takes its chance with the others.
    assert shares.next_run([demand("small", size=2, working=28), demand("large", size=16, working=32)], NOW) == Turn(
        "small", fits=True
    )


def test_a_group_larger_than_all_slots_runs_alone_and_then_lets_the_others_have_as_much() -> None:
    shares = Shares(16)
    assert shares.next_run([demand("huge", size=40), demand("small", size=4)], NOW) == Turn("huge", fits=True)
    shares.begin("huge", 40, NOW)
    begun, working = 0, 0
    while True:
        turn = shares.next_run([demand("huge", size=40), demand("small", size=4, working=working)], NOW)
        assert turn is not None
        if turn.run == "huge":
            assert not turn.fits
            break
        shares.begin("small", 4, NOW)
        shares.end("small", 1.0)
        begun += 4
        working = min(12, working + 4)  # some end, some go on
    assert begun == 40
    assert shares.next_run([demand("huge", size=40), demand("small", size=4)], NOW) == Turn("huge", fits=True)


def test_who_had_nothing_to_do_has_saved_up_nothing() -> None:
    shares = Shares(8)
    for _ in range(100):
        shares.next_run([demand("old", size=8), demand("idle", size=8, waits=False)], NOW)
        shares.begin("old", 8, NOW)
    order = []
    for _ in range(6):
        turn = shares.next_run([demand("old", size=8), demand("idle", size=8), demand("new", size=8)], NOW)
        assert turn is not None
        order.append(turn.run)
        shares.begin(turn.run, 8, NOW)
    assert all(1 <= order.count(run) <= 3 for run in ("old", "idle", "new"))


# ------------------------------------------------------------------------------------------------------- brute force


@dataclass
class Job:
    """A run with tasks without end, and how it behaves."""

    size: int
    seconds: Callable[[], int]
    working: list[tuple[int, int]] = field(default_factory=list)
    """When each group under way was begun, and when it ends."""
    begun: list[int] = field(default_factory=list)
    slot_seconds: int = 0


def simulate(slots: int, jobs: dict[str, Job], until: int) -> None:
    """Second by second, checking each decision."""
    shares = Shares(slots)
    for now in range(until):
        for run, job in jobs.items():
            for start, end in job.working:
                if end <= now:
                    shares.end(run, end - start)
            job.working = [(start, end) for start, end in job.working if end > now]
        while True:
            demands = [
                Demand(
                    run=run,
                    size=job.size,
                    working=len(job.working) * job.size,
                    blocked=0,
                    waits=True,
                    oldest=now - min((start for start, _ in job.working), default=now),
                )
                for run, job in jobs.items()
            ]
            free = slots - sum(item.working for item in demands)
            turn = shares.next_run(demands, now)
            fitting = [item for item in demands if item.size <= free or free == slots]
            if turn is None:
                assert not [item for item in fitting if item.held == 0 or (item.held + item.size) * len(jobs) <= slots]
                break
            if not turn.fits:
                [kept] = [item for item in demands if item.run == turn.run]
                least = min(item.held for item in fitting) if fitting else kept.held
                assert kept.held <= least, "slots are kept for nobody who holds more than those who wait meanwhile"
                break
            assert turn.run in [item.run for item in fitting]
            job = jobs[turn.run]
            shares.begin(turn.run, job.size, now)
            job.begun.append(now)
            job.working.append((now, now + job.seconds()))
        for job in jobs.values():
            job.slot_seconds += len(job.working) * job.size


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 32),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_no_run_with_tasks_waits_for_ever_and_no_slot_lies_idle_without_reason(
    slots: int, shapes: list[tuple[int, int]], seed: int
) -> None:
    generator = random.Random(seed)
    jobs = {
        f"run{number}": Job(size, lambda longest=longest: generator.randint(1, longest))  # type: ignore[misc]
        for number, (size, longest) in enumerate(shapes)
    }
    until = 1000
    simulate(slots, jobs, until)
    # A turn of every other run, as often as the largest group outweighs the smallest, and the time in which they end.
    largest, smallest = max(size for size, _ in shapes), min(size for size, _ in shapes)
    patience = 2 * 12 * len(jobs) * (largest // smallest + 2)
    for job in jobs.values():
        gaps = [later - earlier for earlier, later in zip([0, *job.begun], [*job.begun, until], strict=True)]
        assert max(gaps) <= patience


@pytest.mark.parametrize("slow", [1, 10, 100])
@pytest.mark.parametrize("sizes", [(8, 8), (2, 16), (4, 8)])
def test_runs_that_always_have_tasks_hold_equal_shares_however_slow_their_episodes_are(
    slow: int, sizes: tuple[int, int]
) -> None:
    generator = random.Random(1)
    jobs = {
        "quick": Job(sizes[0], lambda: generator.randint(1, 3)),
        "slow": Job(sizes[1], lambda: generator.randint(slow, 3 * slow)),
    }
    simulate(64, jobs, 4000)
    total = sum(job.slot_seconds for job in jobs.values())
    assert total >= 0.8 * 64 * 4000
    for job in jobs.values():
        assert job.slot_seconds / total == pytest.approx(0.5, abs=0.1)
