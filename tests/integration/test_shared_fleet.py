"""Two runs on one fleet: what goes wrong with one costs the other nothing."""

from __future__ import annotations

from typing import Any

import pytest

from broker.code import load_object
from broker.runspec import RunSpec
from tests.fleet import Fleet
from tests.stubs import StubEngine
from tests.waiting import until

pytestmark = pytest.mark.servers

STEPS = 5000

WORLD = """
import asyncio

from actors.environment import StepResult

gate = asyncio.Event()
begun = []


class Gated:
    def reset(self, task, seed):
        return task["prompt"]

    async def step(self, reply):
        begun.append(reply)
        await gate.wait()
        return StepResult(reward=float(len(begun) % 3), done=True)
"""


def run_of(fleet: Fleet, name: str, **sections: Any) -> RunSpec:
    algorithm = {"group_size": 2, "groups_per_step": 2, "max_staleness": 1}
    return fleet.spec(f"{name}-{fleet.name}", **{"run": {"steps": STEPS}, "algorithm": algorithm, **sections})


def made(fleet: Fleet, spec: RunSpec) -> int:
    return len(fleet.steps(spec))


async def goes_on(fleet: Fleet, spec: RunSpec, steps: int = 10) -> None:
    before = made(fleet, spec)
    await until(lambda: made(fleet, spec) >= before + steps, within=120, what=f"{steps} steps more of {spec.run.name}")


async def test_two_runs_share_an_actor_and_both_get_on(fleet: Fleet) -> None:
    await fleet.router()
    await fleet.replica()
    one, two = run_of(fleet, "one"), run_of(fleet, "two")
    await fleet.actor(max_inflight=4)
    await fleet.learner(one)
    await fleet.learner(two)
    await until(lambda: made(fleet, one) > 0 and made(fleet, two) > 0, within=30, what="both have begun")
    before = made(fleet, one), made(fleet, two)
    await until(lambda: made(fleet, one) + made(fleet, two) >= sum(before) + 24, within=120, what="24 steps")
    shares = made(fleet, one) - before[0], made(fleet, two) - before[1]
    assert min(shares) >= 8, f"neither starves the other: {shares}"


async def test_a_run_whose_learner_was_killed_costs_the_other_nothing(fleet: Fleet) -> None:
    await fleet.router()
    await fleet.replica()
    dead, alive = run_of(fleet, "dead"), run_of(fleet, "alive")
    await fleet.actor(max_inflight=4)
    victim = await fleet.learner(dead)
    await fleet.learner(alive)
    await until(lambda: made(fleet, dead) > 0 and made(fleet, alive) > 0, within=30, what="both have begun")
    await victim.kill()
    there = made(fleet, dead)
    await goes_on(fleet, alive, 20)
    await until(lambda: fleet.learner_node(dead) is None, within=30, what="its presence has faded")
    await goes_on(fleet, alive, 20)
    assert made(fleet, dead) == there
    await fleet.learner(dead, take_over=True)
    await goes_on(fleet, dead)
    await goes_on(fleet, alive)


async def test_groups_that_cannot_be_handed_over_hold_only_their_own_runs_slots(fleet: Fleet) -> None:
    """The groups stream of one run is full: its groups wait at the actor, in number all that it may hold."""
    await fleet.router()
    await fleet.replica()
    stuck, free = run_of(fleet, "stuck"), run_of(fleet, "free")
    await fleet.learner(stuck)
    await until(lambda: fleet.learner_node(stuck) and fleet.learner_node(stuck).state == "ready", within=30)
    await limit_groups_stream(fleet, stuck, 1)
    actor = await fleet.actor(max_inflight=4)
    await until(
        lambda: fleet.node(actor.id) and fleet.node(actor.id).gauges["blocked"] == 4.0,
        within=30,
        what="its groups fill its share",
    )
    await fleet.learner(free)
    await goes_on(fleet, free, 30)
    assert fleet.node(actor.id).gauges["blocked"] >= 4.0
    assert made(fleet, stuck) == 0
    await limit_groups_stream(fleet, stuck, 4)
    await goes_on(fleet, stuck)
    await goes_on(fleet, free)


async def test_a_dead_learner_and_a_full_stream_at_once_cost_a_third_run_nothing(fleet: Fleet) -> None:
    await fleet.router()
    await fleet.replica(StubEngine(slots=16))
    dead, stuck, free = run_of(fleet, "dead"), run_of(fleet, "stuck"), run_of(fleet, "free")
    victim = await fleet.learner(dead)
    await fleet.learner(stuck)
    await until(lambda: fleet.learner_node(stuck) and fleet.learner_node(stuck).state == "ready", within=30)
    await limit_groups_stream(fleet, stuck, 1)
    actor = await fleet.actor(max_inflight=6)
    await until(lambda: made(fleet, dead) > 0, within=30, what="the first has begun")
    await victim.kill()
    there = made(fleet, dead)
    await until(lambda: fleet.node(actor.id).gauges["blocked"] >= 4.0, within=30, what="groups of the second wait")
    await fleet.learner(free)
    await goes_on(fleet, free, 30)
    assert (made(fleet, dead), made(fleet, stuck)) == (there, 0)
    await limit_groups_stream(fleet, stuck, 4)
    await fleet.learner(dead, take_over=True)
    for spec in (dead, stuck, free):
        await goes_on(fleet, spec)


async def limit_groups_stream(fleet: Fleet, spec: RunSpec, messages: int) -> None:
    """Leave this much room in a run's groups stream. With room for one group its learner cannot make a step of two."""
    jetstream = fleet.registry.bus.jetstream
    config = (await jetstream.stream_info(f"GROUPS_{spec.run.name}")).config
    config.max_msgs = messages
    await jetstream.update_stream(config)


async def test_a_run_with_slow_episodes_and_huge_groups_does_not_keep_every_slot(fleet: Fleet) -> None:
    (fleet.directory / "world.py").write_text(WORLD)
    await fleet.router()
    await fleet.replica(StubEngine(slots=16))
    algorithm = {"group_size": 4, "groups_per_step": 4, "max_staleness": 4}
    slow = run_of(fleet, "slow", environment={"environment": "world.py:Gated", "rewards": []}, algorithm=algorithm)
    quick = run_of(fleet, "quick")
    await fleet.actor(max_inflight=8)
    await fleet.learner(quick)
    await goes_on(fleet, quick, 2)
    await fleet.learner(slow)
    begun: Any = load_object("world.py:begun", roots=[fleet.directory])
    await until(lambda: len(begun) >= 4, within=30, what="a group of the slow run is under way")
    await goes_on(fleet, quick, 30)
    assert len(begun) == 4, "the slow run got its half and no more, while the other wants the rest"
    gate: Any = load_object("world.py:gate", roots=[fleet.directory])
    gate.set()
    await goes_on(fleet, slow, 2)
    await goes_on(fleet, quick)
