"""A lease: how often the actor speaks, what it does when the lease lapsed, and that it is kept until the answer is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import actors.service as module
from actors.service import Actor, Lease
from broker.bus import Receipt, actors_consumer
from broker.errors import ConnectionFailed, StoreError
from broker.messages import GroupFailed, Message, Task
from tests.waiting import until

TASK = Task(run="r", incarnation="i", group="g", index=0, columns={}, group_size=4, seed=0)


class Delivery:
    """A delivery of the message that issued TASK."""

    subject = "tasks.r.1.g"

    def __init__(self, sequence: int = 7, attempt: int = 1) -> None:
        self.sequence, self.attempt = sequence, attempt
        self.data, self.headers = TASK.encode(), dict[str, str]()
        self.signs_of_life = 0
        self.ended = ""

    async def in_progress(self) -> None:
        self.signs_of_life += 1

    async def ack(self) -> bool:
        self.ended = "acknowledged"
        return True

    async def release(self, delay: float = 0.0) -> None:
        self.ended = "released"


class StubBus:
    """Says what it is told to say to a publish."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(new_inbox=lambda: "inbox")
        self.problems: Iterator[Exception] = iter(())
        self.published: list[str] = []

    async def publish(self, subject: str, message: Message, *, id: str, headers: Any) -> Receipt:
        if problem := next(self.problems, None):
            raise problem
        self.published.append(id)
        return Receipt("stored", 1)


class Fixture:
    """An actor whose groups end, without an answer of their own, once `finish` is set."""

    def __init__(self) -> None:
        self.bus = StubBus()
        self.begun: list[Lease] = []
        self.finish = asyncio.Event()
        self.answer: Message | None = None
        spec = SimpleNamespace(fleet=SimpleNamespace(lease_seconds=30.0))
        workload = SimpleNamespace(run="r", incarnation="i", spec=spec)
        nothing: Any = None
        bus: Any = self.bus
        workloads: Any = SimpleNamespace(of=lambda head: workload)
        self.actor = Actor(
            bus, nothing, nothing, nothing, fleet="f", id="a", context=1, roots=[], max_inflight=8, workloads=workloads
        )
        heads: Any = SimpleNamespace(heads={"r": SimpleNamespace(incarnation="i")})
        roster: Any = SimpleNamespace(present=lambda *of: [])
        self.actor._heads, self.actor._roster = heads, roster
        self.actor._answer = self.sample

    async def sample(self, lease: Lease) -> tuple[Message | None, str]:
        self.begun.append(lease)
        await self.finish.wait()
        return self.answer, lease.answer_id("answer")

    async def accept(self, *deliveries: Any) -> None:
        for delivery in deliveries:
            await self.actor._accept(delivery)

    @property
    def slots(self) -> int:
        return self.actor._slots(blocked=False)

    async def done(self) -> None:
        self.finish.set()
        await until(lambda: not self.actor._tasks, what="all tasks are over")


async def test_an_actor_gives_signs_of_life_well_within_the_lease_that_its_run_asks_for() -> None:
    seconds = 0.3
    spec = SimpleNamespace(fleet=SimpleNamespace(lease_seconds=seconds))
    lease: Any = SimpleNamespace(delivery=Delivery(), workload=SimpleNamespace(spec=spec))
    actor: Any = None
    loop = asyncio.get_running_loop()
    began = loop.time()
    keeping = asyncio.create_task(Actor._keep(actor, lease))
    await until(lambda: lease.delivery.signs_of_life == 4, what="signs of life")
    keeping.cancel()
    assert loop.time() - began > seconds, "no more often than is needed"
    assert actors_consumer(seconds).ack_wait == seconds


async def test_a_task_that_comes_again_to_the_actor_that_works_on_it_is_worked_on_once() -> None:
    subject = Fixture()
    first, second = Delivery(), Delivery(attempt=2)
    await subject.accept(first, second)
    await until(lambda: subject.begun)
    assert (subject.slots, second.signs_of_life) == (4, 1)
    await subject.done()
    assert len(subject.begun) == 1
    assert (first.ended, second.ended) == ("", "acknowledged"), "the newest delivery is the one that counts"
    assert (subject.slots, subject.actor._leases) == (0, {})


async def test_a_task_that_was_issued_again_is_another_with_slots_of_its_own() -> None:
    subject = Fixture()
    first, second = Delivery(), Delivery(sequence=8)
    await subject.accept(first, second)
    assert subject.slots == 8
    await subject.done()
    assert (len(subject.begun), first.ended, second.ended) == (2, "acknowledged", "acknowledged")
    assert subject.slots == 0


async def test_a_finished_group_waits_for_a_broker_that_is_away_or_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORE_RETRY_SECONDS", 0.0)
    subject = Fixture()
    subject.answer = GroupFailed(
        run="r", incarnation="i", group="g", index=0, version=0, failure="task", reason="x", lengths=[], seconds={},
        actor="a",
    )  # fmt: skip
    subject.bus.problems = iter([ConnectionFailed("NATS is away"), StoreError("its disk is full")])
    delivery = Delivery()
    await subject.accept(delivery)
    await subject.done()
    assert (len(subject.begun), delivery.ended) == (1, "acknowledged")
    assert subject.bus.published == ["g:7.1:answer"], "under the id that the first try had"
    assert subject.actor._trouble == ""


async def test_a_group_that_is_too_old_waits_for_no_broker() -> None:
    subject = Fixture()
    subject.answer = TASK
    subject.bus.problems = iter([ConnectionFailed("NATS is away")])
    delivery = Delivery()
    await subject.accept(delivery)
    await until(lambda: subject.begun)
    subject.begun[0].stale = True
    await subject.done()
    assert (delivery.ended, subject.bus.published) == ("released", [])
