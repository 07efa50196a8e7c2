"""Fixtures: a real nats-server and a real S3 server for whoever asks, and the tiny model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from broker.bus import Bus
from broker.registry import Registry
from broker.store import Store, StoreAddress
from deploy.servers import Server, nats_launch, store_launch
from tests.tiny import build_tiny_model

if TYPE_CHECKING:
    from tests.fleet import Fleet


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("nats")
    server = Server(nats_launch(directory), directory / "log")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("store")
    server = Server(store_launch(directory), directory / "log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(nats_server: Server) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_server.launch.url, "test")
    yield bus
    await bus.close()


@pytest.fixture
async def registry(bus: Bus) -> Registry:
    return await Registry.open(bus)


@pytest.fixture
async def store(store_server: Server) -> AsyncIterator[Store]:
    store = Store(StoreAddress.parse(store_server.launch.url))
    await store.open()
    yield store
    store.close()


@pytest.fixture
async def fleet(nats_server: Server, store_server: Server, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    from tests.fleet import Fleet  # loads torch, which most tests do without

    fleet = Fleet(nats_server.launch.url, store_server.launch.url, tiny_model, tmp_path)
    await fleet.open()
    yield fleet
    await fleet.close()
