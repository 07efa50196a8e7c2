"""Putting the components together from their parts, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.errors import ConfigError, ModelError, ServerError
from broker.locks import file_lock
from broker.messages import Head
from broker.models import ModelFiles, cache_root, resolve
from broker.registry import Registry
from broker.runspec import RunSpec, fleet_of
from broker.store import Store
from deploy.profile import Connection
from deploy.running import connected, log

if TYPE_CHECKING:
    from actors.engines.base import Engine
    from router.face import Face
    from router.fleet import FleetFace
    from router.service import RouterService

DEFAULT_SLOTS = 8
"""Adapters that an embedded engine holds at least: they cost memory only when they are loaded."""


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """`farflung actor`'s options."""

    model: str | None
    fleet: str | None
    engine: str
    engine_url: str
    engine_key: str
    engine_events: str
    engine_arg: Sequence[str]
    vllm_python: str
    dtype: str
    adapter_slots: int | None
    max_lora_rank: int | None
    context: int | None
    max_inflight: int
    cache_tokens: int
    threads: int | None
    code: Sequence[Path]
    no_engine: bool

    @property
    def uses_vllm(self) -> bool:
        return self.engine == "vllm" or bool(self.engine_url)


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """`farflung learner`'s options."""

    roots: Sequence[Path]
    directory: Path | None
    threads: int | None
    restart: bool
    take_over: bool
    origin: str | None
    adapter: Path | None
    fresh_optimizer: bool


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """`farflung router`'s options."""

    fleet: str | None
    http: str | None
    model: str | None
    token: str
    upstreams: Sequence[str]
    spill: float
    mirror_mb: int
    cache_tokens: int


async def router(connection: Connection, options: RouterOptions, id: str) -> int:
    """Run a router until it is stopped."""
    from router.service import RouterService

    async with connected(connection, id) as (bus, registry, _):
        name = options.fleet or (await _only_head(registry)).fleet
        service = RouterService(
            bus, registry, fleet=name, id=id, spill=options.spill, max_bytes=options.mirror_mb * 1_000_000
        )
        if options.http is None:
            await service.run()
        else:
            await _with_face(bus, registry, service, options)
    return 0


async def _with_face(bus: Bus, registry: Registry, service: RouterService, options: RouterOptions) -> None:
    """Run a router and its HTTP face."""
    from router.fleet import FleetFace

    host, port = address(options.http or "")
    face = FleetFace(bus, registry, service, token=options.token)
    await listen(face, host, port)
    parts = [
        asyncio.create_task(part) for part in (service.run(), face.run(), _find_tokenizer(face, registry, options))
    ]
    try:
        await asyncio.gather(*parts)
    finally:
        await end(*parts)


async def _find_tokenizer(face: FleetFace, registry: Registry, options: RouterOptions) -> None:
    """Give the face the tokenizer of the fleet's base model. Without one it takes token ids alone, and says why."""
    model = options.model
    if model is None:
        face.no_tokenizer = "no run tells the base model yet; name it with --model"
        model = str((await _only_head(registry, options.fleet)).spec["run"]["model"])
    try:
        files = await asyncio.to_thread(resolve, model, log.info)
        face.tokenizer = await asyncio.to_thread(ChatTokenizer.from_directory, files.directory)
    except ModelError as error:
        face.no_tokenizer = f"{error}; name the model with --model"
        log.warning("the HTTP face takes token ids alone: %s", error)


async def stand_alone(options: RouterOptions) -> int:
    """Run a router before plain model servers until it is stopped."""
    from router.upstreams import StandAlone, UpstreamOptions

    if options.fleet or options.model:
        raise ConfigError("--upstream: a router that stands alone has no fleet and no --model; leave them out")
    host, port = address(options.http or "127.0.0.1:8000")
    face = StandAlone(
        options.upstreams,
        UpstreamOptions(
            token=options.token,
            spill=options.spill,
            max_bytes=options.mirror_mb * 1_000_000,
            cache_tokens=options.cache_tokens,
        ),
    )
    await listen(face, host, port)
    await face.run()
    return 0


def address(text: str) -> tuple[str, int]:
    """HOST and PORT of `HOST:PORT`, IPv6 addresses in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http: expected HOST:PORT, such as 127.0.0.1:8000, got {text!r}")
    return host.strip("[]"), int(port)


async def listen(face: Face, host: str, port: int) -> None:
    """Let an HTTP face listen. Raises ServerError."""
    try:
        port = await face.listen(host, port)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error}; choose another --http") from error
    log.info("OpenAI-compatible HTTP at http://%s:%d/v1", host, port)


async def actor(connection: Connection, id: str, options: ActorOptions) -> int:
    """Run an actor, and the replica it hosts, until it is stopped."""
    async with connected(connection, id) as (bus, registry, store):
        await _actor(bus, registry, store, id, options)
    return 0


async def _actor(bus: Bus, registry: Registry, store: Store, id: str, options: ActorOptions) -> None:
    from actors.adapter_cache import AdapterCache
    from actors.replica import Replica
    from actors.service import Actor

    model, fleet = options.model, options.fleet
    if model is None:
        head = await _only_head(registry, fleet)
        model, fleet = str(head.spec["run"]["model"]), head.fleet
    fleet = fleet or fleet_of(model)
    files = await asyncio.to_thread(resolve, model, log.info)
    work = cache_root() / "work" / id
    parts = []
    async with AsyncExitStack() as leaving:
        leaving.callback(shutil.rmtree, work, ignore_errors=True)
        if not options.no_engine:
            engine = await _engine(registry, files, fleet, id, work, options)
            if options.engine_url:
                leaving.enter_context(_held_alone(options.engine_url))
            if options.uses_vllm:
                leaving.push_async_callback(engine.close)
            await engine.start()
            replica_id = id.replace("actor-", "replica-", 1)
            replica = Replica(
                bus,
                registry,
                AdapterCache(store, work),
                engine,
                fleet=fleet,
                id=replica_id,
                model=files.fingerprint,
            )
            parts.append(replica.run())
        worker = Actor(
            bus,
            registry,
            store,
            ChatTokenizer.from_directory(files.directory),
            fleet=fleet,
            id=id,
            context=files.context,
            roots=list(options.code),
            max_inflight=options.max_inflight,
        )
        await asyncio.gather(worker.run(), *parts)


async def _engine(
    registry: Registry, files: ModelFiles, fleet: str, id: str, work: Path, options: ActorOptions
) -> Engine:
    """The engine that the options ask for, made for what the fleet's runs need. Raises ConfigError."""
    from actors.engines import VllmOptions, create_embedded, create_vllm
    from actors.engines.vllm.flags import needs

    context = min(files.context, options.context or files.context)
    wanted = needs(
        await registry.heads(), fleet, context=context, rank=options.max_lora_rank, slots=options.adapter_slots
    )
    if not options.uses_vllm:
        return create_embedded(
            files.directory,
            dtype=options.dtype,
            adapter_slots=options.adapter_slots or max(wanted.slots, DEFAULT_SLOTS),
            max_batch=options.max_inflight,
            cache_tokens=options.cache_tokens,
            threads=options.threads,
            context=options.context,
        )
    return create_vllm(
        files,
        rank=wanted.rank,
        slots=wanted.slots,
        context=context,
        options=VllmOptions(
            url=options.engine_url,
            key=options.engine_key,
            events=options.engine_events,
            python=options.vllm_python,
            extra=options.engine_arg,
            dtype=options.dtype,
            cache_tokens=options.cache_tokens,
            threads=options.threads,
        ),
        scratch=work / "vllm",
        log_file=cache_root() / "logs" / f"{id}-vllm.log",
    )


def _held_alone(url: str) -> AbstractContextManager[None]:
    """Keep other actors of this machine from the engine at `url`: two would unload each other's adapters."""
    name = "".join(letter if letter.isalnum() else "-" for letter in url.partition("://")[2])
    busy = f"another actor of this machine drives the engine at {url}; stop it, or give this one an engine of its own"
    return file_lock(cache_root() / "engines" / name, wait=False, busy=busy)


async def learner(connection: Connection, spec: RunSpec, id: str, options: LearnerOptions) -> int:
    """Run a learner until its run is finished or stopped; prints its summary as JSON."""
    from learner.branch import Origin
    from learner.node import PolicyLoader
    from learner.probe import probe_of
    from learner.service import Learner

    files = await asyncio.to_thread(resolve, spec.run.model, log.info)
    loader = PolicyLoader.join(spec, files, options.threads)
    if not loader.leads:
        await asyncio.to_thread(loader.follow)
        return 0
    try:
        async with connected(connection, id) as (bus, registry, store):
            summary = await Learner(
                bus,
                registry,
                store,
                spec,
                files,
                id=id,
                roots=options.roots,
                directory=options.directory,
                threads=options.threads,
                restart=options.restart,
                take_over=options.take_over,
                origin=Origin.parse(options.origin) if options.origin else None,
                adapter=options.adapter,
                fresh_optimizer=options.fresh_optimizer,
                policy=loader,
                prober=probe_of,
            ).run()
    finally:
        loader.close()
    print(json.dumps(summary.to_json()), flush=True)
    return 0


async def _only_head(registry: Registry, fleet: str | None = None) -> Head:
    """The one run there is (of `fleet`, if named), so that nobody has to name it; waits for the first one.

    Raises ConfigError when there are several fleets to choose from.
    """
    said = False
    while not (heads := [head for head in await registry.heads() if fleet is None or head.fleet == fleet]):
        if not said:
            log.info("no run yet; waiting for a learner to begin one (or name the fleet with --fleet and --model)")
            said = True
        await asyncio.sleep(1.0)
    fleets = sorted({head.fleet for head in heads})
    if len(fleets) != 1:
        raise ConfigError(
            f"expected one fleet to choose from, found {', '.join(fleets)}; name it with --fleet (and --model)"
        )
    return heads[0]
