"""Several routers of one fleet, as processes: groups are shared, and killing one mid-run loses nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.adapter_cache import AdapterCache
from actors.engines.base import EngineHealth, Generation
from actors.generation import Generator
from actors.replica import Replica
from broker.bus import Bus
from broker.ending import end
from broker.messages import GenerateRequest, pack_ids
from broker.registry import Registry, Roster
from broker.store import Store
from deploy.servers import Server
from tests.waiting import until

pytestmark = pytest.mark.servers

FLEET = "shared"
ROOT = Path(__file__).parents[2]


class StubEngine:
    """Takes its time, and answers with as many tokens as were asked for."""

    def __init__(self) -> None:
        self.groups: Counter[int] = Counter()
        self.running = 0

    async def generate(self, request_id: str, adapter: object, prompt: Any, sampling: Any) -> Generation:
        self.groups[int(prompt[0])] += 1
        self.running += 1
        try:
            await asyncio.sleep(0.1)
        finally:
            self.running -= 1
        tokens = np.arange(sampling.max_new_tokens, dtype=np.int32)
        return Generation(tokens, -np.ones(len(tokens), np.float32), "length", None, 0)

    async def cancel(self, request_id: str) -> None:
        pass

    async def health(self) -> EngineHealth:
        return EngineHealth(True, "", (), 4, self.running, 0, 4096, 65_536, 0, 0)


class Scene:
    def __init__(self, generator: Generator, engines: list[StubEngine], routers: list[subprocess.Popen[bytes]]) -> None:
        self.generator = generator
        self.engines = engines
        self.routers = routers

    async def group(self, number: int, size: int = 4) -> list[str]:
        """A group's members ask; the replicas that answered."""
        prompt = np.full(64, number, np.int32)
        replies = await asyncio.gather(
            *(
                self.generator.generate(
                    GenerateRequest(
                        id=self.generator.request_id(f"g{number}", member, 0),
                        run="r",
                        group=f"g{number}",
                        siblings=size,
                        adapter=None,
                        version=0,
                        prompt=pack_ids(prompt),
                        max_new_tokens=8,
                        temperature=1.0,
                        stop_token_ids=[],
                    )
                )
                for member in range(size)
            )
        )
        return [reply.replica for reply in replies]


def start(command: list[str], directory: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=directory, env=environment)


@pytest.fixture
async def scene(
    bus: Bus, registry: Registry, store: Store, nats_server: Server, store_server: Server, tmp_path: Path
) -> AsyncIterator[Scene]:
    engines: list[Any] = [StubEngine() for _ in range(3)]
    replicas = [
        Replica(
            bus, registry, AdapterCache(store, tmp_path / f"{n}"), engine, fleet=FLEET, id=f"replica-{n}", model="m"
        )
        for n, engine in enumerate(engines)
    ]
    parts = [asyncio.create_task(replica.run()) for replica in replicas]
    roster = Roster(registry)
    await until(lambda: len(roster.present("replica", FLEET)) == 3)
    command = [
        sys.executable, "-m", "deploy.cli", "router", "--fleet", FLEET, "--nats", nats_server.launch.url,
        "--s3", store_server.launch.url,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    routers = [start(command, tmp_path, environment) for _ in range(2)]
    generator = Generator(bus, fleet=FLEET)
    await generator.start()
    await until(lambda: len(roster.present("router", FLEET)) == 2, within=60)
    yield Scene(generator, engines, routers)
    for router in routers:
        router.kill()
        router.wait()
    await roster.close()
    await end(*parts)


async def test_groups_meet_whichever_router_takes_them_and_a_killed_router_loses_nothing(scene: Scene) -> None:
    answered = await asyncio.gather(*(scene.group(number) for number in range(24)))
    split = sum(len(set(replicas)) > 1 for replicas in answered)
    assert split <= 2, "only groups that came before the routers had heard of each other"
    counts = Counter(replica for replicas in answered for replica in replicas)
    assert min(counts.values()) > 16

    running = [asyncio.create_task(scene.group(100 + number)) for number in range(24)]
    await until(lambda: any(engine.running for engine in scene.engines))
    scene.routers[0].send_signal(signal.SIGKILL)
    more = [asyncio.create_task(scene.group(200 + number)) for number in range(24)]
    async with asyncio.timeout(60):
        answered = await asyncio.gather(*running, *more)
    assert all(len(replicas) == 4 for replicas in answered)
    once = sum(sum(engine.groups.values()) for engine in scene.engines)
    assert once <= 72 * 4 + 8, "what was being served was not served again"
