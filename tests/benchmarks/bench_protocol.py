"""What the protocol costs: a commit by part beside raw puts of the same bytes, a resume by part, decisions a second.

python -m tests.benchmarks.bench_protocol [--rounds N]

A commit has the parts, the order and the overlap of `learner.service`, on the demo's model, with an optimizer that has
moments for every weight; the servers are those of `farflung up`. The raw side puts as many bytes with the bare client,
adapter and optimizer at once and then the state, as the commit does. The commit's fourth object, the copy of the head,
is a few kilobytes; the raw side leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from broker import names
from broker.bus import Bus, groups_config, learner_consumer, tasks_config
from broker.messages import GroupReady, Head, Task
from broker.models import PACKAGED, ModelFiles, resolve
from broker.registry import Registry
from broker.runspec import LoraSection, OptimizerSection
from broker.store import Store, StoreAddress
from deploy.servers import Server, nats_launch, store_launch
from learner.activation import Activation, Pace, ReplicaView
from learner.buffer import Buffer, Held
from learner.checkpoint import Checkpoint, TrainedGroup
from learner.claim import Claim, replace_head
from learner.credit import CreditRule
from learner.janitor import Leases
from learner.ledger import Ledger
from learner.model import MOMENTS, Policy
from learner.session import Session
from learner.tails import Tails
from tests.benchmarks import measure
from tests.benchmarks.bench_transport import example_group

RANKS = (1, 8, 32)

ROUNDS = 7

GROUPS_PER_STEP = 8

TARGET = 0.5
"""A commit takes at most twice as long as its bare puts: it also serializes, hashes, and writes four small records."""

PARTS = ("serialize", "adapter put", "optimizer put", "state put", "compare-and-set", "version records", "acks")


RESUME_PARTS = (
    "claim", "streams", "commit's objects", "weights", "optimizer", "ledger", "what is held", "first batch",
)  # fmt: skip


class Timings:
    """Seconds by part, of several rounds."""

    def __init__(self) -> None:
        self._now: dict[str, float] = defaultdict(float)
        self.rounds: list[Mapping[str, float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._now[name] += time.perf_counter() - began

    def next_round(self) -> None:
        self.rounds.append(dict(self._now))
        self._now.clear()

    def median(self, name: str) -> float:
        return statistics.median(one.get(name, 0.0) for one in self.rounds)


# ----------------------------------------------------------------------------------------------------------- a commit


def policy_of(files: ModelFiles, rank: int) -> Policy:
    """The demo's policy with an adapter of `rank`, as it stands after a first step: every weight has its moments."""
    import torch

    lora = LoraSection(rank=rank, alpha=2 * rank)
    policy = Policy(files.directory, model_name=PACKAGED, lora=lora, optimizer=OptimizerSection(), temperature=1.0)
    for parameter in policy._weights.values():
        policy._optimizer.state[parameter] = {
            moment: torch.tensor(1.0) if moment == "step" else torch.randn_like(parameter) for moment in MOMENTS
        }
    return policy


class TimedStore(Store):
    """Books each put and get under what its key says it is."""

    timings: Timings

    async def put(self, prefix: str, data: bytes) -> object:  # type: ignore[override]
        kind = "adapter" if "/adapters/" in prefix else prefix.rpartition("/")[2]
        with self.timings.part(f"{kind} put"):
            return await super().put(prefix, data)


class TimedRegistry(Registry):
    """Books compare-and-sets of the head, and writes of version records."""

    timings: Timings

    async def set_head(self, *arguments: object, **options: object) -> int:
        with self.timings.part("compare-and-set"):
            return await super().set_head(*arguments, **options)  # type: ignore[arg-type]

    async def put_version(self, *arguments: object, **options: object) -> int:
        with self.timings.part("version records"):
            return await super().put_version(*arguments, **options)  # type: ignore[arg-type]


def a_ledger() -> Ledger:
    """Of a run that has gone on for a while: a full window is open."""
    ledger = Ledger()
    for number in range(1000):
        ledger.issue(f"bench-00000000-{number:08d}")
        if number < 970:
            ledger.close(f"bench-00000000-{number:08d}", "trained")
    return ledger


async def commit(session: Session, policy: Policy, acks: list[object], timings: Timings) -> None:
    """One commit, part after part, with the parts and in the order of `learner.service`."""
    step = session.head.step + 1
    with timings.part("serialize"):
        weights = await asyncio.to_thread(policy.adapter_bytes)
    offering = asyncio.create_task(session.offer(step, step, weights, {}))
    with timings.part("serialize"):
        optimizer = await asyncio.to_thread(policy.optimizer_bytes)
    optimizer_ref = await session.store_blob(step, "optimizer", optimizer)
    adapter = await offering
    with timings.part("serialize"):
        checkpoint = Checkpoint(
            run=session.run, incarnation=session.head.incarnation, step=step, version=step, weights=adapter.blob,
            optimizer=optimizer_ref, ledger=a_ledger().to_state(), rewards=[0.5] * 100, tails=Tails().to_state(),
            trained=[TrainedGroup(f"bench-00000000-{number:08d}", adapter.blob) for number in range(GROUPS_PER_STEP)],
            seconds=1.0,
        )  # fmt: skip
        state = checkpoint.encode()
    ref = await session.store_blob(step, "state", state)
    await session.commit(checkpoint, ref, adapter, reward=0.5, summary={"reward": 0.5}, trace={})
    with timings.part("acks"):
        await asyncio.gather(*(delivery.ack() for delivery in acks))  # type: ignore[attr-defined]


async def announce_groups(bus: Bus, run: str, nonce: str) -> None:
    """A step's groups are finished."""
    for number in range(GROUPS_PER_STEP):
        task = Task(run=run, incarnation="i", group="g", index=0, columns={}, group_size=1, seed=0)
        await bus.publish(names.group_subject(run, f"{nonce}{number}"), task, id=f"{nonce}{number}")


async def bench_commit(
    bus: Bus, store: TimedStore, registry: TimedRegistry, files: ModelFiles, rank: int, rounds: int
) -> measure.Row:
    """A commit against the bare puts of three of its four objects, in turn; prints what each part takes."""
    policy = policy_of(files, rank)
    run = f"bench-{rank}"
    head = Head(
        run=run, fleet="f", incarnation=uuid.uuid4().hex[:8], epoch=1, learner="l", step=0, head=0, active=0,
        max_staleness=1, state="running",
    )  # fmt: skip
    timings = store.timings = registry.timings = Timings()
    session = Session(registry, store, Claim(head, await registry.set_head(head, 0), created=True))
    await bus.ensure_stream(groups_config(run, window=64))
    puller = await bus.puller(names.groups_stream(run), learner_consumer(run, head.incarnation, 1))
    sizes = [len(policy.adapter_bytes()), len(policy.optimizer_bytes()), 40_000]
    bodies = [bytes(size) for size in sizes]
    client, bucket = store._client, store.address.bucket

    async def ours() -> float:
        nonce = uuid.uuid4().hex
        await announce_groups(bus, run, nonce)
        held = await puller.fetch(GROUPS_PER_STEP, 5)
        began = time.perf_counter()
        await commit(session, policy, list(held), timings)
        taken = time.perf_counter() - began
        timings.next_round()
        return 1 / taken

    async def put(body: bytes) -> None:
        key = f"raw/{uuid.uuid4().hex}"
        await asyncio.to_thread(client.put_object, bucket, key, io.BytesIO(body), len(body))

    async def raw() -> float:
        began = time.perf_counter()
        await asyncio.gather(put(bodies[0]), put(bodies[1]))
        await put(bodies[2])
        return 1 / (time.perf_counter() - began)

    row = await measure.compare(
        f"protocol: a commit at rank {rank} ({sum(sizes) / 1e6:.1f} MB)", ours, raw, unit="commits/s", target=TARGET,
        rounds=rounds,
    )  # fmt: skip
    timings.rounds.pop(0)
    print(f"\na commit at rank {rank}: adapter {sizes[0] / 1e6:.1f} MB, optimizer {sizes[1] / 1e6:.1f} MB; median ms")
    for part in PARTS:
        print(f"  {part:18} {1000 * timings.median(part):9.2f}")
    print(f"  {'raw puts':18} {1000 / row.raw:9.2f}")
    await bench_resume(bus, session, registry, store, policy, rounds)
    return row


async def bench_resume(
    bus: Bus, session: Session, registry: TimedRegistry, store: TimedStore, policy: Policy, rounds: int
) -> None:
    """From the start of a learner to its first batch, by part; its predecessor held the groups. Loading the base model
    and the interpreter's own start come on top.
    """
    timings, run = Timings(), session.run
    tasks, groups = names.tasks_stream(run), names.groups_stream(run)
    await announce_groups(bus, run, uuid.uuid4().hex)
    for _ in range(rounds):
        with timings.part("claim"):
            old = await registry.head(run)
            assert old is not None
            head = replace_head(old[0], epoch=old[0].epoch + 1)
            revision = await registry.set_head(head, old[1])
        with timings.part("streams"):
            await bus.ensure_stream(tasks_config(run))
            await bus.ensure_stream(groups_config(run, window=64))
            config = learner_consumer(run, head.incarnation, head.epoch)
            await bus.delete_consumers(groups, lambda name, epoch=head.epoch: names.consumer_epoch(name) < epoch)  # type: ignore[misc]
            puller = await bus.puller(groups, config)
        with timings.part("commit's objects"):
            again = Session(registry, store, Claim(head, revision, created=False))
            newest = await again.newest_intact()
        assert newest is not None
        assert newest.optimizer is not None
        with timings.part("weights"):
            policy.load_adapter_bytes(newest.weights)
        with timings.part("optimizer"):
            policy.load_optimizer_bytes(newest.optimizer)
        with timings.part("ledger"):
            Ledger.from_state(newest.checkpoint.ledger)
        with timings.part("what is held"):
            await bus.subjects_held(tasks)
            await bus.subjects_held(groups)
        with timings.part("first batch"):
            waiting = GROUPS_PER_STEP
            while waiting:
                waiting -= len(await puller.fetch(waiting, 5))
        timings.next_round()
    print("  a resume:")
    for part in RESUME_PARTS:
        print(f"    {part:16} {1000 * timings.median(part):9.2f}")


# ---------------------------------------------------------------------------------------------------------- decisions


def per_second(work: Callable[[int], object], *, seconds: float = 0.5) -> float:
    """How often a second `work` can be done: it is given a number and tells nothing."""
    done, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        for _ in range(100):
            work(done)
            done += 1
    return done / taken


class Unheld:
    async def ack(self, timeout: float = 5.0) -> bool:
        return True


def decisions(rounds: int) -> dict[str, float]:
    """Events per second of the pure state machines, as busy as in a large run; medians of `rounds`."""
    ledger = Ledger()
    for number in range(500):
        ledger.issue(f"open-{number}")
    rule = CreditRule(groups_per_step=64, max_staleness=4, publish_every=1)
    group = example_group("g")

    def held(number: int) -> Held:
        ready = GroupReady(
            run="r", incarnation="i", group=f"g{number}", index=number, version=number % 4, adapter=None, key="k",
            size=1, sha256="0" * 64, rewards=[0.0], lengths=[1], seconds={}, actor="a",
        )  # fmt: skip
        return Held(ready, group, Unheld(), {})

    pool = [held(number) for number in range(256)]
    buffer = Buffer()

    def issue_and_close(number: int) -> None:
        ledger.issue(f"g{number}")
        ledger.close(f"g{number}", "trained")

    def add_and_take(number: int) -> None:
        buffer.add(pool[number % 256])
        if len(buffer) >= 64:
            buffer.take_stale(rule, 4)
            buffer.take(64)

    views = [ReplicaView(f"r{number}", frozenset({"v1"} if number % 2 else {"v1", "v2"}), {}) for number in range(100)]
    pace = Pace(60.0)
    since = pace.announce("v2", views, 0.0)
    activation = Activation(2, "v2", frozenset(since), 0.0, 60.0, 1, since)

    def observe(number: int) -> None:
        pace.observe(views, number * 1e-6)
        activation.observe(views, number * 1e-6)

    leases = Leases(3600.0)
    leased = [f"g{number}" for number in range(500)]
    tails = Tails()
    works: dict[str, Callable[[int], object]] = {
        "ledger: issue and close a group, 500 open": issue_and_close,
        "credit: how many may be issued": lambda number: rule.credit(head=9, active=8, open_groups=number % 300),
        "buffer: add a group and take its part of 64": add_and_take,
        "activation: look at 100 replicas": observe,
        "leases: look at 500": lambda number: leases.observe(leased, float(number % 10)),
        "tails: take in a group of 8": lambda number: tails.add("trained", [number % 999] * 8, 1.0),
    }
    return {name: statistics.median(per_second(work) for _ in range(rounds)) for name, work in works.items()}


async def _main(directory: Path, rounds: int) -> list[measure.Row]:
    servers = [
        Server(make(directory), directory / f"{number}.log") for number, make in enumerate((nats_launch, store_launch))
    ]
    files = resolve(PACKAGED, print)
    try:
        for server in servers:
            server.start()
        bus = await Bus.connect(servers[0].launch.url, "bench")
        opened = await Registry.open(bus)
        registry = TimedRegistry(bus, opened.runs, opened.nodes)
        store = TimedStore(StoreAddress.parse(servers[1].launch.url))
        await store.open()
        rows = [await bench_commit(bus, store, registry, files, rank, rounds) for rank in RANKS]
        await bus.close()
        store.close()
        return rows
    finally:
        for server in servers:
            server.stop()


def run(rounds: int = ROUNDS) -> list[measure.Row]:
    """Measure commits at each rank; prints the parts, the resume, and the decisions a second."""
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(_main(Path(directory), rounds))
    print("\ndecisions a second")
    for name, rate in decisions(min(rounds, 3)).items():
        print(f"  {name:46} {rate:12,.0f}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(measure.show(run(parser.parse_args().rounds)))
