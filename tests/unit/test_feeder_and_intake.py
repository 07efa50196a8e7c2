"""Issuing and receiving, with bus and store in memory: what is lost is issued again, what is late is not trained."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.bus import ConsumerGone, Receipt
from broker.errors import ConnectionFailed, ObjectMissing
from broker.messages import AdapterRef, BlobRef, GroupFailed, GroupReady, Message, Task
from broker.store import reference
from broker.trajectories import Episode, Group, Row
from deploy.config import check
from learner.buffer import Buffer
from learner.credit import CreditRule
from learner.feeder import Feeder, task_seed
from learner.intake import Intake
from learner.ledger import Ledger
from learner.tails import Tails
from tests.unit.test_learner_parts import head
from tests.waiting import until

SPEC = check(
    {"run": {"name": "r", "model": "m"}, "tasks": {"source": "t.jsonl", "shuffle": False},
     "environment": {"rewards": ["r.py:f"]}},
    "x",
)  # fmt: skip


class Source:
    length: int | None = 4

    def row(self, index: int) -> dict[str, Any]:
        return {"prompt": f"task {index}"}


class StubBus:
    """Keeps what is published and dead-lettered; refuses the first `failures` publishes."""

    def __init__(self, failures: int = 0) -> None:
        self.published: list[tuple[str, Task, str]] = []
        self.letters: list[tuple[str, str]] = []
        self.failures = failures

    async def publish(self, subject: str, message: Message, *, id: str, headers: Any = None) -> Receipt:
        if self.failures:
            self.failures -= 1
            raise ConnectionFailed("away")
        assert isinstance(message, Task)
        self.published.append((subject, message, id))
        return Receipt("stored", len(self.published))

    async def dead_letter(self, subject: str, payload: bytes, reason: str) -> None:
        self.letters.append((subject, reason))


class StubStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def get_patiently(self, ref: BlobRef) -> bytes:
        if ref.key not in self.objects:
            raise ObjectMissing(ref.key)
        return self.objects[ref.key]


class StubDelivery:
    subject = "groups.r.x"

    def __init__(self, data: bytes, sequence: int) -> None:
        self.data = data
        self.sequence = sequence
        self.signs_of_life = 0
        self.headers: dict[str, str] = {}
        self.acked = False

    async def ack(self, timeout: float = 5.0) -> bool:
        self.acked = True
        return True

    async def in_progress(self) -> None:
        self.signs_of_life += 1


class StubPuller:
    def __init__(self, deliveries: list[StubDelivery]) -> None:
        self.deliveries = deliveries

    async def fetch(self, batch: int, timeout: float) -> list[StubDelivery]:
        if not self.deliveries:
            await asyncio.Event().wait()
        found, self.deliveries = self.deliveries, []
        return found


class StubSession:
    run = "r"

    def __init__(self, version: int = 0, first: int = 0) -> None:
        self.head = head(head=version, active=version, live=[], epoch=1, first=first)
        self.adapters: dict[int, AdapterRef] = {}


def feeder(bus: StubBus, ledger: Ledger) -> Feeder:
    return Feeder(bus, Source(), SPEC, ledger, head(epoch=3))  # type: ignore[arg-type]


async def test_tasks_go_out_in_order_with_ids_seeds_and_the_version_their_credit_counted_on() -> None:
    bus, ledger = StubBus(), Ledger()
    subject = feeder(bus, ledger)
    for _ in range(6):
        await subject.issue_next(active=4)
    tasks = [task for _, task, _ in bus.published]
    assert [task.group for task in tasks] == [f"r-i-{index:08d}" for index in range(6)]
    assert [task.columns["prompt"] for task in tasks] == [f"task {index % 4}" for index in range(6)]
    assert {task.seed for task in tasks} == {task_seed(0, index) for index in range(6)}
    assert all(task.active == 4 for task in tasks)
    assert len({id for _, _, id in bus.published}) == 6
    assert all(".e3" in id for _, _, id in bus.published), "ids of another epoch are never mistaken for ours"


async def test_a_broker_that_is_away_holds_a_task_up_but_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(seconds: float) -> None:
        return None

    monkeypatch.setattr("learner.feeder.asyncio.sleep", at_once)
    bus, ledger = StubBus(failures=3), Ledger()
    await feeder(bus, ledger).issue_next(active=0)
    assert len(bus.published) == 1
    assert ledger.open_groups == 1


async def test_at_start_tasks_ahead_of_the_cursor_are_adopted_and_lost_ones_issued_again() -> None:
    bus, ledger = StubBus(), Ledger()
    for index in range(4):
        ledger.issue(f"r-i-{index:08d}")
    ledger.close("r-i-00000000", "trained")
    held = {"r-i-00000001", "r-i-00000003", "r-i-00000005", "r-old-00000009"}
    again = await feeder(bus, ledger).adopt(held, active=2)
    assert again == 2
    assert [task.index for _, task, _ in bus.published] == [2, 4], "what the broker holds is not issued twice"
    assert ledger.cursor == 6
    assert sorted(ledger.open_ids().values()) == [1, 2, 3, 4, 5]
    ledger.check()


# ---------------------------------------------------------------------------------------------------------- intake


def blob_of(group: str, version: int = 0) -> bytes:
    row = Row.of([1, 2, 3], [0, 0, -1], [0, 0, 1], [-1, -1, version])
    episodes = [
        Episode(index=n, rows=[row], reward=float(n), parts={}, turns=[], truncated=False, replicas=["p"])
        for n in range(2)
    ]
    return Group(
        run="r", incarnation="i", group=group, index=0, version=version, adapter=None, episodes=episodes
    ).encode()


def ready(group: str, data: bytes, *, version: int = 0, incarnation: str = "i") -> GroupReady:
    ref = reference("runs/r/i/groups/x", data)
    return GroupReady(
        run="r", incarnation=incarnation, group=group, index=0, version=version, adapter=None, key=ref.key,
        size=ref.size, sha256=ref.sha256, rewards=[0.0, 1.0], lengths=[1, 1], seconds={"group": 4.0}, actor="a",
    )  # fmt: skip


def failed(group: str, failure: str = "environment") -> GroupFailed:
    return GroupFailed(
        run="r", incarnation="i", group=group, index=0, version=0, failure=failure, reason="it broke",  # type: ignore[arg-type]
        lengths=[5, 6], seconds={"group": 9.0}, actor="a",
    )  # fmt: skip


class Desk:
    """An intake with its surroundings."""

    def __init__(self, *open_groups: str, version: int = 0, first: int = 0) -> None:
        self.bus, self.store, self.ledger, self.buffer = StubBus(), StubStore(), Ledger(), Buffer()
        for group in open_groups:
            self.ledger.issue(group)
        self.tails = Tails()
        self.puller = StubPuller([])
        self.sequence = 0
        self.intake = Intake(
            self.bus,  # type: ignore[arg-type]
            self.store,  # type: ignore[arg-type]
            self.puller,  # type: ignore[arg-type]
            StubSession(version, first),  # type: ignore[arg-type]
            self.ledger,
            self.buffer,
            feeder(self.bus, self.ledger),
            CreditRule(groups_per_step=2, max_staleness=1, publish_every=1),
            tails=self.tails,
            on_change=lambda: None,
        )

    async def receive(self, *messages: Message | bytes) -> list[StubDelivery]:
        """Deliver, and return once each has been acted on."""
        deliveries = []
        for item in messages:
            self.sequence += 1
            deliveries.append(StubDelivery(item if isinstance(item, bytes) else item.encode(), self.sequence))
        return await self.deliver(*deliveries)

    async def deliver(self, *deliveries: StubDelivery) -> list[StubDelivery]:
        """Deliver these very messages, once more if they were before."""
        self.puller.deliveries = list(deliveries)
        running = asyncio.create_task(self.intake.run())
        await until(lambda: not self.puller.deliveries and not self.intake._tasks)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return list(deliveries)


async def test_a_good_group_is_buffered_and_its_delivery_held() -> None:
    desk = Desk("g")
    data = blob_of("g")
    desk.store.objects[ready("g", data).key] = data
    [delivery] = await desk.receive(ready("g", data))
    assert "g" in desk.buffer
    assert not delivery.acked


async def test_the_message_that_is_held_is_kept_alive_when_it_comes_again_never_given_up_nor_trained_twice() -> None:
    desk = Desk("g")
    data = blob_of("g")
    desk.store.objects[ready("g", data).key] = data
    [delivery] = await desk.receive(ready("g", data))
    for in_a_step in (False, True):
        if in_a_step:
            assert desk.buffer.take(1) is not None
        await desk.deliver(delivery)
        assert not delivery.acked
        assert len(desk.buffer) == (0 if in_a_step else 1)
    assert delivery.signs_of_life == 2
    assert desk.ledger.late == 0


async def test_an_answer_that_cannot_be_read_closes_its_group_as_failed() -> None:
    desk = Desk("g")
    delivery = StubDelivery(b"garbage", 1)
    delivery.subject = "groups.r.g"
    await desk.deliver(delivery)
    assert delivery.acked
    assert desk.ledger.closed["failed"] == 1
    assert desk.intake.failed_in_a_row == 1


async def test_a_group_of_a_version_that_is_no_more_is_dropped() -> None:
    desk = Desk("g", version=5)
    [delivery] = await desk.receive(ready("g", blob_of("g", 5), version=5))
    assert delivery.acked
    assert desk.ledger.closed["dropped"] == 1


async def test_the_base_model_never_samples_for_a_branched_run() -> None:
    for first, dropped in ((0, 0), (1, 1)):
        desk = Desk("g", version=1, first=first)
        data = blob_of("g")
        desk.store.objects[ready("g", data).key] = data
        await desk.receive(ready("g", data))
        assert desk.ledger.closed["dropped"] == dropped
        assert len(desk.buffer) == 1 - dropped


async def test_another_answer_to_a_group_in_hand_is_acknowledged_and_counted_late() -> None:
    desk = Desk("g")
    data = blob_of("g")
    desk.store.objects[ready("g", data).key] = data
    await desk.receive(ready("g", data))
    [second] = await desk.receive(ready("g", data))
    assert second.acked
    assert desk.ledger.late == 1
    assert len(desk.buffer) == 1


async def test_a_group_that_is_not_open_or_of_another_incarnation_is_late_never_trained() -> None:
    desk = Desk("g")
    data = blob_of("x")
    closed, other = await desk.receive(ready("x", data), ready("g", blob_of("g"), incarnation="old"))
    assert closed.acked
    assert other.acked
    assert desk.ledger.late == 2
    assert len(desk.buffer) == 0


async def test_a_group_that_is_too_stale_is_dropped_and_its_lengths_are_kept() -> None:
    desk = Desk("g", version=5)
    [delivery] = await desk.receive(ready("g", blob_of("g", 3), version=3))
    assert delivery.acked
    assert desk.ledger.closed["dropped"] == 1
    figures = desk.tails.figures()
    assert (figures["dropped_tokens_mean"], figures["dropped_seconds_mean"]) == (1.0, 4.0)


async def test_a_group_that_was_cancelled_for_its_age_is_dropped_with_what_it_had_sampled_and_taken() -> None:
    desk = Desk("g")
    await desk.receive(failed("g", "stale"))
    figures = desk.tails.figures()
    assert (figures["dropped_tokens_mean"], figures["dropped_seconds_mean"]) == (5.5, 9.0)
    await desk.receive(failed("g", "stale"))
    assert desk.tails.figures() == figures, "only what is closed is counted"


async def test_failures_are_counted_by_kind_and_in_a_row() -> None:
    desk = Desk("a", "b", "c", "good")
    await desk.receive(failed("a"), failed("b", "reward"), failed("c", "stale"))
    assert desk.ledger.closed["failed"] == 2
    assert desk.ledger.closed["dropped"] == 1
    assert desk.intake.failures == {"environment": 1, "reward": 1}
    assert desk.intake.failed_in_a_row == 2
    data = blob_of("good")
    desk.store.objects[ready("good", data).key] = data
    await desk.receive(ready("good", data))
    assert desk.intake.failed_in_a_row == 0


async def test_a_blob_that_is_lost_or_another_group_s_is_dead_lettered_and_the_group_issued_again() -> None:
    desk = Desk("lost", "wrong")
    data = blob_of("somebody-else")
    desk.store.objects[ready("wrong", data).key] = data
    lost, wrong = await desk.receive(ready("lost", blob_of("lost")), ready("wrong", data))
    assert lost.acked
    assert wrong.acked
    assert len(desk.bus.letters) == 2
    assert sorted(task.group for _, task, _ in desk.bus.published) == ["lost", "wrong"]
    assert desk.ledger.open_groups == 2


async def test_a_blob_that_nobody_can_read_fails_its_group_and_is_not_made_again() -> None:
    desk = Desk("g")
    data = blob_of("g").replace(b"reward", b"regard")
    desk.store.objects[ready("g", data).key] = data
    [delivery] = await desk.receive(ready("g", data))
    assert delivery.acked
    assert (desk.ledger.closed["failed"], desk.intake.failed_in_a_row) == (1, 1)
    assert len(desk.bus.letters) == 1
    assert desk.bus.published == []
    assert not desk.intake.holds("g")


async def test_what_is_no_message_of_ours_is_dead_lettered_and_the_next_is_received() -> None:
    desk = Desk("g")
    data = blob_of("g")
    desk.store.objects[ready("g", data).key] = data
    garbage, unknown, good = await desk.receive(
        b"\x00\x01",
        Task(run="r", incarnation="i", group="g", index=0, columns={}, group_size=1, seed=0),
        ready("g", data),
    )
    assert garbage.acked
    assert unknown.acked
    assert not good.acked
    assert len(desk.bus.letters) == 2
    assert "g" in desk.buffer


async def test_a_consumer_that_is_gone_ends_the_intake() -> None:
    desk = Desk()

    async def gone(batch: int, timeout: float) -> list[StubDelivery]:
        raise ConsumerGone("deleted")

    desk.puller.fetch = gone  # type: ignore[method-assign]
    with pytest.raises(ConsumerGone):
        await desk.intake.run()
