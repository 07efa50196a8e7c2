"""The replica: serves one engine on the bus, and keeps the right adapters loaded.

Declarative: whatever happened, it compares what the registry wants with what the engine holds, fetches, verifies,
loads and confirms the difference. So a late joiner, a restarted engine and a skipped version are all the same case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import nats.errors
import numpy as np
from nats.aio.msg import Msg

from actors.engines.base import Engine, Sampling
from actors.residency import wanted
from broker import names
from broker.adapters import write_adapter_directory
from broker.blocks import BLOCK, chain
from broker.bus import Bus
from broker.errors import AdapterError, FarflungError, GenerationError, ObjectMissing, PromptTooLong, StoreError
from broker.messages import (
    AdapterRef,
    BlobRef,
    CancelRequest,
    Completion,
    GenerateRefused,
    GenerateReply,
    GenerateRequest,
    Ids,
    Node,
    ReplicaLoad,
    decode,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from broker.registry import PRESENCE_SECONDS, Heads, Registry
from broker.store import Store
from observability import metrics, tracing
from observability.shares import Rate

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
"""How often a replica reports its load when nothing completes."""

NOT_THERE_YET_SECONDS = 30.0
"""How long an adapter that the store does not show yet is waited for."""

LOAD_ATTEMPTS = 2
"""An adapter that failed to load this often is refused, with the reason."""


class Replica:
    """One engine's face to the fleet."""

    def __init__(
        self, bus: Bus, registry: Registry, store: Store, engine: Engine, *, fleet: str, id: str, model: str, work: Path
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._store = store
        self._engine = engine
        self.fleet = fleet
        self.id = id
        self._model = model
        self._work = work
        self._running: dict[str, asyncio.Task[None]] = {}
        self._reply_to: dict[str, str] = {}
        self._completed: list[Completion] = []
        self._report = asyncio.Event()
        self._registry_changed = asyncio.Event()
        self._loaded: dict[str, AdapterRef] = {}
        self._refused: dict[str, str] = {}
        self._failures: dict[str, int] = {}
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._state: Literal["joining", "ready"] = "joining"
        self._tokens = Rate()
        self._beat = 0

    async def run(self) -> None:
        """Serve until cancelled. The engine must be started."""
        heads = Heads(self._registry, on_change=lambda _: self._registry_changed.set())
        subscriptions = []
        try:
            await heads.ready.wait()
            await self._settle(heads)
            subscriptions = [
                await self._bus.subscribe(names.replica_generate(self.id), self._on_generate),
                await self._bus.subscribe(names.replica_cancel(self.id), self._on_cancel),
            ]
            self._state = "ready"
            log.info("replica %s serves fleet %s", self.id, self.fleet)
            await asyncio.gather(self._announce(), self._report_load(), self._follow(heads))
        finally:
            for subscription in subscriptions:
                with contextlib.suppress(nats.errors.Error, ValueError):
                    await subscription.unsubscribe()  # type: ignore[attr-defined]
            for task in list(self._running.values()):
                task.cancel()
            await heads.close()
            await self._registry.remove_node(self.id)
            shutil.rmtree(self._work / "adapters", ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- generation

    async def _on_generate(self, message: Msg) -> None:
        request = decode(message.data, GenerateRequest)
        self._reply_to[request.id] = message.reply
        if request.id not in self._running:  # asked again while it is running: only the address may have changed
            task = asyncio.create_task(self._serve(request, dict(message.headers or {})))
            self._running[request.id] = task

    async def _serve(self, request: GenerateRequest, headers: dict[str, str]) -> None:
        prompt = unpack_ids(request.prompt)
        began = time.monotonic()
        done = Completion(id=request.id, ok=False, prompt_tokens=len(prompt), cached_tokens=0, output_tokens=0)
        answer: GenerateReply | GenerateRefused
        try:
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
                seconds=time.monotonic() - began,
            )
            self._tokens.add(len(result.token_ids), time.monotonic())
            metrics.count("farflung.tokens.sampled", len(result.token_ids), replica=self.id)
            metrics.count("farflung.tokens.prompt", len(prompt), replica=self.id)
            metrics.count("farflung.tokens.cached", result.cached_tokens, replica=self.id)
            done = Completion(
                id=request.id,
                ok=True,
                prompt_tokens=len(prompt),
                cached_tokens=result.cached_tokens,
                output_tokens=len(result.token_ids),
                blocks=_new_blocks(result.adapter, prompt, result.token_ids),
            )
        except PromptTooLong as error:
            answer = self._refusal(request.id, "prompt_too_long", error, retryable=False)
        except FarflungError as error:
            retryable = not isinstance(error, GenerationError) or error.retryable
            answer = self._refusal(request.id, "failed", error, retryable=retryable)
        finally:
            self._running.pop(request.id, None)
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
        ref = self._loaded.get(adapter)
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
            completed, self._completed = self._completed, []
            self._beat += 1
            report = ReplicaLoad(
                replica=self.id,
                running=health.running,
                waiting=health.waiting,
                unfinished=list(self._running),
                completed=completed,
                beat=self._beat,
            )
            try:
                await self._bus.send(names.load_subject(self.fleet), report)
            except nats.errors.Error as error:
                self._completed = completed + self._completed
                log.info("load report not sent: %s", error)
                await asyncio.sleep(BEAT_SECONDS)

    # --------------------------------------------------------------------------------------------------- adapters

    async def _follow(self, heads: Heads) -> None:
        while True:
            await self._registry_changed.wait()
            self._registry_changed.clear()
            await self._settle(heads)

    async def _settle(self, heads: Heads) -> None:
        """Bring the engine to what the registry wants, and confirm it.

        What changes meanwhile sets the event again, and settling starts over with the newest wishes.
        """
        slots = (await self._engine.health()).adapter_slots
        refs = wanted(heads.heads, heads.versions, self.fleet)
        names_wanted = {ref.name for ref in refs[:slots]}
        for name in [name for name in self._loaded if name not in names_wanted]:
            del self._loaded[name]
            self._unloading[name] = asyncio.create_task(self._unload(name))
        for name in [name for name in self._refused if name not in {ref.name for ref in refs}]:
            del self._refused[name]
            self._failures.pop(name, None)
        for ref in refs[slots:]:
            self._refused[ref.name] = (
                f"no slot: {len(refs)} adapters are wanted, the engine holds {slots}; start it with --adapter-slots"
            )
        await self._put_node()
        for ref in refs[:slots]:
            if ref.name in self._loaded or ref.name in self._refused:
                continue
            await self._load(ref, _trace_of(heads, ref))
            await self._put_node()
            if self._registry_changed.is_set():
                return

    async def _load(self, ref: AdapterRef, trace: Mapping[str, str]) -> None:
        try:
            with tracing.span("load", parent=trace, adapter=ref.name, replica=self.id, version=ref.version):
                directory = await self._fetch(ref)
                if unloading := self._unloading.get(ref.name):
                    await unloading
                await self._engine.load_adapter(ref.name, directory)
        except (AdapterError, StoreError) as error:
            self._failures[ref.name] = self._failures.get(ref.name, 0) + 1
            log.warning("adapter %s not loaded (attempt %d): %s", ref.name, self._failures[ref.name], error)
            if self._failures[ref.name] >= LOAD_ATTEMPTS and not self._unloading:
                self._refused[ref.name] = str(error)
            else:
                asyncio.get_running_loop().call_later(1.0, self._registry_changed.set)
            return
        self._loaded[ref.name] = ref
        self._failures.pop(ref.name, None)
        log.info("adapter %s loaded", ref.name)

    async def _fetch(self, ref: AdapterRef) -> Path:
        """The adapter as a PEFT directory, from the local cache or from the store, verified."""
        directory = self._work / "adapters" / ref.sha256
        if directory.exists():
            return directory
        deadline = time.monotonic() + NOT_THERE_YET_SECONDS
        while True:
            try:
                data = await self._store.get(BlobRef(key=ref.key, size=ref.size, sha256=ref.sha256))
                break
            except ObjectMissing:
                if time.monotonic() > deadline or self._registry_changed.is_set():
                    raise
                await asyncio.sleep(0.5)
        scratch = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        await asyncio.to_thread(write_adapter_directory, data, scratch)
        scratch.rename(directory)
        return directory

    async def _unload(self, name: str) -> None:
        try:
            await self._engine.unload_adapter(name)
        finally:
            self._unloading.pop(name, None)

    # --------------------------------------------------------------------------------------------------- presence

    async def _announce(self) -> None:
        metrics.observe(self._gauges, replica=self.id)
        while True:
            await self._put_node()
            await asyncio.sleep(PRESENCE_SECONDS)

    def _gauges(self) -> dict[str, float]:
        return {
            "farflung.replica.running": float(len(self._running)),
            "farflung.replica.tokens_per_second": self._tokens.read(time.monotonic()),
        }

    async def _put_node(self) -> None:
        health = await self._engine.health()
        await self._registry.put_node(
            Node(
                id=self.id,
                node="replica",
                fleet=self.fleet,
                host=socket.gethostname(),
                pid=os.getpid(),
                state=self._state if health.ok else "failed",
                detail="" if health.ok else health.detail,
                model=self._model,
                confirmed=list(self._loaded),
                refused=dict(self._refused),
                slots=health.adapter_slots,
                context=health.context,
                cache_tokens=health.cache_tokens,
                gauges={
                    "running": float(health.running),
                    "waiting": float(health.waiting),
                    "tokens_per_second": self._tokens.read(time.monotonic()),
                    "generated_tokens": float(health.generated_tokens),
                    "prefilled_tokens": float(health.prefilled_tokens),
                },
            )
        )


def _trace_of(heads: Heads, ref: AdapterRef) -> Mapping[str, str]:
    """The headers of the step that made a version: loading it belongs to that step's trace."""
    run = ref.name.rsplit("-v", 1)[0]
    record = heads.versions.get(run, {}).get(ref.version)
    return record.trace if record is not None and record.adapter.name == ref.name else {}


def _new_blocks(adapter: str | None, prompt: Ids, output: Ids) -> list[bytes]:
    """Hashes of the full blocks that the continuation added behind those of the prompt."""
    return chain(adapter, np.concatenate([prompt, output]).astype(np.int32))[len(prompt) // BLOCK :]
