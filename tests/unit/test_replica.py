"""The replica's adapters: what it holds, what it refuses and for how long, and what it leaves on the disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import actors.adapter_cache as adapter_cache
import actors.replica as module
from actors.adapter_cache import ABANDONED_SECONDS, AdapterCache
from actors.engines.base import EngineHealth, Generation, Sampling
from actors.replica import Replica
from broker.blocks import HASH
from broker.errors import (
    AdapterError,
    AdapterNotLoaded,
    EngineError,
    GenerationError,
    MalformedMessage,
    ObjectMissing,
    StoreError,
)
from broker.messages import (
    AdapterRef,
    BlobRef,
    CacheEvent,
    GenerateRefused,
    GenerateRequest,
    Head,
    Message,
    Node,
    ProbeRef,
    pack_floats,
    pack_ids,
)
from broker.probe import Probe
from tests.waiting import until


def blob(version: int) -> bytes:
    return save({"a": np.full(4, version, np.float32)}, {"adapter_config": '{"peft_type": "LORA"}'})


def ref(version: int) -> AdapterRef:
    data = blob(version)
    digest = hashlib.sha256(data).hexdigest()
    return AdapterRef(version=version, name=f"run-v{version:06d}", key=f"k/{digest}", size=len(data), sha256=digest)


class StubEngine:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.loaded: list[str] = []
        self.problem: Exception | None = None
        self.attempts = 0
        self.may_unload = asyncio.Event()
        self.may_unload.set()
        self.ok, self.incarnation = True, 0
        self.prompts: list[tuple[str | None, list[int]]] = []
        self.computes = answer
        """The logprob of token 0 after a prompt, under an adapter."""

    def restart(self) -> None:
        self.loaded.clear()
        self.incarnation += 1

    async def load_adapter(self, name: str, directory: Path) -> None:
        self.attempts += 1
        if self.problem is not None:
            raise self.problem
        assert (directory / "adapter_model.safetensors").exists()
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        await self.may_unload.wait()
        self.loaded.remove(name)

    async def generate(self, id: str, adapter: str | None, prompt: Any, sampling: Sampling) -> Generation:
        if adapter is not None and adapter not in self.loaded:
            raise AdapterNotLoaded(f"{adapter} is not loaded")
        self.prompts.append((adapter, prompt.tolist()))
        logprobs = np.asarray([self.computes(adapter, prompt.tolist())], np.float32)
        return Generation(np.zeros(1, np.int32), logprobs, "stop", adapter, 0)

    async def health(self) -> EngineHealth:
        detail = "" if self.ok else "the server is away"
        return EngineHealth(
            self.ok,
            detail,
            tuple(self.loaded),
            self.slots,
            0,
            0,
            128,
            4096,
            0,
            0,
            incarnation=self.incarnation,
            max_rank=8,
        )


def answer(adapter: str | None, prompt: list[int]) -> float:
    """What a right engine computes: -1 for the base model, -2 for the probe, both less the prompt's length."""
    return -(2.0 if adapter else 1.0) - len(prompt) / 10


PROMPTS = [[1, 2], [3, 4, 5]]


def probe(run: str = "run", *, tolerance: float = 1e-2) -> Probe:
    tables = {
        name: pack_floats([[answer(adapter, prompt), -9.0] for prompt in PROMPTS])
        for name, adapter in (("base", None), ("adapted", "probe"))
    }
    prompts = [pack_ids(prompt) for prompt in PROMPTS]
    return Probe(run=run, prompts=prompts, temperature=0.7, tolerance=tolerance, dtype="float32", **tables)


def probe_ref(run: str = "run") -> ProbeRef:
    adapter, expected = blob(9), probe(run).encode()
    digest, table = hashlib.sha256(adapter).hexdigest(), hashlib.sha256(expected).hexdigest()
    return ProbeRef(
        AdapterRef(version=0, name=f"{run}-probe-{digest[:8]}", key="p", size=len(adapter), sha256=digest),
        BlobRef(key="e", size=len(expected), sha256=table),
    )


class StubStore:
    def __init__(self) -> None:
        self.problem: Exception | None = None

    async def get(self, wanted: BlobRef) -> bytes:
        if self.problem is not None:
            raise self.problem
        known = [*map(blob, range(10)), *(probe(run).encode() for run in ("run", "other"))]
        return next(data for data in known if hashlib.sha256(data).hexdigest() == wanted.sha256)


class StubBus:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def send(self, subject: str, message: Message, **more: Any) -> None:
        self.sent.append(message)


class StubRegistry:
    def __init__(self) -> None:
        self.node: Node | None = None

    async def put_node(self, node: Node) -> None:
        self.node = node


class Fixture:
    def __init__(self, work: Path, slots: int) -> None:
        self.engine, self.store, self.registry = StubEngine(slots), StubStore(), StubRegistry()
        self.bus = StubBus()
        self.work = work
        store: Any = self.store
        self.cache = AdapterCache(store, work)
        services: Any = (self.bus, self.registry, self.cache, self.engine)
        self.replica = Replica(*services, fleet="f", id="replica-a", model="m")
        self.heads: Any = SimpleNamespace(heads={}, versions={})

    async def want(self, *versions: int, probe: ProbeRef | None = None, run: str = "run") -> None:
        newest = max(versions, default=0)
        self.heads.heads[run] = Head(
            run=run, fleet="f", incarnation="i", epoch=1, learner="l", step=newest, head=newest, active=newest,
            max_staleness=4, state="running", live=[ref(version) for version in versions], probe=probe,
        )  # fmt: skip
        await self.settle()

    async def settle(self) -> None:
        await self.replica._settle(self.heads)

    async def ask(self, run: str, prompt: bytes) -> None:
        """Have the base model asked, for a run."""
        request = GenerateRequest(
            id="r", run=run, group="g", siblings=1, adapter=None, version=0, prompt=prompt, max_new_tokens=1,
            temperature=1.0, stop_token_ids=[],
        )  # fmt: skip
        message: Any = SimpleNamespace(data=request.encode(), reply="inbox", headers=None)
        await self.replica._on_generate(message)
        await asyncio.gather(*self.replica._running.values())

    @property
    def node(self) -> Node:
        assert self.registry.node is not None
        return self.registry.node

    @property
    def confirmed(self) -> list[str]:
        assert self.registry.node is not None
        return sorted(self.registry.node.confirmed)

    @property
    def refused(self) -> dict[str, str]:
        assert self.registry.node is not None
        return self.registry.node.refused

    def cached(self) -> set[str]:
        return {path.name for path in (self.work / "adapters").glob("*")}


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    monkeypatch.setattr(module, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(module, "NOT_THERE_YET_PAUSE", 0.0)
    return Fixture(tmp_path / "work" / "actor-a", slots=2)


async def test_an_adapter_without_a_slot_is_loaded_once_there_is_one(subject: Fixture) -> None:
    await subject.want(1, 2, 3)
    assert "no slot" in subject.refused[ref(1).name]
    assert subject.confirmed == [ref(2).name, ref(3).name]
    await subject.want(1, 3)
    assert subject.refused == {}
    assert subject.confirmed == [ref(1).name, ref(3).name]
    await subject.want(1, 2, 3)
    await subject.want(2, 3)
    assert subject.refused == {}


async def test_an_adapter_refused_for_want_of_the_store_is_loaded_when_the_store_returns(subject: Fixture) -> None:
    subject.store.problem = StoreError("the store is away")
    await subject.want(1)
    assert subject.refused == {}
    await subject.settle()
    assert subject.refused == {ref(1).name: "the store is away"}
    subject.store.problem = None
    await subject.settle()
    assert subject.refused == {}
    assert subject.confirmed == [ref(1).name]


async def test_an_adapter_that_is_not_there_yet_is_refused_only_when_its_time_is_up_and_still_looked_for(
    subject: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject.store.problem = ObjectMissing("no such object")
    await subject.want(1)
    for _ in range(5):
        await subject.settle()
    assert subject.refused == {}
    monkeypatch.setattr(module, "NOT_THERE_YET_SECONDS", 0.0)
    await subject.settle()
    assert subject.refused == {ref(1).name: "no such object"}
    subject.store.problem = None
    await subject.settle()
    assert subject.confirmed == [ref(1).name]


async def test_the_pauses_grow_and_end_at_the_longest(subject: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_PAUSE", 1.0)
    subject.store.problem = StoreError("the store is away")
    await subject.want(1)
    pauses = []
    for _ in range(8):
        trouble = subject.replica._troubles[ref(1).name]
        assert trouble.again is not None
        pauses.append(trouble.again - time.monotonic())
        trouble.again = 0.0
        await subject.settle()
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 30, 30, 30], abs=0.5)


async def test_an_adapter_that_fails_every_load_is_refused_and_tried_again_until_it_loads(subject: Fixture) -> None:
    subject.engine.problem = AdapterError("wrong shapes")
    await subject.want(1)
    for _ in range(5):
        await subject.settle()
    assert subject.engine.attempts > module.LOAD_ATTEMPTS
    assert subject.refused == {ref(1).name: "wrong shapes"}
    subject.engine.problem = None
    await subject.settle()
    assert subject.refused == {}
    assert subject.confirmed == [ref(1).name]
    await subject.want()
    await until(lambda: subject.cached() == set(), what="what is not wanted any more leaves the disk")


async def test_a_full_disk_is_told_with_a_remedy_and_overcome(
    subject: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(data: bytes, directory: Path) -> None:
        directory.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_cache, "write_adapter_directory", full)
        await subject.want(1)
        await subject.settle()
        reason = subject.refused[ref(1).name]
        assert str(subject.work / "adapters") in reason
        assert "make room" in reason
        assert subject.cached() == set()
    await subject.settle()
    assert subject.refused == {}
    assert subject.confirmed == [ref(1).name]


async def test_what_is_unloaded_leaves_the_disk_and_what_is_in_use_stays(subject: Fixture) -> None:
    await subject.want(1, 2)
    assert subject.cached() == {ref(1).sha256, ref(2).sha256}
    subject.engine.may_unload.clear()
    await subject.want(2)
    assert subject.cached() == {ref(1).sha256, ref(2).sha256}
    subject.engine.may_unload.set()
    await until(lambda: subject.cached() == {ref(2).sha256}, what="the unloaded adapter is removed")


async def test_work_of_killed_actors_is_removed_and_that_of_living_ones_stays(subject: Fixture) -> None:
    yesterday = time.time() - 2 * ABANDONED_SECONDS
    dead, living, other = (subject.work.parent / name for name in ("actor-dead", "actor-living", "other"))
    for directory in (dead / "adapters", living / "adapters", other / "things", subject.work / "adapters"):
        directory.mkdir(parents=True)
    for directory in (dead, other, subject.work):
        os.utime(directory, (yesterday, yesterday))
    subject.cache.sweep_abandoned()
    assert sorted(path.name for path in subject.work.parent.iterdir()) == ["actor-a", "actor-living", "other"]
    subject.cache.touch()
    Fixture(living, slots=1).cache.sweep_abandoned()
    assert (subject.work / "adapters").exists()


# ------------------------------------------------------------------------------------------------- the engine's deaths


async def test_an_engine_that_was_started_anew_gets_every_adapter_again_before_the_replica_is_ready(
    subject: Fixture,
) -> None:
    await subject.want(1, 2)
    subject.replica._state = "ready"
    subject.engine.restart()
    await subject.replica._put_node()
    assert (subject.node.state, subject.confirmed) == ("joining", []), "what is lost is no longer confirmed"
    assert subject.replica._registry_changed.is_set(), "and is looked after at once"
    subject.replica._registry_changed.clear()
    await subject.settle()
    assert subject.engine.loaded == [ref(2).name, ref(1).name]
    assert subject.confirmed == [ref(1).name, ref(2).name]
    assert subject.replica._settled()


async def test_a_replica_whose_engine_is_away_confirms_nothing_and_says_why(subject: Fixture) -> None:
    await subject.want(1)
    subject.replica._state = "ready"
    subject.engine.ok = False
    await subject.settle()
    assert (subject.node.state, subject.node.detail, subject.confirmed) == ("failed", "the server is away", [])
    assert not subject.replica._settled()
    subject.engine.ok = True
    subject.engine.restart()
    await subject.settle()
    assert subject.confirmed == [ref(1).name]


async def test_a_load_that_the_engine_did_not_survive_confirms_nothing(subject: Fixture) -> None:
    plain = subject.engine.load_adapter

    async def dies(name: str, directory: Path) -> None:
        await plain(name, directory)
        subject.engine.restart()
        subject.engine.load_adapter = plain  # type: ignore[method-assign]

    subject.engine.load_adapter = dies  # type: ignore[method-assign]
    await subject.want(1)
    assert subject.confirmed == []
    await subject.settle()
    assert subject.confirmed == [ref(1).name]


async def test_an_engine_that_cannot_be_asked_is_asked_again_and_never_given_up(subject: Fixture) -> None:
    subject.engine.problem = EngineError("no answer")
    await subject.want(1)
    for _ in range(5):
        await subject.settle()
    assert subject.refused == {ref(1).name: "no answer"}
    subject.engine.problem = None
    await subject.settle()
    assert subject.refused == {}
    assert subject.confirmed == [ref(1).name]


async def test_a_following_replica_sees_the_engine_come_and_go_by_itself(subject: Fixture) -> None:
    await subject.want(1)
    subject.replica._state = "ready"
    following = asyncio.create_task(subject.replica._follow(subject.heads))
    subject.engine.ok = False
    await subject.replica._put_node()
    await until(lambda: subject.node.state == "failed")
    subject.engine.restart()
    subject.engine.ok = True
    await until(lambda: subject.node.state == "ready" and subject.confirmed == [ref(1).name])
    following.cancel()


async def test_what_is_to_be_tried_again_waits_for_an_engine_that_is_away(subject: Fixture) -> None:
    plain = subject.engine.load_adapter

    async def dies(name: str, directory: Path) -> None:
        subject.engine.ok = False
        raise EngineError("the engine died while it loaded")

    subject.engine.load_adapter = dies
    await subject.want(1)
    subject.replica._state = "ready"
    await subject.replica._look(subject.heads)
    assert subject.node.state == "failed"
    looking = asyncio.create_task(subject.replica._look(subject.heads))
    await asyncio.sleep(0)
    assert not looking.done(), "though its pause is over"
    subject.engine.load_adapter, subject.engine.ok = plain, True
    await subject.replica._put_node()
    await looking
    assert subject.confirmed == [ref(1).name]


async def test_a_prompt_that_is_none_leaves_nothing_running(subject: Fixture) -> None:
    with pytest.raises(MalformedMessage, match="multiple of 4"):
        await subject.ask("run", b"123")
    assert not (subject.replica._running or subject.replica._requests or subject.replica._reply_to)


# ------------------------------------------------------------------------------------------------------------- proofs


async def test_a_replica_that_computes_what_the_learner_computes_proves_it_before_it_confirms_anything(
    subject: Fixture,
) -> None:
    await subject.want(1, probe=probe_ref())
    name = probe_ref().adapter.name
    assert subject.engine.prompts == [(adapter, prompt) for adapter in (None, name) for prompt in PROMPTS]
    assert subject.engine.loaded == [ref(1).name], "the probe has left again"
    assert (subject.confirmed, subject.refused) == ([ref(1).name], {})
    assert subject.cached() == {ref(1).sha256}
    await subject.settle()
    assert len(subject.engine.prompts) == 4, "once is enough"
    subject.engine.restart()
    await subject.settle()
    await subject.settle()
    assert len(subject.engine.prompts) == 8, "an engine that was started anew proves it again"
    await subject.replica._require_proof("run")


@pytest.mark.parametrize(
    ("computes", "said"),
    [
        (lambda adapter, prompt: answer(None, prompt), "serves the base model in an adapter's name"),
        (lambda adapter, prompt: answer("probe", prompt), "its base model is not the learner's"),
        (lambda adapter, prompt: answer(adapter, prompt) - (0.5 if adapter else 0), "rank or alpha that it misreads"),
        (lambda adapter, prompt: answer(adapter, prompt) + (0.02 if len(prompt) == 3 else 0), "base model is not"),
        (lambda adapter, prompt: float("nan"), "base model is not"),
    ],
)
async def test_a_replica_that_computes_something_else_serves_nobody(subject: Fixture, computes: Any, said: str) -> None:
    subject.engine.computes = computes
    await subject.want(1, probe=probe_ref())
    assert subject.confirmed == []
    assert said in subject.refused[ref(1).name]
    assert subject.node.state == "failed"
    assert said in subject.node.detail
    with pytest.raises(GenerationError, match="may not serve run run") as refused:
        await subject.replica._require_proof("run")
    assert refused.value.retryable, "another replica may"


async def test_one_run_that_is_not_proven_keeps_no_other_from_being_served(subject: Fixture) -> None:
    await subject.want(1, probe=probe_ref())
    subject.replica._state = "ready"
    subject.engine.computes = lambda adapter, prompt: 0.0
    await subject.want(probe=probe_ref("other"), run="other")
    assert (subject.node.state, subject.confirmed) == ("ready", [ref(1).name])
    await subject.replica._require_proof("run")
    with pytest.raises(GenerationError, match="run other"):
        await subject.replica._require_proof("other")


async def test_a_request_of_a_run_that_is_not_proven_may_go_elsewhere_and_is_no_fault_of_the_replica(
    subject: Fixture,
) -> None:
    subject.engine.computes = lambda adapter, prompt: 0.0
    await subject.want(probe=probe_ref())
    await subject.ask("run", pack_ids([1, 2]))
    (refused,), (done,) = subject.bus.sent, subject.replica._completed
    assert isinstance(refused, GenerateRefused)
    assert (refused.retryable, done.ok, done.fault) == (True, False, False)


async def test_a_request_that_the_engine_fails_is_a_fault_of_the_replica(subject: Fixture) -> None:
    def fails(adapter: str | None, prompt: list[int]) -> float:
        raise EngineError("no answer")

    subject.engine.computes = fails
    await subject.ask("run", pack_ids([1, 2]))
    (done,) = subject.replica._completed
    assert done.fault


async def test_a_probe_that_is_not_there_yet_is_waited_for(subject: Fixture) -> None:
    subject.store.problem = ObjectMissing("no such object")
    await subject.want(1, probe=probe_ref())
    assert (subject.confirmed, subject.refused, subject.node.detail) == ([], {}, "")
    waiting = asyncio.create_task(subject.replica._require_proof("run"))
    await asyncio.sleep(0)
    assert not waiting.done()
    subject.store.problem = None
    await subject.settle()
    await waiting
    assert subject.confirmed == [ref(1).name]


@pytest.mark.servers
async def test_a_cancelled_replica_leaves_no_task_behind(bus: Any, registry: Any, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    engine: Any = StubEngine(1)
    store: Any = StubStore()
    cache = AdapterCache(store, tmp_path / "work" / "a")
    replica = Replica(bus, registry, cache, engine, fleet="f", id="replica-x", model="m")
    serving = asyncio.create_task(replica.run())
    await until(lambda: replica._state == "ready")
    stuck = asyncio.create_task(asyncio.Event().wait())
    replica._running["stuck"] = stuck  # type: ignore[assignment]
    serving.cancel()
    await asyncio.wait([serving], timeout=10)
    assert serving.cancelled()
    assert stuck.cancelled()
    assert {task for task in asyncio.all_tasks() - before if "nats" not in repr(task)} == set()


# ------------------------------------------------------------------------------------------------- KV-cache events


class Publishing(StubEngine):
    """Says that it stored chains of so many blocks."""

    def __init__(self) -> None:
        super().__init__(slots=2)
        self.stored: list[int] = []

    def cache_events(self) -> list[CacheEvent]:
        events = [CacheEvent("stored", blocks=bytes(HASH * count)) for count in self.stored]
        self.stored.clear()
        return events


def test_what_a_cache_says_is_reported_in_pieces_that_a_broker_takes(subject: Fixture) -> None:
    engine = subject.replica._engine = Publishing()  # type: ignore[assignment]
    quarter = module.EVENT_BYTES // HASH // 4
    engine.stored += [quarter] * 6 + [8 * quarter]
    pieces = []
    while events := subject.replica._take_events():
        pieces.append([len(event.blocks) // HASH for event in events])
    assert pieces == [[quarter] * 4, [quarter] * 2, [8 * quarter]]
    assert subject.replica._report.is_set(), "the rest followed at once"


def test_what_a_cache_says_does_not_pile_up_while_nobody_can_be_told(subject: Fixture) -> None:
    engine = subject.replica._engine = Publishing()  # type: ignore[assignment]
    engine.stored += [module.EVENT_BYTES // HASH] * 17
    assert subject.replica._take_events() == [CacheEvent("cleared")]
    assert subject.replica._take_events() == []
