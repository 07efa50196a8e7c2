"""The replica: serves one engine on the bus, and keeps the right adapters loaded.

Declarative: whatever happened, it compares what the registry wants with what the engine holds, fetches, verifies,
loads and confirms the difference. So a late joiner, a restarted engine and a skipped version are all the same case.

Invariants: it confirms an adapter only while the engine holds it; it becomes ready once the engine runs and has loaded
or refused what is wanted, or the time for that is over; and it serves a run, the base model included, only once it has
proven by the run's probe that it computes what the learner computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import nats.errors
import numpy as np
from nats.aio.msg import Msg

from actors.adapter_cache import AdapterCache
from actors.engines.base import Engine, EngineHealth, PublishesCache, Sampling
from actors.residency import wanted
from broker import faults, names
from broker.blocks import BLOCK, HASH, chain
from broker.bus import Bus
from broker.ending import end
from broker.errors import (
    AdapterError,
    AdapterNotLoaded,
    EngineError,
    FarflungError,
    GenerationError,
    MalformedMessage,
    NotProven,
    ObjectMissing,
    PromptTooLong,
    StoreError,
)
from broker.messages import (
    AdapterRef,
    CacheEvent,
    CancelRequest,
    Completion,
    Floats,
    GenerateRefused,
    GenerateReply,
    GenerateRequest,
    Head,
    Ids,
    Node,
    ProbeRef,
    ReplicaLoad,
    decode,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from broker.probe import Probe, verdict
from broker.registry import PRESENCE_SECONDS, Heads, Registry, Roster
from observability import metrics, tracing
from observability.shares import Rate

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
"""How often a replica reports its load when nothing completes."""

NOT_THERE_YET_SECONDS = 30.0
"""How long an adapter that the store does not show yet is waited for before it counts as refused."""

NOT_THERE_YET_PAUSE = 0.5
"""How long until the store is asked again meanwhile."""

EVENT_BYTES = 256 * 1024
"""Block hashes that a report holds at most: a broker takes messages of 1 MB unless it is told otherwise."""

EVENT_BACKLOG = 16 * EVENT_BYTES
"""Block hashes that wait to be reported at most; when there are more, all that was told is taken back."""

LOAD_ATTEMPTS = 2
"""An adapter that failed to load this often is refused, with the reason."""

RETRY_PAUSE = 1.0
"""The pause after the first failure; each further one doubles it."""

LONGEST_PAUSE = 30.0
"""An adapter that is wanted is tried this often at least."""

PROOF_PATIENCE = 30.0
"""How long a request waits for the proof that its run asks for."""


@dataclass
class _Trouble:
    """Why a wanted adapter is not loaded. Kept while it is wanted and not loaded."""

    since: float
    reason: str = ""
    failures: int = 0
    refused: bool = False
    again: float = 0.0
    """When to try the next time."""


class Replica:
    """One engine's face to the fleet."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        cache: AdapterCache,
        engine: Engine,
        *,
        fleet: str,
        id: str,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._cache = cache
        self._engine = engine
        self.fleet = fleet
        self.id = id
        self._model = model
        self._clock = clock
        self._running: dict[str, asyncio.Task[None]] = {}
        self._requests: dict[str, GenerateRequest] = {}
        """Those that are running, as they came."""
        self._reply_to: dict[str, str] = {}
        self._completed: list[Completion] = []
        self._report = asyncio.Event()
        self._registry_changed = asyncio.Event()
        self._loaded: dict[str, AdapterRef] = {}
        self._wanted: list[AdapterRef] = []
        self._no_slot: dict[str, str] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._unloading: dict[str, tuple[AdapterRef, asyncio.Task[None]]] = {}
        self._state: Literal["joining", "ready"] = "joining"
        self._join_by = 0.0
        """When what could not be had yet is waited for no longer."""
        self._incarnation: int | None = None
        self._engine_ok = True
        self._heads: Heads | None = None
        self._roster: Roster | None = None
        self._pins: list[AdapterRef] = []
        """Versions under evaluation, to be held beside what the runs want."""
        self._proofs: dict[str, str | None] = {}
        """By probe: None when it was passed, else what is wrong. Those of this incarnation of the engine."""
        self._proven = asyncio.Condition()
        self._proving: AdapterRef | None = None
        self._proof_numbers = itertools.count()
        self._tokens = Rate()
        self._beat = 0
        self._block = BLOCK
        self._cache_events: list[CacheEvent] = []

    async def run(self) -> None:
        """Serve until cancelled. The engine must be started."""
        heads = Heads(self._registry, on_change=lambda _: self._registry_changed.set())
        self._roster = roster = Roster(self._registry, on_change=self._on_node, clock=self._clock)
        subscriptions = []
        parts: list[asyncio.Task[None]] = []
        try:
            self._cache.touch()
            await asyncio.to_thread(self._cache.sweep_abandoned)
            await heads.ready.wait()
            await roster.ready.wait()
            await self._join(heads)
            subscriptions = [
                await self._bus.subscribe(names.replica_generate(self.id), self._on_generate),
                await self._bus.subscribe(names.replica_cancel(self.id), self._on_cancel),
            ]
            self._become_ready()
            parts = [asyncio.create_task(part) for part in (self._announce(), self._report_load(), self._follow(heads))]
            await asyncio.gather(*parts)
        finally:
            for subscription in subscriptions:
                with contextlib.suppress(nats.errors.Error, ValueError):
                    await subscription.unsubscribe()  # type: ignore[attr-defined]
            await end(*parts, *self._running.values(), *(task for _, task in self._unloading.values()))
            await heads.close()
            await roster.close()
            await self._registry.remove_node(self.id)
            self._cache.clear()

    # ------------------------------------------------------------------------------------------------- generation

    async def _on_generate(self, message: Msg) -> None:
        request = decode(message.data, GenerateRequest)
        prompt = unpack_ids(request.prompt)
        self._reply_to[request.id] = message.reply
        if request.id not in self._running:  # asked again while it is running: only the address may have changed
            self._requests[request.id] = request
            task = asyncio.create_task(self._serve(request, prompt, dict(message.headers or {})))
            self._running[request.id] = task

    async def _serve(self, request: GenerateRequest, prompt: Ids, headers: dict[str, str]) -> None:
        began = self._clock()
        done = Completion(id=request.id, ok=False, prompt_tokens=len(prompt), cached_tokens=0, output_tokens=0)
        answer: GenerateReply | GenerateRefused
        try:
            await self._require_proof(request.run)
            with tracing.span("engine", parent=headers, request=request.id, replica=self.id) as span:
                result = await self._engine.generate(
                    request.id,
                    request.adapter,
                    prompt,
                    Sampling(
                        max_new_tokens=request.max_new_tokens,
                        temperature=request.temperature,
                        top_p=request.top_p,
                        top_k=request.top_k,
                        seed=request.seed,
                        stop_token_ids=tuple(request.stop_token_ids),
                    ),
                )
                span.set_attribute("farflung.tokens", len(result.token_ids))
                span.set_attribute("farflung.cached_tokens", result.cached_tokens)
            answer = GenerateReply(
                id=request.id,
                replica=self.id,
                token_ids=pack_ids(result.token_ids),
                logprobs=pack_floats(result.logprobs),
                finish=result.finish,
                adapter=result.adapter,
                version=self._version_of(result.adapter),
                cached_tokens=result.cached_tokens,
                seconds=self._clock() - began,
            )
            self._tokens.add(len(result.token_ids), self._clock())
            metrics.count("farflung.tokens.sampled", len(result.token_ids), replica=self.id)
            metrics.count("farflung.tokens.prompt", len(prompt), replica=self.id)
            metrics.count("farflung.tokens.cached", result.cached_tokens, replica=self.id)
            done = Completion(
                id=request.id,
                ok=True,
                prompt_tokens=len(prompt),
                cached_tokens=result.cached_tokens,
                output_tokens=len(result.token_ids),
                blocks=_new_blocks(result.adapter, prompt, result.token_ids, self._block),
            )
        except AdapterNotLoaded as error:
            if request.adapter in self._loaded:
                self._registry_changed.set()  # the engine has lost it: settle
            answer = self._refusal(request.id, "failed", error, retryable=True)
        except PromptTooLong as error:
            answer = self._refusal(request.id, "prompt_too_long", error, retryable=False)
        except FarflungError as error:
            retryable = not isinstance(error, GenerationError) or error.retryable
            answer = self._refusal(request.id, "failed", error, retryable=retryable)
            done = msgspec.structs.replace(done, fault=retryable and not isinstance(error, NotProven))
        finally:
            self._running.pop(request.id, None)
            self._requests.pop(request.id, None)
            reply = self._reply_to.pop(request.id, "")
            self._completed.append(done)
            self._report.set()
        if reply:
            await self._bus.send(reply, answer, headers=headers)

    def _refusal(
        self, id: str, code: Literal["prompt_too_long", "failed"], error: Exception, *, retryable: bool
    ) -> GenerateRefused:
        return GenerateRefused(id=id, code=code, reason=str(error), retryable=retryable, source=self.id)

    def _version_of(self, adapter: str | None) -> int:
        if adapter is None:
            return 0
        leaving = self._unloading.get(adapter)
        ref = self._loaded.get(adapter) or (leaving[0] if leaving else None)
        if ref is None:
            raise GenerationError(f"the engine served {adapter}, which this replica has not confirmed")
        return ref.version

    async def _on_cancel(self, message: Msg) -> None:
        await self._engine.cancel(decode(message.data, CancelRequest).id)

    async def _report_load(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._report.wait()
            self._report.clear()
            health = await self._engine.health()
            self._block = health.block
            events = self._take_events()
            if self._notice(health):
                self._registry_changed.set()
            completed, self._completed = self._completed, []
            self._beat += 1
            report = ReplicaLoad(
                replica=self.id,
                running=health.running,
                waiting=health.waiting,
                unfinished=list(self._running),
                completed=completed,
                beat=self._beat,
                work=[self._requests[id].work for id in self._running],
                reserved=_reserved(self._requests.values()),
                cache=events,
            )
            try:
                await self._bus.send(names.load_subject(self.fleet), report)
            except nats.errors.Error as error:
                self._completed = completed + self._completed
                self._cache_events = events + self._cache_events
                log.info("load report not sent: %s", error)
                await asyncio.sleep(BEAT_SECONDS)

    def _take_events(self) -> list[CacheEvent]:
        """What the engine said of its cache, as much as a report holds; the rest follows at once."""
        if not isinstance(self._engine, PublishesCache):
            return []
        waiting = self._cache_events + self._engine.cache_events()
        if sum(len(event.blocks) for event in waiting) > EVENT_BACKLOG:
            log.warning("replica %s: too much of the cache's changes waits to be told, taking all back", self.id)
            waiting = [CacheEvent("cleared")]
        size, count = 0, 0
        for event in waiting:
            size += len(event.blocks)
            if count and size > EVENT_BYTES:
                self._report.set()
                break
            count += 1
        self._cache_events = waiting[count:]
        return waiting[:count]

    # --------------------------------------------------------------------------------------------------- adapters

    async def _join(self, heads: Heads) -> None:
        """Load what is wanted before serving; what cannot be had yet is waited for, but not longer than that."""
        self._join_by = self._clock() + NOT_THERE_YET_SECONDS
        await self._settle(heads)
        while not self._settled():
            await self._look(heads)

    async def _follow(self, heads: Heads) -> None:
        while True:
            await self._look(heads)
            if self._state == "joining" and self._settled():
                self._become_ready()
                await self._put_node()

    def _settled(self) -> bool:
        """Whether there is nothing left to wait for before requests may come."""
        waiting = any(ref.name not in self._loaded and ref.name not in self._refused() for ref in self._wanted)
        return self._engine_ok and (not waiting or self._clock() > self._join_by)

    def _become_ready(self) -> None:
        self._state = "ready"
        log.info("replica %s serves fleet %s", self.id, self.fleet)

    def _notice(self, health: EngineHealth) -> bool:
        """Take in that the engine went away, or came back without what it held. Tells whether either is so."""
        changed = health.ok != self._engine_ok
        self._engine_ok = health.ok
        if self._incarnation != health.incarnation:
            if self._incarnation is not None:
                log.warning("replica %s: the engine holds no adapters any more, loading all that is wanted", self.id)
                self._state, self._join_by = "joining", self._clock() + NOT_THERE_YET_SECONDS
                self._loaded.clear()
                self._proofs.clear()
                changed = True
            self._incarnation = health.incarnation
        return changed

    async def _look(self, heads: Heads) -> None:
        """Settle as soon as the registry changes, the engine comes or goes, or something is to be tried again.

        Nothing is tried while the engine is away: its return is what is waited for then.
        """
        troubles = self._troubles.values() if self._engine_ok else ()
        due = min((trouble.again for trouble in troubles), default=float("inf"))
        while not self._registry_changed.is_set() and self._clock() < due:
            # Once it is ready, the reports of its load see the engine come and go.
            most = BEAT_SECONDS if self._state == "joining" else float("inf")
            pause = min(most, due - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause if pause < float("inf") else None):
                    await self._registry_changed.wait()
            if self._notice(await self._engine.health()):
                break
        self._registry_changed.clear()
        await self._settle(heads)

    def _on_node(self) -> None:
        """An evaluation began, ended, or its evaluator is gone. Our own presence shows the last, which nobody tells."""
        if self._roster is not None and self._roster.pinned(self.fleet) != self._pins:
            self._registry_changed.set()

    async def _settle(self, heads: Heads) -> None:
        """Bring the engine to what the registry wants, and confirm it.

        What changes meanwhile sets the event again, and settling starts over with the newest wishes.
        """
        self._heads = heads
        health = await self._engine.health()
        self._notice(health)
        if not health.ok:
            await self._put_node()
            return
        slots = health.adapter_slots
        self._pins = self._roster.pinned(self.fleet) if self._roster is not None else []
        refs = wanted(heads.heads, heads.versions, self.fleet, self._pins)
        probes = {probe.adapter.name: (head, probe) for head, probe in self._probes(heads)}
        # A probe needs a slot for a moment: what is needed least makes room, and comes back.
        to_prove = any(name not in self._proofs for name in probes)
        self._wanted = refs[: slots - 1] if to_prove else refs[:slots]
        names_wanted = {ref.name for ref in self._wanted}
        for name in [name for name in self._loaded if name not in names_wanted]:
            ref = self._loaded.pop(name)
            self._unloading[name] = (ref, asyncio.create_task(self._unload(name)))
        kept = names_wanted | probes.keys()
        self._troubles = {name: trouble for name, trouble in self._troubles.items() if name in kept}
        known = {head.probe.adapter.name for head in heads.heads.values() if head.probe is not None}
        self._proofs = {name: proof for name, proof in self._proofs.items() if name in known}
        self._no_slot = {
            ref.name: f"no slot: {len(refs)} adapters are wanted, the engine holds {slots}; start it with "
            "--adapter-slots"
            for ref in refs[slots:]
        }
        self._discard_unneeded()
        await self._put_node()
        for name, (head, probe) in probes.items():
            if name not in self._proofs and not self._waits(name):
                await self._prove(head, probe)
                await self._put_node()
                if self._registry_changed.is_set():
                    return
        if all(name in self._proofs for name in probes):
            self._wanted = refs[:slots]
        unproven = self._unproven(heads)
        for ref in self._wanted:
            if _run_of(ref) in unproven:
                self._troubles.pop(ref.name, None)
                continue
            if ref.name in self._loaded or self._waits(ref.name):
                continue
            if await self._load(ref, _trace_of(heads, ref)):
                faults.reached("replica.loaded")
            await self._put_node()
            if self._registry_changed.is_set():
                return

    def _waits(self, name: str) -> bool:
        """Whether something that could not be had is not to be tried again yet."""
        trouble = self._troubles.get(name)
        return trouble is not None and trouble.again > self._clock()

    async def _load(self, ref: AdapterRef, trace: Mapping[str, str]) -> bool:
        async def load() -> None:
            with tracing.span("load", parent=trace, adapter=ref.name, replica=self.id, version=ref.version):
                directory = await self._cache.fetch(ref)
                if unloading := self._unloading.get(ref.name):
                    await unloading[1]
                await self._engine.load_adapter(ref.name, directory)

        if not await self._attempt(ref, load):
            return False
        self._loaded[ref.name] = ref
        log.info("adapter %s loaded", ref.name)
        return True

    async def _attempt(self, ref: AdapterRef, work: Callable[[], Awaitable[None]]) -> bool:
        """Do what needs an adapter; tells whether that went well. What went wrong is noted, to be tried again."""
        trouble = self._troubles.setdefault(ref.name, _Trouble(since=self._clock()))
        crowded = bool(self._unloading)
        incarnation = self._incarnation
        try:
            await work()
        except ObjectMissing as error:
            if self._clock() - trouble.since < NOT_THERE_YET_SECONDS:
                trouble.again = self._clock() + NOT_THERE_YET_PAUSE
            else:
                self._failed(ref, str(error), refuse=True)
        except (StoreError, EngineError, GenerationError, MalformedMessage) as error:
            self._failed(ref, str(error))
        except OSError as error:
            self._failed(
                ref,
                f"{self._cache.place} cannot take the adapter ({error}); "
                "make room on its disk, or set FARFLUNG_CACHE to another",
            )
        except AdapterError as error:
            if crowded:  # the slot of one that is being unloaded may be all it lacks
                trouble.again = self._clock() + RETRY_PAUSE
            else:
                self._failed(ref, str(error))
        else:
            self._troubles.pop(ref.name, None)
            if self._notice(await self._engine.health()):
                self._registry_changed.set()
            return self._engine_ok and incarnation == self._incarnation
        return False

    def _failed(self, ref: AdapterRef, reason: str, *, refuse: bool = False) -> None:
        """Note why `ref` was not loaded. It is refused in time, and tried again all the same: whatever was at fault
        (an engine out of memory, a store, a disk) may come right, and the run waits for it.
        """
        trouble = self._troubles.setdefault(ref.name, _Trouble(since=self._clock()))
        trouble.failures += 1
        trouble.reason = reason
        trouble.refused = trouble.refused or refuse or trouble.failures >= LOAD_ATTEMPTS
        pause = min(LONGEST_PAUSE, RETRY_PAUSE * 2.0 ** min(trouble.failures - 1, 10))
        trouble.again = self._clock() + pause
        log.warning("adapter %s not loaded (attempt %d): %s", ref.name, trouble.failures, reason)

    def _refused(self) -> dict[str, str]:
        """Adapters that are wanted and cannot be had, with the reason."""
        troubles = {name: trouble.reason for name, trouble in self._troubles.items() if trouble.refused}
        unproven = self._unproven(self._heads) if self._heads is not None else {}
        disproven = {ref.name: reason for ref in self._wanted if (reason := unproven.get(_run_of(ref)))}
        return troubles | self._no_slot | disproven

    async def _unload(self, name: str) -> None:
        try:
            await self._engine.unload_adapter(name)
        except EngineError as error:
            log.info("adapter %s not unloaded: %s", name, error)
        finally:
            self._unloading.pop(name, None)
            self._discard_unneeded()

    def _discard_unneeded(self) -> None:
        """Remove the cached adapters that are neither wanted nor in the engine."""
        leaving = [ref for ref, _ in self._unloading.values()]
        proving = [self._proving] if self._proving is not None else []
        self._cache.keep({ref.sha256 for ref in (*self._wanted, *self._loaded.values(), *leaving, *proving)})

    # ------------------------------------------------------------------------------------------------------- proofs

    async def _prove(self, head: Head, probe: ProbeRef) -> None:
        """Sample under the run's probe and under the base, and compare with what its learner computes."""
        ref = probe.adapter
        self._proving = ref
        reason: str | None = None

        async def work() -> None:
            nonlocal reason
            directory = await self._cache.fetch(ref)
            expected = decode(await self._cache.read(probe.expected), Probe)
            base = [await self._sample_one(None, prompt, expected) for prompt in expected.prompt_ids]
            await self._engine.load_adapter(ref.name, directory)
            try:
                adapted = [await self._sample_one(ref.name, prompt, expected) for prompt in expected.prompt_ids]
            finally:
                await self._engine.unload_adapter(ref.name)
            reason = verdict(expected, base, adapted)

        try:
            with tracing.span("prove", run=head.run, replica=self.id):
                done = await self._attempt(ref, work)
        finally:
            self._proving = None
            self._discard_unneeded()
        if done:
            self._proofs[ref.name] = reason
            if reason is None:
                log.info("replica %s computes what the learner of run %s computes", self.id, head.run)
            else:
                log.error("replica %s does not serve run %s: %s", self.id, head.run, reason)
        async with self._proven:
            self._proven.notify_all()

    async def _sample_one(self, adapter: str | None, prompt: Ids, expected: Probe) -> tuple[Ids, Floats]:
        id = f"{self.id}.probe.{next(self._proof_numbers)}"
        sampling = Sampling(max_new_tokens=1, temperature=expected.temperature)
        result = await self._engine.generate(id, adapter, prompt, sampling)
        if result.adapter != adapter:
            raise EngineError(f"the engine served {result.adapter} where {adapter} was asked")
        return result.token_ids, result.logprobs

    def _concerns(self, head: Head) -> bool:
        """Whether this replica is there for a run: it goes on, or one of its versions is under evaluation."""
        return head.fleet == self.fleet and (
            head.state == "running" or any(_run_of(ref) == head.run for ref in self._pins)
        )

    def _probes(self, heads: Heads) -> list[tuple[Head, ProbeRef]]:
        """What the fleet's runs ask of their replicas."""
        return [(head, head.probe) for head in heads.heads.values() if head.probe is not None and self._concerns(head)]

    def _unproven(self, heads: Heads) -> dict[str, str | None]:
        """The runs that this replica may not serve: with what is wrong, None while it is not known yet.

        A run that is over is still asked for now and then; what was found out about it holds.
        """
        return {
            head.run: self._proofs.get(head.probe.adapter.name, self._reason(head.probe.adapter))
            for head in heads.heads.values()
            if head.probe is not None
            and (self._concerns(head) or head.probe.adapter.name in self._proofs)
            and self._proofs.get(head.probe.adapter.name, "unknown") is not None
        }

    def _reason(self, ref: AdapterRef) -> str | None:
        """Why a proof could not be tried, None while that is not given up."""
        trouble = self._troubles.get(ref.name)
        return trouble.reason if trouble is not None and trouble.refused else None

    async def _require_proof(self, run: str) -> None:
        """Wait until this replica has proven that it may serve `run`. Raises NotProven when it may not."""
        if self._heads is None:
            return
        heads = self._heads

        def known() -> bool:
            unproven = self._unproven(heads)
            return run not in unproven or unproven[run] is not None

        if not known():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROOF_PATIENCE), self._proven:
                    await self._proven.wait_for(known)
        unproven = self._unproven(heads)
        if run in unproven:
            raise NotProven(f"replica {self.id} may not serve run {run}: {unproven[run] or 'not proven yet'}")

    def _disproven(self) -> str:
        """Why this replica serves no run at all, empty when it serves one or there is none to serve."""
        if self._heads is None:
            return ""
        unproven = {run: reason for run, reason in self._unproven(self._heads).items() if reason}
        running = {head.run for head in self._heads.heads.values() if self._concerns(head)}
        if not unproven or running - unproven.keys():
            return ""
        return "; ".join(f"run {run}: {reason}" for run, reason in sorted(unproven.items()))

    # --------------------------------------------------------------------------------------------------- presence

    async def _announce(self) -> None:
        metrics.observe(self._gauges, replica=self.id)
        while True:
            self._cache.touch()
            await self._put_node()
            await asyncio.sleep(PRESENCE_SECONDS)

    def _gauges(self) -> dict[str, float]:
        return {
            "farflung.replica.running": float(len(self._running)),
            "farflung.replica.tokens_per_second": self._tokens.read(self._clock()),
        }

    async def _put_node(self) -> None:
        health = await self._engine.health()
        if self._notice(health):
            self._registry_changed.set()
        disproven = self._disproven()
        await self._registry.put_node(
            Node(
                id=self.id,
                node="replica",
                fleet=self.fleet,
                host=socket.gethostname(),
                pid=os.getpid(),
                state=self._state if health.ok and not disproven else "failed",
                detail=disproven if health.ok else health.detail,
                model=self._model,
                confirmed=list(self._loaded) if health.ok else [],
                refused=self._refused(),
                slots=health.adapter_slots,
                max_rank=health.max_rank,
                context=health.context,
                cache_tokens=health.cache_tokens,
                block=health.block,
                gauges={
                    "running": float(health.running),
                    "waiting": float(health.waiting),
                    "tokens_per_second": self._tokens.read(self._clock()),
                    "generated_tokens": float(health.generated_tokens),
                    "prefilled_tokens": float(health.prefilled_tokens),
                },
            )
        )


def _trace_of(heads: Heads, ref: AdapterRef) -> Mapping[str, str]:
    """The headers of the step that made a version: loading it belongs to that step's trace."""
    run = _run_of(ref)
    record = heads.versions.get(run, {}).get(ref.version)
    return record.trace if record is not None and record.adapter.name == ref.name else {}


def _run_of(ref: AdapterRef) -> str:
    return ref.name.rsplit("-v", 1)[0]


def _new_blocks(adapter: str | None, prompt: Ids, output: Ids, block: int) -> bytes:
    """Hashes of the full blocks that the continuation added behind those of the prompt.

    The last sampled token is not among them: it was never fed back, so that it has no KV.
    """
    tokens = np.concatenate([prompt, output[:-1]]).astype(np.int32)
    return chain(adapter, tokens, block=block)[len(prompt) // block * HASH :]


def _reserved(requests: Iterable[GenerateRequest]) -> dict[str, float]:
    """The work that is still to come of each group, as its newest member says."""
    return {group: work for group, work in {request.group: request.reserved for request in requests}.items() if work}
