"""What an engine says of its prefix cache reaches the router's mirror over a real nats-server, and places requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from actors.adapter_cache import AdapterCache
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.flags import ZERO, Needs
from actors.engines.vllm.process import Attached
from actors.generation import Generator
from actors.replica import Replica
from broker.bus import Bus
from broker.ending import end
from broker.messages import GenerateRequest, pack_ids
from broker.models import resolve
from broker.registry import Registry, Roster
from broker.store import Store
from router.service import RouterService
from tests.scripted_engine import ScriptedEngine, ScriptedPublisher, removed, stored
from tests.waiting import until

pytestmark = pytest.mark.servers

FLEET = "publishing"


def prompt(number: int) -> list[int]:
    """Two blocks of the scripted server's size."""
    return list(range(64 * number, 64 * (number + 1)))


def hashes(number: int) -> list[bytes]:
    """How the server names them."""
    return [b"first of %d" % number, b"second of %d" % number]


class Scene:
    """A router and two replicas, of which the second one's engine publishes."""

    def __init__(self, router: RouterService, generator: Generator, publisher: ScriptedPublisher) -> None:
        self.router, self.generator, self.publisher = router, generator, publisher

    async def heard(self) -> None:
        """Return once what is published arrives at the router."""

        def arrives() -> bool:
            self.publisher.publish(stored(hashes(0), prompt(0), lora=ZERO))
            return self.mirrored() == 2

        await until(arrives, within=60, what="the router to hear of the engine's blocks")

    def mirrored(self) -> int:
        return int(self.router.readings()["mirrored_blocks"])

    def by_affinity(self) -> int:
        return int(self.router.readings()["placed.affinity"])

    async def ask(self, number: int) -> str:
        """Sample after a prompt; the replica that answered."""
        request = GenerateRequest(
            id=self.generator.request_id(f"g{number}", 0, 0), run="r", group=f"g{number}", siblings=1, adapter=None,
            version=0, prompt=pack_ids(np.array(prompt(number), np.int32)), max_new_tokens=4, temperature=1.0,
            stop_token_ids=[],
        )  # fmt: skip
        return (await self.generator.generate(request)).replica


@pytest.fixture
async def publisher() -> AsyncIterator[ScriptedPublisher]:
    pytest.importorskip("zmq")
    publisher = ScriptedPublisher()
    yield publisher
    publisher.close()


@pytest.fixture
async def scene(
    bus: Bus, registry: Registry, store: Store, tiny_model: Path, tmp_path: Path, publisher: ScriptedPublisher
) -> AsyncIterator[Scene]:
    servers, engines, tasks = [], [], []
    for number in range(2):
        server = ScriptedEngine(str(tiny_model))
        await server.start()
        engine = VllmEngine(
            Attached(server.url), resolve(str(tiny_model)), Needs(8, 3, 512), tmp_path / f"scratch-{number}",
            events=publisher.endpoint if number else "",
        )  # fmt: skip
        await engine.start()
        replica = Replica(
            bus, registry, AdapterCache(store, tmp_path / str(number)), engine, fleet=FLEET, id=f"replica-{number}",
            model="m",
        )  # fmt: skip
        servers.append(server)
        engines.append(engine)
        tasks.append(asyncio.create_task(replica.run()))
    roster = Roster(registry)
    await roster.ready.wait()
    await until(lambda: [node.state for node in roster.present("replica", FLEET)] == ["ready", "ready"], within=60)
    router = RouterService(bus, registry, fleet=FLEET, id="router-0")
    tasks.append(asyncio.create_task(router.run()))
    await until(lambda: router.placer.replicas() == ["replica-0", "replica-1"], within=60)
    generator = Generator(bus, fleet=FLEET)
    await generator.start()
    yield Scene(router, generator, publisher)
    await end(*tasks)
    await roster.close()
    for engine, server in zip(engines, servers, strict=True):
        await engine.close()
        await server.stop()


async def test_requests_go_where_an_engine_said_that_their_prompt_is_cached_until_it_says_otherwise(
    scene: Scene,
) -> None:
    await scene.heard()
    numbers = range(1, 7)
    scene.publisher.publish(*(stored(hashes(number), prompt(number), lora=ZERO) for number in numbers))
    await until(lambda: scene.mirrored() == 14, within=60, what="the router to mirror what was stored")
    assert [await scene.ask(number) for number in (1, 2, 3)] == ["replica-1"] * 3
    assert scene.by_affinity() == 3
    before = scene.mirrored()
    scene.publisher.publish(removed(*hashes(4)), stored(hashes(7), prompt(7), lora=ZERO))
    await until(lambda: scene.mirrored() > before, within=60, what="the router to hear of the removal")
    await scene.ask(4)
    assert scene.by_affinity() == 3, "what was removed draws nobody"
    scene.publisher.publish({"type": "AllBlocksCleared"})
    await until(lambda: scene.mirrored() <= 4, within=60, what="the router to forget what was cleared")
    await scene.ask(5)
    assert scene.by_affinity() == 3
