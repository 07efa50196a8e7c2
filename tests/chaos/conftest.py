"""A scene for each test, on servers that all tests share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the process that components are forked from

import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from broker.registry import Registry
from broker.store import Store
from deploy.servers import Server
from tests.chaos.scene import Scene


@pytest.fixture
async def scenes(
    tmp_path: Path,
    tiny_model: Path,
    nats_server: Server,
    store_server: Server,
    registry: Registry,
    store: Store,
) -> AsyncIterator[Callable[[], Scene]]:
    """Makes scenes."""
    made: list[Scene] = []

    def make() -> Scene:
        run = f"c-{secrets.token_hex(4)}"
        servers = nats_server.launch.url, store_server.launch.url
        made.append(Scene(tmp_path / run, run, tiny_model, *servers, registry, store))
        return made[-1]

    yield make
    for scene in made:
        said = scene.said()
        scene.close()
        print(said)  # shown where the test failed


@pytest.fixture
def scene(scenes: Callable[[], Scene]) -> Scene:
    return scenes()
