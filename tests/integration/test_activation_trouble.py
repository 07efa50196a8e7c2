"""Activation with replicas that fail, dawdle, die or come late: one bad replica holds nobody up, and that is shown."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import AdapterError
from tests.fleet import Fleet
from tests.stubs import StubEngine
from tests.waiting import until

pytestmark = pytest.mark.servers


async def refuse(name: str) -> None:
    raise AdapterError("its shapes are wrong here")


async def hang(name: str) -> None:
    await asyncio.Event().wait()


async def test_a_replica_that_fails_every_load_holds_nobody_up_gets_no_such_request_and_is_shown(
    fleet: Fleet,
) -> None:
    good, bad = StubEngine(), StubEngine(load=refuse)
    await fleet.router()
    await fleet.replica(good)
    bad_id = (await fleet.replica(bad)).id
    spec = fleet.spec(run={"steps": 5000}, fleet={"name": fleet.name, "activation_timeout": 300.0})
    await fleet.actor()
    await fleet.learner(spec)
    reason = f"{bad_id} is left behind: its shapes are wrong here"
    await until(lambda: reason in fleet.detail(spec), within=30, what="the reason is told")
    screen = fleet.screen(spec)
    assert reason in screen
    assert "lacks the active version" in screen
    assert bad_id in fleet.snapshot(spec).to_plain()["left_behind"]
    there = fleet.active(spec)
    await until(lambda: fleet.active(spec) >= there + 10, within=30, what="ten versions more")
    last = fleet.steps(spec)[-1]
    assert last["failed"] == last["expired"] == 0
    assert set(bad.served) <= {None}, "it serves the base model, and no version that it lacks"
    assert bad.strangers == good.strangers == []
    assert len(set(good.served)) >= 4


async def test_a_slow_replica_costs_one_timeout_and_not_one_for_each_version(fleet: Fleet) -> None:
    """With a timeout of 4 s for each version, or for each two, this would not end in time."""
    await fleet.router()
    await fleet.replica()
    await fleet.replica(StubEngine(load=hang))
    spec = fleet.spec(run={"steps": 40}, fleet={"name": fleet.name, "activation_timeout": 4.0})
    await fleet.actor()
    learner = await fleet.learner(spec)
    await until(
        lambda: "it did not confirm within 4 s" in (fleet.screen(spec) if fleet.head(spec) else ""),
        within=30,
        what="it is shown",
    )
    assert (await fleet.finished(learner, within=40)).steps == 40
    assert fleet.active(spec) == 40


async def test_a_slow_replica_is_waited_for_again_once_it_keeps_pace(fleet: Fleet) -> None:
    gate = asyncio.Event()
    late = StubEngine(load=lambda name: gate.wait())
    await fleet.router()
    await fleet.replica()
    slow = await fleet.replica(late)
    spec = fleet.spec(run={"steps": 5000}, fleet={"name": fleet.name, "activation_timeout": 2.0})
    await fleet.actor()
    await fleet.learner(spec)
    await until(lambda: f"{slow.id} is left behind" in fleet.detail(spec), within=30, what="it is left behind")
    gate.set()
    await until(lambda: slow.id not in fleet.detail(spec) and fleet.detail(spec) == "", within=30, what="it is back")
    await until(lambda: len(set(late.served)) > 3, within=30, what="it serves the new versions")
    assert late.strangers == []


@pytest.mark.parametrize("killed", [False, True])
async def test_a_replica_that_dies_while_it_loads_is_not_waited_for(fleet: Fleet, killed: bool) -> None:
    dying = StubEngine(load=hang)
    await fleet.router()
    await fleet.replica()
    victim = await fleet.replica(dying)
    # A killed one seems to be there for 15 s more, but is waited for no longer than anybody; the other says goodbye.
    spec = fleet.spec(run={"steps": 6}, fleet={"name": fleet.name, "activation_timeout": 3.0 if killed else 300.0})
    await fleet.actor()
    learner = await fleet.learner(spec)
    await until(lambda: dying.loading, within=30, what="it loads")
    assert fleet.active(spec) == 0
    await (victim.kill() if killed else victim.stop())
    assert (await fleet.finished(learner)).steps == 6
    assert fleet.active(spec) == 6


async def test_ten_replicas_that_join_at_once_hold_nobody_up_and_serve_only_what_they_have_loaded(
    fleet: Fleet,
) -> None:
    await fleet.router()
    first = await fleet.replica()
    spec = fleet.spec(run={"steps": 5000}, fleet={"name": fleet.name, "activation_timeout": 300.0})
    await fleet.actor()
    await fleet.learner(spec)
    await until(lambda: fleet.active(spec) >= 2, within=30, what="version 2 is active")
    gate = asyncio.Event()
    engines = [StubEngine(load=lambda name: gate.wait()) for _ in range(10)]
    joining = [await fleet.replica(engine, wait=False) for engine in engines]
    await until(lambda: all(engine.loading for engine in engines), within=30, what="all of them load")
    there = fleet.active(spec)
    await until(lambda: fleet.active(spec) >= there + 3, within=30, what="three versions more meanwhile")
    assert not any(fleet.node(component.id) and fleet.node(component.id).state == "ready" for component in joining)
    assert all(engine.served == [] for engine in engines), "nobody asks a replica that has not been admitted"
    gate.set()
    ready = [lambda id=component.id: fleet.node(id) and fleet.node(id).state == "ready" for component in joining]
    await until(lambda: all(check() for check in ready), within=40, what="all ten are admitted")
    await first.stop()
    there = fleet.active(spec)
    await until(lambda: fleet.active(spec) >= there + 10, within=40, what="the run goes on with them alone")
    assert any(engine.served for engine in engines)
    assert all(engine.strangers == [] for engine in engines)


async def test_a_fleet_below_min_replicas_makes_the_run_wait_and_say_so_and_go_on_when_replicas_return(
    fleet: Fleet,
) -> None:
    await fleet.router()
    await fleet.replica()
    second = await fleet.replica()
    of_two = {"name": fleet.name, "actors": 2, "min_replicas": 2, "activation_timeout": 1.0}
    spec = fleet.spec(run={"steps": 5000}, fleet=of_two)
    await fleet.actor()
    await fleet.learner(spec)
    await until(lambda: fleet.active(spec) >= 2, within=30, what="version 2 is active")
    await second.stop()
    waits = "waits for 2 replica(s) to serve it, 1 present"
    await until(lambda: waits in fleet.detail(spec), within=30, what="it says what it waits for")
    assert "1 replica is present in fleet" in fleet.detail(spec)
    assert waits in fleet.screen(spec)
    # What is active stays in force, and no more is trained than the window allows: the run waits.
    head = fleet.head(spec)
    assert head is not None
    assert head.active < head.head <= head.active + 2
    stuck = head.active
    await fleet.replica()
    await until(lambda: fleet.active(spec) >= stuck + 3, within=30, what="it goes on")
    await until(lambda: waits not in fleet.detail(spec), within=30, what="and nothing is said any more")


async def test_with_no_replica_left_the_run_waits_and_goes_on_with_the_first_that_comes(fleet: Fleet) -> None:
    await fleet.router()
    only = await fleet.replica()
    spec = fleet.spec(run={"steps": 5000})
    await fleet.actor()
    await fleet.learner(spec)
    await until(lambda: fleet.active(spec) >= 2, within=30, what="version 2 is active")
    await only.stop()
    await until(lambda: "no replica is present in fleet" in fleet.detail(spec), within=30, what="it says so")
    stuck = fleet.active(spec)
    await fleet.replica(StubEngine())
    await until(lambda: fleet.active(spec) >= stuck + 3, within=40, what="it goes on")


async def test_versions_committed_while_an_older_one_hangs_are_skipped_but_for_the_newest(fleet: Fleet) -> None:
    gate = asyncio.Event()
    engine = StubEngine(load=lambda name: gate.wait())
    await fleet.router()
    replica = await fleet.replica(engine)
    spec = fleet.spec(
        run={"steps": 5000},
        algorithm={"group_size": 2, "groups_per_step": 2, "max_staleness": 3},
        fleet={"name": fleet.name, "activation_timeout": 300.0},
    )
    await fleet.actor()
    await fleet.learner(spec)

    def head() -> int:
        found = fleet.head(spec)
        return found.head if found is not None else 0

    await until(lambda: head() == 4, within=30, what="the window's versions are committed")
    assert fleet.active(spec) == 0
    live = fleet.snapshot(spec).head.live
    assert [ref.version for ref in live] == [4], "skipped versions are not kept"
    heads = replica.service._heads.heads
    await until(lambda: heads[spec.run.name].head == 4, within=10, what="the replica knows")
    gate.set()
    await until(lambda: fleet.active(spec) >= 4, within=30, what="the newest is active")
    loaded = {int(name.split("-v")[1][:6]) for name in engine.loading}
    assert 4 in loaded
    assert not {2, 3} & loaded, "skipped versions retire unseen"
