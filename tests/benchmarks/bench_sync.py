"""From the end of an optimizer step to the new version active everywhere: `python -m tests.benchmarks.bench_sync`.

Adapters of rank 1, 8 and 32 of the demo's model, and of 5 and 50 MB, for 2 and for 8 replicas. The product's session,
activator, replicas and vLLM engines run against a real nats-server and a real S3 server; only vLLM itself is the
scripted server of the tests, which reads the whole adapter when it loads one. The floor, measured in turn with it: one
raw put, the slowest of as many raw gets at once as there are replicas, and one bare call to load.

Then what a busy replica notices of it (`while_publishing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch

from actors.adapter_cache import AdapterCache
from actors.engines.base import Engine
from actors.engines.vllm.client import EngineClient
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.flags import Needs
from actors.engines.vllm.process import Attached
from actors.replica import Replica
from broker.adapters import CONFIG_KEY, write_adapter_directory
from broker.bus import Bus
from broker.ending import end
from broker.messages import AdapterRef, BlobRef, Head
from broker.models import PACKAGED, ModelFiles, resolve
from broker.registry import Registry, Roster
from broker.store import Store, StoreAddress
from deploy.servers import Server, nats_launch, store_launch
from learner.activator import Activator
from learner.checkpoint import Checkpoint
from learner.claim import Claim
from learner.session import Session
from tests.benchmarks import measure
from tests.scripted_engine import ScriptedEngine
from tests.waiting import until

SIZES: dict[str, tuple[str, float]] = {
    "rank 1": ("rank", 1),
    "rank 8": ("rank", 8),
    "rank 32": ("rank", 32),
    "5 MB": ("bytes", 5e6),
    "50 MB": ("bytes", 50e6),
}
REPLICAS = (2, 8)
ROUNDS = 5
TARGET = 0.5
"""The floor over ours: at most twice the floor."""

STAGES = ("save", "put", "announce", "fetch+verify", "load", "confirm", "activate")

T = TypeVar("T")


def tensors_of(kind: str, amount: float, files: ModelFiles) -> dict[str, torch.Tensor]:
    """The weights of an adapter: of a rank on every linear layer of the model, or of about so many bytes."""
    if kind == "bytes":
        return {"base_model.model.synthetic.lora_A.weight": torch.randn(8, int(amount / 32))}
    rank, found = int(amount), {}
    for path in files.directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name.endswith("_proj.weight"):
                out_features, in_features = entry["shape"]
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                found[f"{stem}.lora_A.weight"] = torch.randn(rank, in_features)
                found[f"{stem}.lora_B.weight"] = torch.randn(out_features, rank)
    return found


def save(tensors: dict[str, torch.Tensor]) -> bytes:
    """What a learner does to publish its weights."""
    targets = sorted({name.split(".")[-3] for name in tensors})
    rank = min(min(tensor.shape) for tensor in tensors.values())
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": targets, "base_model_name_or_path": "",
    }  # fmt: skip
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(cpu, {CONFIG_KEY: json.dumps(config)})
    return data


@dataclass
class Clock:
    """When each stage of a version ended, and how long the stages took on each replica."""

    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, stage: str, call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def timed(*arguments: Any, **options: Any) -> T:
            began = time.perf_counter()
            result = await call(*arguments, **options)
            self.spans[stage].append((began, time.perf_counter()))
            return result

        return timed

    def last(self, stage: str) -> tuple[float, float]:
        return max(self.spans[stage], key=lambda span: span[1])


class Fleet:
    """Replicas, and the learner's end of the registry. Their engines: `engine`, or scripted servers."""

    def __init__(
        self, bus: Bus, store: Store, files: ModelFiles, directory: Path, replicas: int, engine: Engine | None = None
    ) -> None:
        self._bus, self._store, self._files = bus, store, files
        self._directory = directory
        self._replicas = replicas
        self._engine = engine
        self.name = f"f{uuid.uuid4().hex[:8]}"
        self.clock = Clock()
        self.servers: list[ScriptedEngine] = []
        self.version = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._engines: list[Engine] = []
        self.adapter: str | None = None
        """The name of the active version's."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        registry = await Registry.open(self._bus)
        self._roster = Roster(registry)
        await self._roster.ready.wait()
        head = Head(
            run=self.name, fleet=self.name, incarnation="i", epoch=1, learner="bench", step=0, head=0, active=0,
            max_staleness=1, state="running",
        )  # fmt: skip
        session = self._session = Session(
            registry, self._store, Claim(head, await registry.set_head(head, 0), created=True)
        )
        for number in range(self._replicas):
            await self._start_replica(registry, number)
        await until(lambda: len(self._roster.present("replica", self.name)) == self._replicas)
        self._active = asyncio.Event()
        activator = self._activator = Activator(
            session, self._roster, fleet=self.name, timeout=120.0, min_replicas=1, on_active=self._active.set
        )
        self._roster._changed = activator.wake.set
        self._tasks.append(asyncio.create_task(activator.run()))
        watch = self.clock.watch
        session.put = watch("put", session.put)  # type: ignore[assignment]
        session._put_version = watch("announce", session._put_version)  # type: ignore[assignment]
        session.activate = watch("activate", session.activate)  # type: ignore[assignment]
        try:
            yield self
        finally:
            await end(*self._tasks)
            for engine in self._engines:
                await engine.close()
            for server in self.servers:
                await server.stop()
            await self._roster.close()

    async def _start_replica(self, registry: Registry, number: int) -> None:
        work = self._directory / f"{self.name}-{number}"
        engine = self._engine or await self._scripted(work)
        cache = AdapterCache(self._store, work)
        cache.fetch = self.clock.watch("fetch+verify", cache.fetch)  # type: ignore[assignment]
        engine.load_adapter = self.clock.watch("load", engine.load_adapter)  # type: ignore[assignment]
        replica = Replica(
            self._bus, registry, cache, engine, fleet=self.name, id=f"replica-{self.name}-{number}", model="m"
        )
        self._tasks.append(asyncio.create_task(replica.run()))

    async def _scripted(self, work: Path) -> Engine:
        server = ScriptedEngine(str(self._files.directory), max_loras=8, max_rank=64)
        await server.start()
        self.servers.append(server)
        needs = Needs(rank=32, slots=4, context=512)
        engine = VllmEngine(Attached(server.url), self._files, needs, work / "scratch")
        await engine.start()
        self._engines.append(engine)
        return engine

    async def publish(self, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """One version from the end of its step to active everywhere; seconds by stage."""
        self.clock.spans.clear()
        self._active.clear()
        self.version += 1
        began = time.perf_counter()
        weights = await asyncio.to_thread(save, tensors)
        saved = time.perf_counter()
        ref = await self._session.offer(self.version, self.version, weights, {})
        offered = time.perf_counter()
        await self._commit(ref)
        self._activator.wake.set()
        await self._active.wait()
        self.adapter = ref.name
        put, announced = self.clock.spans["put"][0], self.clock.spans["announce"][0]
        fetched, loaded, active = (self.clock.last(stage) for stage in ("fetch+verify", "load", "activate"))
        return {
            "save": saved - began,
            "put": put[1] - put[0],
            "announce": announced[1] - announced[0],
            "fetch+verify": fetched[1] - offered,
            "load": loaded[1] - fetched[1],
            "confirm": active[0] - loaded[1],
            "activate": active[1] - active[0],
            "total": active[1] - began,
        }

    async def _commit(self, ref: AdapterRef) -> None:
        blob = BlobRef(key="none", size=0, sha256="0" * 64)
        state = Checkpoint(
            run=self.name, incarnation="i", step=self.version, version=self.version, weights=ref.blob, optimizer=blob,
            ledger={}, rewards=[], trained=[], seconds=0.0,
        )  # fmt: skip
        await self._session.commit(state, blob, ref, reward=0.0, summary={}, trace={})


async def floor(store: Store, server: ScriptedEngine, data: bytes, replicas: int, scratch: Path) -> float:
    """One raw put, the slowest of `replicas` raw gets at once, one bare call to load. Seconds."""
    bucket, key = store.address.bucket, f"raw/{uuid.uuid4().hex}"
    directory = scratch / uuid.uuid4().hex
    await asyncio.to_thread(write_adapter_directory, data, directory)
    client = EngineClient(server.url)
    loop = asyncio.get_running_loop()

    def get() -> None:
        response = store._client.get_object(bucket, key)
        response.read()
        response.close()
        response.release_conn()

    with ThreadPoolExecutor(replicas) as pool:
        began = time.perf_counter()
        await asyncio.to_thread(store._client.put_object, bucket, key, io.BytesIO(data), len(data))
        await asyncio.gather(*(loop.run_in_executor(pool, get) for _ in range(replicas)))
        await client.load("raw", str(directory))
        seconds = time.perf_counter() - began
    await client.unload("raw")
    await client.close()
    return seconds


async def _measure(bus: Bus, store: Store, files: ModelFiles, directory: Path) -> list[measure.Row]:
    rows = []
    print(f"\n{'seconds (medians)':28}" + "".join(f"{stage:>14}" for stage in (*STAGES, "total", "floor")))
    for replicas in REPLICAS:
        for name, (kind, amount) in SIZES.items():
            tensors = tensors_of(kind, amount, files)
            data = save(tensors)
            spare = ScriptedEngine(str(files.directory), max_rank=64)
            await spare.start()
            async with Fleet(bus, store, files, directory, replicas).running() as fleet:
                found, floors = [], []
                for number in range(ROUNDS + 1):
                    for tensor in tensors.values():  # each version has bytes of its own
                        tensor.view(-1)[0] = number
                    took = await fleet.publish(tensors)
                    below = await floor(store, spare, data, replicas, directory)
                    if number:
                        found.append(took)
                        floors.append(below)
            await spare.stop()
            label = f"{name} ({len(data) / 1e6:.1f} MB), {replicas} replicas"
            medians = {stage: statistics.median(took[stage] for took in found) for stage in (*STAGES, "total")}
            figures = [*medians.values(), statistics.median(floors)]
            print(f"{label:28}" + "".join(f"{value:>14.3f}" for value in figures), flush=True)
            ratio = statistics.median(below / took["total"] for took, below in zip(found, floors, strict=True))
            rows.append(
                measure.Row(label, 1 / medians["total"], 1 / statistics.median(floors), ratio, "versions/s", TARGET)
            )
    return rows


@contextlib.contextmanager
def _servers(directory: Path) -> Iterator[tuple[Server, Server]]:
    servers = (
        Server(nats_launch(directory / "nats"), directory / "nats.log"),
        Server(store_launch(directory / "store"), directory / "store.log"),
    )
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextlib.asynccontextmanager
async def connected(directory: Path) -> AsyncIterator[tuple[Bus, Store]]:
    """A bus and a store with servers of their own."""
    with _servers(directory) as (nats, s3):
        bus = await Bus.connect(nats.launch.url, "bench")
        store = Store(StoreAddress.parse(s3.launch.url))
        await store.open()
        try:
            yield bus, store
        finally:
            store.close()
            await bus.close()


async def _main(directory: Path) -> list[measure.Row]:
    files = resolve(PACKAGED, print)
    async with connected(directory) as (bus, store):
        return await _measure(bus, store, files, directory)


def run() -> list[measure.Row]:
    """Measure every size with every number of replicas, and what a busy replica notices."""
    from tests.benchmarks import while_publishing  # it is made of what stands here

    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(_main(Path(directory)))
    return rows + while_publishing.run()


if __name__ == "__main__":
    print(measure.show(run()))
