"""Our bus and store against raw nats-py and raw minio: same servers, same sync mode, same payloads, tracing on.

python -m tests.benchmarks.bench_transport
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

from broker import names
from broker.bus import Bus, groups_config, learner_consumer, tasks_config
from broker.messages import GroupReady, Task, decode
from broker.store import Store, StoreAddress
from broker.trajectories import Episode, Group, Row, Turn
from deploy.servers import Server, nats_launch, store_launch
from observability import tracing
from tests.benchmarks import measure

MESSAGES = 1500
AT_ONCE = 64
GROUPS = 40


def example_task(group: str) -> Task:
    """About a kilobyte, as a chat prompt with its answer is."""
    prompt = [{"role": "user", "content": "What is 12 + 34? Answer with just the number. " * 16}]
    columns = {"prompt": prompt, "answer": 46}
    return Task(run="bench", incarnation="i", group=group, index=0, columns=columns, group_size=8, seed=1)


def example_group(group: str) -> Group:
    """Eight episodes of 200 prompt and 200 sampled tokens."""
    generator = np.random.default_rng(0)
    mask = np.concatenate([np.zeros(200), np.ones(200)])
    episodes = [
        Episode(
            index=index,
            rows=[Row.of(generator.integers(0, 49152, 400), -generator.random(400) * mask, mask, mask.astype(int) - 1)],
            reward=float(index % 2),
            parts={"reward": float(index % 2)},
            turns=[Turn(role="user", content="x" * 400), Turn(role="assistant", content="y" * 400)],
            truncated=False,
            replicas=["replica"],
        )
        for index in range(8)
    ]
    return Group(run="bench", incarnation="i", group=group, index=0, version=0, adapter=None, episodes=episodes)


async def bench_queue(bus: Bus) -> measure.Row:
    """Publish and consume, with as many publishes at once as a busy actor has."""
    stream = "RAW"
    await bus.jetstream.add_stream(
        StreamConfig(name=stream, subjects=["raw.*"], retention=RetentionPolicy.WORK_QUEUE, storage=StorageType.FILE)
    )
    raw_pull = await bus.jetstream.pull_subscribe("raw.*", durable="raw", stream=stream)
    payload = example_task("g").encode()

    async def raw() -> float:
        began = time.perf_counter()
        slots = asyncio.Semaphore(AT_ONCE)

        async def publish(number: int) -> None:
            async with slots:
                await bus.jetstream.publish(f"raw.{number}", payload, headers={"Nats-Msg-Id": uuid.uuid4().hex})

        await asyncio.gather(*(publish(number) for number in range(MESSAGES)))
        left = MESSAGES
        while left:
            messages = await raw_pull.fetch(32, timeout=5)
            await asyncio.gather(*(message.ack_sync() for message in messages))
            left -= len(messages)
        return MESSAGES / (time.perf_counter() - began)

    await bus.ensure_stream(tasks_config("bench"))
    puller = await bus.puller(names.tasks_stream("bench"), learner_consumer("bench", "i", 1))

    async def ours() -> float:
        nonce = uuid.uuid4().hex
        began = time.perf_counter()
        slots = asyncio.Semaphore(AT_ONCE)

        async def publish(number: int) -> None:
            group = f"{nonce}-{number}"
            async with slots:
                span = tracing.root("group", run="bench", group=group, index=number)
                await bus.publish(
                    names.task_subject("bench", group), example_task(group), id=group, headers=tracing.headers(span)
                )
                span.end()

        await asyncio.gather(*(publish(number) for number in range(MESSAGES)))
        left = MESSAGES
        while left:
            deliveries = await puller.fetch(32, 5)
            for delivery in deliveries:
                decode(delivery.data, Task)
            await asyncio.gather(*(delivery.ack() for delivery in deliveries))
            left -= len(deliveries)
        return MESSAGES / (time.perf_counter() - began)

    return await measure.compare("publish and consume a task", ours, raw, unit="messages/s", target=0.8)


async def bench_group(bus: Bus, store: Store) -> measure.Row:
    """One group from a finished actor to a decoded group at the learner, one after the other."""
    await bus.ensure_stream(groups_config("bench", window=64))
    puller = await bus.puller(names.groups_stream("bench"), learner_consumer("bench", "i", 1))
    raw_pull = await bus.jetstream.pull_subscribe("raw.*", durable="raw", stream="RAW")
    blob = example_group("g").encode()
    notice = json.dumps({"key": "k" * 100, "rewards": [0.0] * 8}).encode()
    client, bucket = store._client, store.address.bucket

    def raw_put(key: str) -> None:
        client.put_object(bucket, key, io.BytesIO(blob), len(blob))

    def raw_get(key: str) -> None:
        response = client.get_object(bucket, key)
        response.read()
        response.close()
        response.release_conn()

    async def raw() -> float:
        began = time.perf_counter()
        for _ in range(GROUPS):
            key = f"raw/{uuid.uuid4().hex}"
            await asyncio.to_thread(raw_put, key)
            await bus.jetstream.publish("raw.g", notice, headers={"Nats-Msg-Id": key})
            [message] = await raw_pull.fetch(1, timeout=5)
            await asyncio.to_thread(raw_get, key)
            await message.ack_sync()
        return GROUPS / (time.perf_counter() - began)

    async def ours() -> float:
        nonce = uuid.uuid4().hex
        groups = [example_group(f"{nonce}-{number}") for number in range(GROUPS)]
        began = time.perf_counter()
        for group in groups:
            with tracing.span("store", group=group.group):
                data = group.encode()
                ref = await store.put(names.group_prefix("bench", "i", group.group), data)
            ready = GroupReady(
                run="bench", incarnation="i", group=group.group, index=0, version=0, adapter=None, key=ref.key,
                size=ref.size, sha256=ref.sha256, rewards=group.rewards, lengths=[200] * 8, seconds={}, actor="a",
            )  # fmt: skip
            await bus.publish(
                names.group_subject("bench", group.group), ready, id=f"{group.group}:{ref.sha256[:16]}",
                headers=tracing.headers(),
            )  # fmt: skip
            [delivery] = await puller.fetch(1, 5)
            decode(delivery.data, GroupReady)
            Group.from_blob(await store.get(ref))
            await delivery.ack()
        return GROUPS / (time.perf_counter() - began)

    return await measure.compare("a group's way from actor to learner", ours, raw, unit="groups/s", target=0.8)


async def _main(directory: Path) -> list[measure.Row]:
    servers = [
        Server(make(directory), directory / f"{number}.log") for number, make in enumerate((nats_launch, store_launch))
    ]
    telemetry = tracing.configure("bench", "bench", directory=directory)
    try:
        for server in servers:
            server.start()
        bus = await Bus.connect(servers[0].launch.url, "bench")
        store = Store(StoreAddress.parse(servers[1].launch.url))
        await store.open()
        rows = [await bench_queue(bus), await bench_group(bus, store)]
        await bus.close()
        store.close()
        return rows
    finally:
        for server in servers:
            server.stop()
        telemetry.shutdown()


def run() -> list[measure.Row]:
    """Measure both comparisons."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_main(Path(directory)))


if __name__ == "__main__":
    print(measure.show(run()))
