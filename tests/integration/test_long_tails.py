"""Episodes that take a hundred times the median: the others go on, nothing leaks, and what was lost is reported."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from broker import names
from broker.bus import Bus, ConsumerGone, actors_consumer
from broker.code import load_object
from deploy.view import lost_lines
from tests.fleet import Fleet
from tests.stubs import StubEngine
from tests.waiting import until

pytestmark = pytest.mark.servers

MEDIAN = 0.02

SLOW = 100 * MEDIAN

WORLD = f"""
import asyncio

from actors.environment import StepResult

began, ended, cancelled = [], [], []


class World:
    def __init__(self, slow):
        self.slow = slow
        self.turns = 0

    def reset(self, task, seed):
        self.number = task["number"]
        self.seed = seed
        return [{{"role": "user", "content": task["prompt"]}}]

    async def step(self, reply):
        self.turns += 1
        late = self.number in self.slow
        if late and self.turns == 1:
            return StepResult(messages=[{{"role": "user", "content": "again"}}])
        began.append(self.number)
        try:
            await asyncio.sleep({SLOW} if late else {MEDIAN})
        except asyncio.CancelledError:
            cancelled.append(self.number)
            raise
        ended.append(self.number)
        return StepResult(reward=float(self.seed % 7), done=True)
"""


def slow_world(fleet: Fleet, slow: list[int], **sections: Any) -> Any:
    (fleet.directory / "world.py").write_text(WORLD)
    environment = {"environment": "world.py:World", "arguments": {"slow": slow}, "rewards": []}
    given = sections.pop("environment", {})
    return fleet.spec(environment={**environment, **given}, **sections)


def seen(fleet: Fleet, what: str) -> list[int]:
    """The numbers of the tasks whose episodes `began`, `ended`, or were `cancelled`."""
    found: Any = load_object(f"world.py:{what}", roots=[fleet.directory])
    return list(found)


async def test_slow_episodes_stall_nothing_leak_nothing_and_are_reported_by_length_and_duration(fleet: Fleet) -> None:
    await fleet.router()
    await fleet.replica()
    slow = [5, 17, 29]
    algorithm = {"group_size": 2, "groups_per_step": 2, "max_staleness": 3}
    spec = slow_world(fleet, slow, run={"steps": 22}, algorithm=algorithm)
    actor = await fleet.actor(max_inflight=16)
    learner = await fleet.learner(spec)
    summary = await fleet.finished(learner)
    assert summary.steps == 22
    groups = summary.groups
    assert groups["trained"] + groups["skipped"] == 44
    assert set(seen(fleet, "cancelled")) <= set(slow), "no other episode was cancelled"
    dropped = {number for number in slow if number in seen(fleet, "cancelled")}
    assert len(dropped) == groups["dropped"] >= 2
    assert not dropped & set(seen(fleet, "ended")), "the run did not wait for them"
    assert groups["issued"] == 44 + groups["dropped"] + groups["open"], "each dropped group's credit was used again"
    assert groups["expired"] == groups["failed"] == 0
    # Two turns instead of one, and cut short only when three versions had passed: longer by both measures.
    figures = summary.tails
    assert figures["used_tokens_mean"] < figures["dropped_tokens_mean"] == 6.0
    assert figures["used_seconds_p50"] < figures["dropped_seconds_mean"]
    assert figures["used_seconds_p50"] > MEDIAN
    last = fleet.steps(spec)[-1]
    assert last["dropped_tokens_mean"] == figures["dropped_tokens_mean"]
    [line] = lost_lines(groups, figures)
    assert line.startswith(f"dropped: {groups['dropped']} groups, 6 sampled tokens an episode at the mean")
    assert "; used: 3 sampled tokens" in line
    await until(lambda: fleet.node(actor.id).gauges["episodes"] == 0, within=20, what="every slot is free again")


async def test_what_was_lost_is_still_known_after_a_resume(fleet: Fleet) -> None:
    await fleet.router()
    await fleet.replica()
    spec = slow_world(fleet, [1, 2], run={"steps": 5000}, algorithm={
        "group_size": 2, "groups_per_step": 1, "max_staleness": 3,
    })  # fmt: skip
    await fleet.actor()
    first = await fleet.learner(spec)
    await until(lambda: fleet.steps(spec) and fleet.steps(spec)[-1]["dropped"] >= 2, within=30, what="some are dropped")
    await first.stop()
    there = len(fleet.steps(spec))
    before = fleet.steps(spec)[-1]
    await fleet.learner(spec)
    await until(lambda: len(fleet.steps(spec)) > there, within=30, what="the run goes on")
    after = fleet.steps(spec)[there]
    assert after["dropped"] >= before["dropped"] >= 2
    assert after["dropped_tokens_mean"] == 6.0
    assert after["dropped_seconds_p99"] >= before["dropped_seconds_p50"] > 0
    assert after["used_seconds_mean"] > 0


async def test_a_group_that_nobody_answers_expires_gives_its_credit_back_and_is_reported(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, nats_server: Any
) -> None:
    monkeypatch.setattr("learner.janitor.LOOK_SECONDS", 0.1)
    await fleet.router()
    await fleet.replica()
    spec = slow_world(
        fleet, [], run={"steps": 6}, environment={"episode_timeout": 3.0, "group_timeout": 3.0},
        algorithm={"group_size": 2, "groups_per_step": 2, "max_staleness": 0},
    )  # fmt: skip
    bus = await Bus.connect(nats_server.launch.url, "hung")
    learner = await fleet.learner(spec)
    leased: list[Any] = []
    while not leased:  # an actor that takes a task, says that it works on it, and never answers
        with contextlib.suppress(ConsumerGone):
            puller = await bus.puller(names.tasks_stream(spec.run.name), actors_consumer(30.0))
            leased = await puller.fetch(1, 2.0)
        await asyncio.sleep(0)
    await fleet.actor()
    summary = await fleet.finished(learner)
    assert summary.steps == 6
    assert summary.groups["expired"] == 1
    assert summary.groups["issued"] == 13, "its credit was used again"
    assert summary.groups["open"] == 0
    assert summary.tails["expired_seconds_mean"] == 6.0, "twice group_timeout"
    assert "expired: 1 groups, 6.0 s a group" in lost_lines(summary.groups, summary.tails)[0]
    await bus.close()


async def test_episodes_beyond_their_timeout_fail_and_are_reported_too(fleet: Fleet) -> None:
    await fleet.router()
    await fleet.replica(StubEngine())
    spec = slow_world(
        fleet, [1], run={"steps": 3}, environment={"episode_timeout": 1.0, "group_timeout": 3.0},
        algorithm={"group_size": 2, "groups_per_step": 2, "max_staleness": 0},
    )  # fmt: skip
    actor = await fleet.actor()
    summary = await fleet.finished(await fleet.learner(spec))
    assert (summary.steps, summary.groups["failed"], summary.groups["issued"]) == (3, 1, 7)
    assert summary.tails["failed_tokens_mean"] == 6.0
    assert summary.tails["failed_seconds_mean"] >= 1.0
    await until(lambda: fleet.node(actor.id).gauges["episodes"] == 0, within=20, what="its slot is free again")
