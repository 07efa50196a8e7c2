"""Putting the components together from their parts, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.errors import ConfigError
from broker.messages import Head
from broker.models import cache_root, resolve
from broker.registry import Registry
from broker.runspec import RunSpec, fleet_of
from broker.store import Store
from deploy.profile import Connection
from deploy.running import connected, log


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """`farflung actor`'s options."""

    model: str | None
    fleet: str | None
    engine: str
    dtype: str
    adapter_slots: int
    max_inflight: int
    cache_tokens: int
    threads: int | None
    code: Sequence[Path]
    no_engine: bool


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """`farflung learner`'s options."""

    roots: Sequence[Path]
    directory: Path | None
    threads: int | None
    restart: bool
    take_over: bool
    origin: str | None
    fresh_optimizer: bool


async def router(connection: Connection, fleet: str | None, id: str) -> int:
    """Run a router until it is stopped."""
    from router.service import RouterService

    async with connected(connection, id) as (bus, registry, _):
        name = fleet or (await _only_head(registry)).fleet
        await RouterService(bus, registry, fleet=name, id=id).run()
    return 0


async def actor(connection: Connection, id: str, options: ActorOptions) -> int:
    """Run an actor, and the replica it hosts, until it is stopped."""
    async with connected(connection, id) as (bus, registry, store):
        await _actor(bus, registry, store, id, options)
    return 0


async def _actor(bus: Bus, registry: Registry, store: Store, id: str, options: ActorOptions) -> None:
    from actors.adapter_cache import AdapterCache
    from actors.engines import create
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
    try:
        if not options.no_engine:
            engine = create(
                options.engine,
                files.directory,
                dtype=options.dtype,
                adapter_slots=options.adapter_slots,
                max_batch=options.max_inflight,
                cache_tokens=options.cache_tokens,
                threads=options.threads,
            )
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
    finally:
        shutil.rmtree(work, ignore_errors=True)


async def learner(connection: Connection, spec: RunSpec, id: str, options: LearnerOptions) -> int:
    """Run a learner until its run is finished or stopped; prints its summary as JSON."""
    from learner.branch import Origin
    from learner.node import PolicyLoader
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
                fresh_optimizer=options.fresh_optimizer,
                policy=loader,
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
