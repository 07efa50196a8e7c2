"""A scene for each test, on servers that all tests share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the process that components are forked from

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.registry import Registry
from broker.store import Store
from deploy.servers import Server
from tests.chaos.scene import Scene


@pytest.fixture
async def scene(
    tmp_path: Path,
    tiny_model: Path,
    nats_server: Server,
    store_server: Server,
    registry: Registry,
    store: Store,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Scene]:
    name = f"c-{secrets.token_hex(4)}"
    made = Scene(tmp_path, name, tiny_model, nats_server.launch.url, store_server.launch.url, registry, store)
    yield made
    said = made.said()
    made.close()
    print(said)  # shown where the test failed
