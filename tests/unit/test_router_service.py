"""The router's shell: requests that a replica reports are not placed again, and the bus's errors end nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nats.errors
import numpy as np
import pytest

from broker import names
from broker.messages import CancelRequest, Completion, GenerateRefused, GenerateRequest, ReplicaLoad, pack_ids
from router.service import SILENT_SECONDS, WAIT_SECONDS, RouterService


class StubBus:
    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.broken = False

    async def send(self, subject: str, message: object, **_: object) -> None:
        if self.broken:
            raise nats.errors.OutboundBufferLimitError
        self.sent.append((subject, message))


class Fixture:
    def __init__(self, *replicas: str) -> None:
        self.bus = StubBus()
        self.now = 100.0
        self.present = list(replicas)
        self.context = 512
        bus: Any = self.bus
        registry: Any = None
        self.router = RouterService(bus, registry, fleet="f", id="router", clock=lambda: self.now)
        self.beats: dict[str, int] = {}
        self.take_in()

    def take_in(self) -> list[str]:
        nodes = [
            SimpleNamespace(id=id, confirmed=[], state="ready", cache_tokens=4096, block=16, context=self.context)
            for id in self.present
        ]
        roster: Any = SimpleNamespace(present=lambda kind, fleet: nodes)
        return self.router._take_in(roster)

    async def ask(self, id: str) -> None:
        request = GenerateRequest(
            id=id, run="run", group="", siblings=1, adapter=None, version=0, prompt=pack_ids(np.arange(40)),
            max_new_tokens=16, temperature=1.0, stop_token_ids=[],
        )  # fmt: skip
        await self.router._on_request(message(request, "inbox"))

    async def report(self, replica: str, unfinished: list[str], completed: list[str] = [], ok: bool = True) -> None:  # noqa: B006
        self.beats[replica] = self.beats.get(replica, 0) + 1
        done = [Completion(id=id, ok=ok, prompt_tokens=40, cached_tokens=0, output_tokens=8) for id in completed]
        load = ReplicaLoad(
            replica=replica, running=0, waiting=0, unfinished=unfinished, completed=done, beat=self.beats[replica]
        )
        await self.router._on_load(message(load))

    def placed(self) -> list[tuple[str, str]]:
        """(replica, request) in the order in which they were sent."""
        return [
            (subject.split(".")[1], request.id)
            for subject, request in self.bus.sent
            if isinstance(request, GenerateRequest)
        ]


def message(body: Any, reply: str = "") -> Any:
    return SimpleNamespace(data=body.encode(), reply=reply, headers={})


async def test_a_router_that_starts_anew_does_not_place_again_what_a_replica_reports() -> None:
    subject = Fixture("a", "b")
    await subject.report("a", ["r"])
    await subject.ask("r")
    assert subject.placed() == []
    await subject.report("a", [], completed=["r"])
    await subject.ask("r")  # its answer was lost
    assert [id for _, id in subject.placed()] == ["r"]


async def test_what_a_silent_replica_reported_is_placed_again() -> None:
    subject = Fixture("a", "b")
    await subject.report("a", ["r"])
    subject.now += SILENT_SECONDS + 1
    await subject.report("b", [])
    subject.take_in()
    await subject.ask("r")
    assert subject.placed() == [("b", "r")]


async def test_a_lost_replicas_reports_are_forgotten() -> None:
    subject = Fixture("a", "b")
    await subject.report("a", ["r"])
    await subject.report("stranger", ["s"])
    subject.present = ["b"]
    for replica in subject.take_in():
        await subject.router._lose(replica, "gone")
    await subject.ask("r")
    assert subject.placed() == [("b", "r")]
    subject.now += SILENT_SECONDS + 1
    subject.router._forget_strangers()
    assert subject.router._unfinished == {}


async def test_a_waiting_request_that_a_replica_has_or_had_is_not_placed() -> None:
    subject = Fixture()
    for id in ("has", "had", "failed"):
        await subject.ask(id)
    await subject.report("a", ["has"], completed=["had"])
    await subject.report("a", ["has"], completed=["failed"], ok=False)
    subject.present = ["a"]
    subject.take_in()
    await subject.router._retry_waiting()
    assert subject.placed() == [("a", "failed")]
    assert not subject.router._waiting


async def test_a_replica_that_was_silent_may_answer_what_was_placed_elsewhere_meanwhile() -> None:
    subject = Fixture("a")
    await subject.ask("r")
    await subject.report("a", ["r"])
    subject.now += SILENT_SECONDS + 1
    subject.present = ["a", "b"]
    await subject.report("b", [])
    subject.take_in()
    await subject.router._lose("a", "silent")
    assert subject.placed() == [("a", "r"), ("b", "r")]
    subject.take_in()
    await subject.report("a", ["r"])
    await subject.report("b", ["r"])
    await subject.report("a", [], completed=["r"])
    assert subject.router.placer.assigned("b") == ["r"]
    await subject.report("b", [], completed=["r"])
    assert subject.router.placer.assigned("b") == []
    assert not subject.router._forwarded
    assert [subject.router.placer.load(replica) for replica in "ab"] == [0.0, 0.0]


async def test_a_request_that_another_replica_still_has_is_not_placed_a_third_time() -> None:
    subject = Fixture("a")
    await subject.ask("r")
    subject.present = ["a", "b"]
    await subject.report("b", ["r"])
    subject.take_in()
    await subject.router._lose("a", "silent")
    assert subject.placed() == [("a", "r")]


async def test_requests_that_others_placed_count_as_load() -> None:
    subject = Fixture("a", "b")
    await subject.report("a", ["x", "y", "z"])
    for number in range(3):
        await subject.ask(f"r{number}")
    assert {replica for replica, _ in subject.placed()} == {"b"}
    await subject.report("a", [])
    assert subject.router.placer.load("a") == 0.0


@pytest.mark.parametrize("lost", [False, True])
async def test_a_request_that_the_bus_does_not_take_waits_and_is_sent_later(lost: bool) -> None:
    subject = Fixture("a")
    if lost:
        await subject.ask("r")
        subject.bus.sent.clear()
    subject.bus.broken = True
    if lost:
        subject.present = ["b"]
        for replica in subject.take_in():
            await subject.router._lose(replica, "gone")
    else:
        await subject.ask("r")
    assert list(subject.router._waiting) == ["r"]
    assert not subject.router._forwarded
    await subject.router._retry_waiting()
    subject.bus.broken = False
    await subject.router._retry_waiting()
    assert subject.placed() == [("b" if lost else "a", "r")]


async def test_a_refusal_that_the_bus_does_not_take_is_sent_later() -> None:
    subject = Fixture()
    await subject.ask("r")
    subject.now += WAIT_SECONDS + 1
    subject.bus.broken = True
    await subject.router._retry_waiting()
    assert list(subject.router._waiting) == ["r"]
    subject.bus.broken = False
    await subject.router._retry_waiting()
    assert [(to, type(body)) for to, body in subject.bus.sent] == [("inbox", GenerateRefused)]
    assert not subject.router._waiting


async def test_a_request_that_is_cancelled_while_others_are_sent_is_not_placed() -> None:
    subject = Fixture()
    await subject.ask("first")
    await subject.ask("second")
    subject.present = ["a"]
    subject.take_in()
    send = subject.bus.send

    async def send_and_cancel(to: str, body: object, **more: object) -> None:
        await send(to, body, **more)
        if to == names.replica_generate("a"):
            await subject.router._on_cancel(message(CancelRequest(id="second")))

    subject.bus.send = send_and_cancel  # type: ignore[method-assign]
    await subject.router._retry_waiting()
    assert subject.placed() == [("a", "first")]
