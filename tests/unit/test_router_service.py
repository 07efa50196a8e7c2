"""The router's shell: requests that a replica reports are not placed again, and the bus's errors end nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import nats.errors
import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from broker import names
from broker.blocks import chain
from broker.errors import MalformedMessage
from broker.messages import (
    CacheEvent,
    CancelRequest,
    Completion,
    GenerateRefused,
    GenerateReply,
    GenerateRequest,
    ReplicaLoad,
    RouterBeat,
    pack_ids,
)
from observability import tracing
from router.service import (
    PROBE_SECONDS,
    ROUTER_SILENT_SECONDS,
    SILENT_SECONDS,
    TICK_SECONDS,
    WAIT_SECONDS,
    RouterService,
)
from tests.waiting import until

OK = GenerateReply(
    id="p",
    replica="a",
    token_ids=b"",
    logprobs=b"",
    finish="stop",
    adapter=None,
    version=0,
    cached_tokens=0,
    seconds=0.0,
)


class StubBus:
    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.replies: list[object] = []
        self.requests: list[tuple[str, object]] = []
        self.answers: list[Any] = []
        self.broken = False

    async def send(self, subject: str, message: object, *, reply: str = "", **_: object) -> None:
        if self.broken:
            raise nats.errors.OutboundBufferLimitError
        self.sent.append((subject, message))
        self.replies.append(reply)

    async def request(self, subject: str, request: object, **_: object) -> object:
        self.requests.append((subject, request))
        answer = self.answers.pop(0)
        return message(answer) if answer is not None else None


class Fixture:
    def __init__(self, *replicas: str, id: str = "router", **options: Any) -> None:
        self.bus = StubBus()
        self.now = 100.0
        self.present = list(replicas)
        self.context = 512
        bus: Any = self.bus
        registry: Any = None
        self.router = RouterService(bus, registry, fleet="f", id=id, clock=lambda: self.now, **options)
        self.beats: dict[str, int] = {}
        self.take_in()

    def roster(self) -> Any:
        nodes = [
            SimpleNamespace(id=id, confirmed=[], state="ready", cache_tokens=4096, block=16, context=self.context)
            for id in self.present
        ]
        return SimpleNamespace(present=lambda kind, fleet: nodes)

    def take_in(self) -> list[str]:
        return self.router._take_in(self.roster())

    async def ask(
        self, id: str, *, group: str = "", siblings: int = 1, prompt: bytes = pack_ids(np.arange(40))
    ) -> None:
        request = GenerateRequest(
            id=id, run="run", group=group, siblings=siblings, adapter=None, version=0, prompt=prompt,
            max_new_tokens=16, temperature=1.0, stop_token_ids=[],
        )  # fmt: skip
        await self.router._on_request(message(request, "inbox"))

    async def report(
        self, replica: str, unfinished: list[str], completed: Sequence[str] = (), *, ok: bool = True,
        fault: bool = False, cached: int = 0, blocks: bytes = b"", **more: Any,
    ) -> None:  # fmt: skip
        self.beats[replica] = self.beats.get(replica, 0) + 1
        done = [
            Completion(
                id=id, ok=ok, prompt_tokens=40, cached_tokens=cached, output_tokens=8, blocks=blocks, fault=fault
            )
            for id in completed
        ]
        load = ReplicaLoad(
            replica=replica, running=0, waiting=0, unfinished=unfinished, completed=done, beat=self.beats[replica],
            **more,
        )  # fmt: skip
        await self.router._on_load(message(load))

    def placed(self) -> list[tuple[str, str]]:
        """(replica, request) in the order in which they were sent."""
        return [
            (subject.split(".")[1], request.id)
            for subject, request in self.bus.sent
            if isinstance(request, GenerateRequest) and subject.startswith("replica.")
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


async def test_a_replica_that_is_present_but_silent_is_lost_once_and_back_with_its_next_report() -> None:
    subject = Fixture("a", "b")
    await subject.report("a", [])
    subject.now += SILENT_SECONDS + 1
    for _ in range(20):
        await subject.report("b", [])
        await subject.router._tick(subject.roster(), away=False)
        subject.now += TICK_SECONDS
        assert subject.router.placer.eligible(None) == ["b"]
    assert subject.router.lost_replicas == 1
    await subject.report("a", [])
    await subject.router._tick(subject.roster(), away=False)
    assert sorted(subject.router.placer.eligible(None)) == ["a", "b"]


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


async def test_a_request_that_waited_has_one_span_as_long_as_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    subject = Fixture()
    before = time.time_ns()
    await subject.ask("r")
    asked = time.time_ns()
    subject.present = ["a"]
    subject.take_in()
    await subject.router._retry_waiting()
    [span] = exporter.get_finished_spans()
    assert span.start_time is not None
    assert before <= span.start_time <= asked
    assert span.attributes is not None
    assert (span.name, span.attributes["farflung.replica"]) == ("route", "a")


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

    async def send_and_cancel(to: str, body: object, **more: Any) -> None:
        await send(to, body, **more)
        if to == names.replica_generate("a"):
            await subject.router._on_cancel(message(CancelRequest(id="second")))

    subject.bus.send = send_and_cancel  # type: ignore[assignment]
    await subject.router._retry_waiting()
    assert subject.placed() == [("a", "first")]


# ----------------------------------------------------------------------------------------------------- failing replicas


async def test_a_failing_replica_is_out_at_once_and_back_once_it_answers_a_probe() -> None:
    subject = Fixture("a", "b")
    subject.bus.answers = [None, GenerateRefused(id="p", code="failed", reason="dead", retryable=True, source="a"), OK]
    await subject.ask("r")
    assert subject.placed() == [("a", "r")]
    await subject.report("a", [], completed=["r"], ok=False, fault=True)
    for number in range(4):
        await subject.ask(f"r{number}")
    assert {replica for replica, _ in subject.placed()[1:]} == {"b"}
    for tries in range(1, 4):
        assert subject.router.placer.eligible(None) == ["b"]
        subject.router._probe_failing()
        assert len(subject.bus.requests) == tries - 1, "probed once a second, not more"
        subject.now += PROBE_SECONDS
        await subject.report("a", [])
        await subject.report("b", [f"r{number}" for number in range(4)])
        subject.router._probe_failing()
        await until(lambda: all(failing.probe is None or failing.probe.done()  # type: ignore[union-attr]
                                for failing in subject.router._failing.values()))  # fmt: skip
        subject.take_in()
        assert [to for to, _ in subject.bus.requests] == [names.replica_generate("a")] * tries
    assert subject.router.placer.eligible(None) == ["a", "b"]
    assert subject.router._failing == {}


async def test_a_request_that_failed_by_its_own_fault_takes_no_replica_out() -> None:
    subject = Fixture("a")
    await subject.ask("r")
    await subject.report("a", [], completed=["r"], ok=False)
    assert subject.router.placer.eligible(None) == ["a"]
    assert subject.router.placer.load("a") == 0.0


async def test_a_failing_replica_is_probed_under_no_run() -> None:
    subject = Fixture("a")
    subject.bus.answers = [OK]
    await subject.ask("r")
    await subject.report("a", [], completed=["r"], ok=False, fault=True)
    subject.now += PROBE_SECONDS
    subject.router._probe_failing()
    await until(lambda: subject.router._failing == {})
    [(_, probe)] = subject.bus.requests
    assert isinstance(probe, GenerateRequest)
    assert probe.run == "", "it may be just this run that the replica may not serve"


async def test_a_request_that_a_replica_refused_goes_to_those_that_have_not_until_all_have() -> None:
    subject = Fixture("a", "b", "c")
    for _ in range(6):
        await subject.ask("r", group="g", siblings=4)
        replica, _ = subject.placed()[-1]
        await subject.report(replica, [], completed=["r"], ok=False)
    places = [replica for replica, _ in subject.placed()]
    assert [set(places[:3]), set(places[3:])] == [{"a", "b", "c"}] * 2
    await subject.ask("r", group="g", siblings=4)
    replica, _ = subject.placed()[-1]
    await subject.report(replica, [], completed=["r"])
    assert subject.router._refusals == {}


async def test_a_failing_replica_that_goes_is_not_probed_any_more() -> None:
    subject = Fixture("a", "b")
    await subject.ask("r")
    await subject.report("a", [], completed=["r"], ok=False, fault=True)
    subject.present = ["b"]
    for replica in subject.take_in():
        await subject.router._lose(replica, "gone")
    subject.now += PROBE_SECONDS
    subject.router._probe_failing()
    assert subject.bus.requests == []


# ------------------------------------------------------------------------------------------------------ several routers


class Fleet:
    """Several routers on one stub bus."""

    def __init__(self, *routers: str) -> None:
        self.subjects = {id: Fixture("a", "b", id=id) for id in routers}

    async def beat(self, *silent: str) -> None:
        for id, subject in self.subjects.items():
            for other in self.subjects:
                if other not in silent:
                    await subject.router._on_beat(message(RouterBeat(id=other)))
            assert id not in subject.router._routers


async def test_routers_share_the_groups_and_agree_on_whose_is_which() -> None:
    fleet = Fleet("x", "y", "z")
    await fleet.beat()
    owners = {f"g{number}": {s.router._owner(f"g{number}") for s in fleet.subjects.values()} for number in range(300)}
    assert all(len(said) == 1 for said in owners.values())
    counts = [sum(said == {router} for said in owners.values()) for router in "xyz"]
    assert min(counts) > 60
    fleet.subjects["x"].now += ROUTER_SILENT_SECONDS + 0.1
    await fleet.subjects["x"].router._on_beat(message(RouterBeat(id="y")))
    moved = [group for group, said in owners.items() if {fleet.subjects["x"].router._owner(group)} != said]
    assert {owners[group] == {"z"} for group in moved} == {True}, "only the silent router's groups move"
    assert moved


async def test_a_request_is_handed_to_the_router_whose_group_it_is() -> None:
    fleet = Fleet("x", "y")
    await fleet.beat()
    subject = fleet.subjects["x"]
    theirs = next(f"g{number}" for number in range(99) if subject.router._owner(f"g{number}") == "y")
    await subject.ask("r", group=theirs)
    assert subject.placed() == []
    assert [to for to, _ in subject.bus.sent] == [names.router_generate("y")]
    assert subject.bus.replies == ["inbox"]
    handed = subject.bus.sent[0][1]
    await fleet.subjects["y"].router._on_own(message(handed, "inbox"))
    assert len(fleet.subjects["y"].placed()) == 1
    await fleet.subjects["y"].router._on_own(message(handed, "inbox"))
    assert len(fleet.subjects["y"].placed()) == 1
    await subject.router._on_beat(message(RouterBeat(id="y", leaving=True)))
    await subject.ask("s", group=theirs)
    assert [id for _, id in subject.placed()] == ["s"]


async def test_requests_without_a_group_meet_where_their_prompt_is_the_same() -> None:
    fleet = Fleet("x", "y")
    await fleet.beat()
    for subject in fleet.subjects.values():
        for number in range(4):
            await subject.ask(f"r{number}")
    kept = {id for id, subject in fleet.subjects.items() if subject.placed()}
    assert len(kept) == 1


async def test_what_other_routers_placed_and_still_expect_counts_as_they_wrote_it() -> None:
    subject = Fixture("a", "b")
    await subject.report("a", ["x", "y"], work=[3000.0, 1000.0], reserved={"theirs": 500.0})
    assert subject.router.placer.load("a") == 4500.0
    await subject.ask("own", group="ours", siblings=8)
    assert subject.placed() == [("b", "own")]
    own = subject.router.placer.load("b")
    assert own > 0
    sent = subject.bus.sent[-1][1]
    assert isinstance(sent, GenerateRequest)
    assert sent.work + sent.reserved == own
    await subject.report("b", ["own"], work=[sent.work], reserved={"ours": sent.reserved})
    assert subject.router.placer.load("b") == own, "what is ours is not counted twice"


# ------------------------------------------------------------------------------------------------------------ bad input


async def test_what_no_replica_could_ever_serve_is_refused_at_once() -> None:
    subject = Fixture("a")
    await subject.ask("empty", prompt=b"")
    await subject.ask("long", prompt=pack_ids(np.arange(512)))
    codes = [(body.code, body.retryable) for _, body in subject.bus.sent if isinstance(body, GenerateRefused)]
    assert codes == [("invalid", False), ("prompt_too_long", False)]
    assert subject.placed() == []
    assert subject.router.refused == 2
    subject.context = 0
    subject.take_in()
    await subject.ask("unknown context", prompt=pack_ids(np.arange(512)))
    assert len(subject.placed()) == 1


async def test_no_more_wait_than_may() -> None:
    subject = Fixture(max_waiting=2)
    for number in range(3):
        await subject.ask(f"r{number}")
    assert list(subject.router._waiting) == ["r0", "r1"]
    assert [body.reason for _, body in subject.bus.sent if isinstance(body, GenerateRefused)] == [
        "2 requests wait already"
    ]


@pytest.mark.parametrize(
    "more", [{"work": [float("nan")]}, {"work": [-1.0]}, {"reserved": {"g": float("inf")}}, {"blocks": b"123"},
             {"cache": [CacheEvent("stored", blocks=b"1234567")]}],
)  # fmt: skip
async def test_a_report_that_makes_no_sense_changes_nothing(more: dict[str, Any]) -> None:
    subject = Fixture("a")
    await subject.ask("r")
    load = subject.router.placer.load("a")
    with pytest.raises(MalformedMessage):
        await subject.report("a", ["x"], completed=["r"], **more)
    assert subject.router.placer.load("a") == load
    assert "r" in subject.router._forwarded


async def test_a_completion_of_an_unknown_request_is_left_out() -> None:
    subject = Fixture("a")
    await subject.report("a", [], completed=["never asked"], cached=10**9)
    assert subject.router.placer.load("a") == 0.0
    await subject.ask("r")
    await subject.report("a", [], completed=["r"], cached=10**9)
    assert subject.router.readings()["cached_tokens"] <= subject.router.readings()["prompt_tokens"]


async def test_what_an_engine_publishes_reaches_the_mirror() -> None:
    subject = Fixture("a", "b")
    prompt = np.arange(40, dtype=np.int32)
    await subject.report("b", [], cache=[CacheEvent("stored", None, chain(None, prompt))])
    await subject.ask("r")
    assert subject.placed() == [("b", "r")]
    assert subject.router.readings()["placed.affinity"] == 1
    await subject.report("b", ["r"], cache=[CacheEvent("removed", None, chain(None, prompt)), CacheEvent("cleared")])
    assert subject.router.readings()["mirrored_blocks"] == 0


async def test_a_cancellation_reaches_whoever_has_the_request() -> None:
    subject = Fixture("a", "b")
    await subject.ask("own")
    await subject.report("b", ["another router's"])
    for id in ("own", "another router's", "nobody's"):
        await subject.router._on_cancel(message(CancelRequest(id=id)))
    cancelled = [(to, body.id) for to, body in subject.bus.sent if isinstance(body, CancelRequest)]
    assert cancelled == [(names.replica_cancel("a"), "own"), (names.replica_cancel("b"), "another router's")]
