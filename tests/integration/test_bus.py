"""The bus and the registry against a real nats-server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import names
from broker.bus import (
    MAX_DELIVERIES,
    Bus,
    ConsumerGone,
    StreamFull,
    actors_consumer,
    advisory_sequence,
    dead_config,
    groups_config,
    learner_consumer,
    tasks_config,
)
from broker.errors import ConnectionFailed, MalformedMessage, RegistryConflict
from broker.messages import Control, DeadLetter, Head, Node, Task, decode
from broker.registry import Bucket, Heads, Registry, Roster
from broker.store import StoreAddress
from deploy.profile import Connection
from deploy.running import connected
from deploy.servers import Server, free_port, nats_launch
from tests.waiting import until

pytestmark = pytest.mark.servers


def task(group: str, run: str = "r") -> Task:
    return Task(run=run, incarnation="i", group=group, index=0, columns={"prompt": "x"}, group_size=2, seed=0)


def head(run: str, **changes: object) -> Head:
    fields: dict[str, object] = {
        "run": run, "fleet": "f", "incarnation": "i", "epoch": 1, "learner": "l", "step": 0, "head": 0, "active": 0,
        "max_staleness": 1, "state": "running",
    }  # fmt: skip
    return Head(**{**fields, **changes})  # type: ignore[arg-type]


async def test_a_subject_holds_one_message_and_an_id_is_stored_once(bus: Bus) -> None:
    await bus.ensure_stream(tasks_config("one"))
    subject = names.task_subject("one", "g1")
    assert (await bus.publish(subject, task("g1"), id="a")).outcome == "stored"
    assert (await bus.publish(subject, task("g1"), id="a")).outcome == "duplicate"
    assert (await bus.publish(subject, task("g1"), id="b")).outcome == "occupied"
    assert await bus.subjects_held(names.tasks_stream("one")) == {subject}


async def test_a_full_stream_refuses_at_once_and_the_same_id_is_good_later(bus: Bus) -> None:
    await bus.ensure_stream(groups_config("full", window=1))
    await bus.publish(names.group_subject("full", "g1"), task("g1"), id="a")
    with pytest.raises(StreamFull):
        await bus.publish(names.group_subject("full", "g2"), task("g2"), id="b")
    puller = await bus.puller(names.groups_stream("full"), learner_consumer("full", "i", 1))
    [delivery] = await puller.fetch(1, 5)
    assert await delivery.ack()
    assert (await bus.publish(names.group_subject("full", "g2"), task("g2"), id="b")).outcome == "stored"


async def test_an_unacknowledged_task_comes_again_and_a_heartbeat_keeps_it(bus: Bus) -> None:
    await bus.ensure_stream(tasks_config("lease"))
    puller = await bus.puller(names.tasks_stream("lease"), actors_consumer(1.0))
    await bus.publish(names.task_subject("lease", "g"), task("g"), id="a")
    [first] = await puller.fetch(1, 5)
    assert first.attempt == 1
    for _ in range(4):
        assert await puller.fetch(1, 0.5) == []
        await first.in_progress()
    [second] = await puller.fetch(1, 5)
    assert second.attempt == 2
    assert decode(second.data, Task).group == "g"


async def test_a_deleted_consumer_is_told_from_an_empty_one(bus: Bus) -> None:
    await bus.ensure_stream(groups_config("fence", window=8))
    stream = names.groups_stream("fence")
    old = await bus.puller(stream, learner_consumer("fence", "i", 1))
    await bus.publish(names.group_subject("fence", "g"), task("g"), id="a")
    assert len(await old.fetch(1, 5)) == 1
    deleted = await bus.delete_consumers(stream, lambda name: name != names.learner_consumer("fence", "i", 2))
    assert deleted == [names.learner_consumer("fence", "i", 1)]
    new = await bus.puller(stream, learner_consumer("fence", "i", 2))
    assert len(await new.fetch(1, 5)) == 1, "what the old epoch had not acknowledged comes over at once"
    with pytest.raises(ConsumerGone):
        for _ in range(5):
            await old.fetch(1, 1)


async def test_a_malformed_message_is_dead_lettered_and_the_next_is_served(bus: Bus) -> None:
    await bus.ensure_stream(dead_config())
    served: list[str] = []

    async def handler(message: object) -> None:
        served.append(decode(message.data, Task).group)  # type: ignore[attr-defined]

    await bus.subscribe("malformed.test", handler)
    await bus.client.publish("malformed.test", b"\xff\xff")
    await bus.send("malformed.test", Control(run="r", wanted="run"))
    await bus.send("malformed.test", task("good"))
    await until(lambda: served == ["good"])
    assert bus.dead_letters == 2
    letter = await bus.jetstream.get_last_msg(names.DEAD_STREAM, names.dead_subject("test"))
    kept = decode(letter.data or b"", DeadLetter)
    assert kept.subject == "malformed.test"
    assert "expected" in kept.reason.lower() or "valid" in kept.reason


def test_a_message_of_another_schema_is_refused_by_name() -> None:
    import msgpack

    body = msgpack.unpackb(task("g").encode())
    body["schema"] = 99
    with pytest.raises(MalformedMessage, match="schema 1, got 99"):
        decode(msgpack.packb(body), Task)


async def test_compare_and_set_lets_one_writer_win(registry: Registry) -> None:
    first = await registry.set_head(head("cas"), 0)
    with pytest.raises(RegistryConflict):
        await registry.set_head(head("cas", epoch=2), 0)
    second = await registry.set_head(head("cas", epoch=2), first)
    assert second > first
    assert await registry.set_head(head("cas", epoch=2), first) == second, "a lost answer to our own write is found"
    found = await registry.head("cas")
    assert found is not None
    assert found[0].epoch == 2


async def test_a_key_that_was_deleted_can_be_created_again(registry: Registry) -> None:
    await registry.set_head(head("again"), 0)
    await registry.forget("again")
    assert await registry.head("again") is None
    assert await registry.set_head(head("again"), 0) > 0
    with pytest.raises(RegistryConflict):
        await registry.set_head(head("again", epoch=9), 0)


async def test_watches_follow_changes_and_deletions(registry: Registry) -> None:
    heads = Heads(registry)
    roster = Roster(registry)
    await asyncio.wait_for(asyncio.gather(heads.ready.wait(), roster.ready.wait()), 10)
    revision = await registry.set_head(head("watched"), 0)
    await until(lambda: "watched" in heads.heads)
    await registry.set_head(head("watched", step=5), revision)
    await until(lambda: heads.heads["watched"].step == 5)
    await registry.put_node(Node(id="n1", node="actor", fleet="f", host="h", pid=1, state="ready"))
    await until(lambda: roster.get("n1"))
    await registry.remove_node("n1")
    await until(lambda: roster.get("n1") is None)
    await registry.forget("watched")
    await until(lambda: "watched" not in heads.heads)
    await heads.close()
    await roster.close()


async def test_a_watch_told_too_early_that_it_has_everything_still_tells_what_is_there(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server's word that nothing is pending does when it overtakes the entries it has just sent."""
    for name in ("one", "two", "three"):
        await registry.set_head(head(f"early-{name}"), 0)
    real = Bucket.watch

    async def early(bucket: Bucket) -> Any:
        watcher = await real(bucket)
        await until(lambda: watcher._init_done)
        there = watcher._updates._queue  # type: ignore[attr-defined]
        assert there.pop() is None
        there.appendleft(None)
        return watcher

    monkeypatch.setattr(Bucket, "watch", early)
    heads = Heads(registry)
    await asyncio.wait_for(heads.ready.wait(), 10)
    assert heads.heads.keys() >= {"early-one", "early-two", "early-three"}
    await heads.close()


async def test_a_watch_hears_again_after_the_broker_was_killed(tmp_path: Path) -> None:
    server = Server(nats_launch(tmp_path, port=free_port(), fixed=True), tmp_path / "log")
    server.start()
    bus = await Bus.connect(server.launch.url, "test")
    registry = await Registry.open(bus)
    heads = Heads(registry)
    await asyncio.wait_for(heads.ready.wait(), 10)
    revision = await registry.set_head(head("x"), 0)
    await until(lambda: "x" in heads.heads)
    server.kill()
    again = Server(server.launch, tmp_path / "log")
    again.start()
    try:
        await registry.set_head(head("x", step=7), revision)
        await until(lambda: heads.heads["x"].step == 7, within=15)
    finally:
        await heads.close()
        await bus.close()
        again.stop()


async def test_a_watch_takes_back_what_a_lost_bucket_held(tmp_path: Path) -> None:
    server = Server(nats_launch(tmp_path / "nats"), tmp_path / "log")
    server.start()
    bus = await Bus.connect(server.launch.url, "watching")
    try:
        registry = await Registry.open(bus)
        heads = Heads(registry)
        await registry.set_head(head("lost"), 0)
        await registry.set_head(head("kept", step=1), 0)
        await until(lambda: heads.heads.keys() == {"lost", "kept"})
        server.kill()
        shutil.rmtree(tmp_path / "nats" / "jetstream")
        server.start()
        newcomer = await Bus.connect(server.launch.url, "newcomer")
        again = await Registry.open(newcomer)
        revision = 0
        for step in (2, 3, 4):  # as many writes as the watch has seen, and more: sequences alone tell nothing
            revision = await again.set_head(head("kept", step=step), revision)
        await until(lambda: heads.heads.keys() == {"kept"} and heads.heads["kept"].step == 4, within=30)
        await heads.close()
        await newcomer.close()
    finally:
        await bus.close()
        server.stop()


async def test_an_unreachable_server_is_named_within_the_time_given() -> None:
    port = free_port()
    with pytest.raises(ConnectionFailed, match=f"nats://127.0.0.1:{port} cannot be reached"):
        await Bus.connect(f"nats://user:secret@127.0.0.1:{port}", "test", timeout=1)


async def test_wrong_credentials_are_told_without_the_password(nats_server: Server) -> None:
    url = f"nats://farflung:wrong@127.0.0.1:{nats_server.launch.port}"
    with pytest.raises(ConnectionFailed, match="check the user and password") as caught:
        await Bus.connect(url, "test", timeout=3)
    assert "wrong" not in str(caught.value)


async def test_a_task_that_uses_up_its_deliveries_is_told_of(bus: Bus) -> None:
    await bus.ensure_stream(tasks_config("giveup"))
    told: list[int | None] = []

    async def note(message: object) -> None:
        told.append(advisory_sequence(message.data))  # type: ignore[attr-defined]

    await bus.subscribe(names.given_up_subject("giveup"), note)
    puller = await bus.puller(names.tasks_stream("giveup"), actors_consumer(30.0))
    receipt = await bus.publish(names.task_subject("giveup", "g"), task("g"), id="a")
    for _ in range(MAX_DELIVERIES):
        [delivery] = await puller.fetch(1, 5)
        await delivery.release()
    assert await puller.fetch(1, 0.5) == []
    await until(lambda: told == [receipt.sequence])
    kept = await bus.jetstream.get_msg(names.tasks_stream("giveup"), receipt.sequence)
    assert kept.subject == names.task_subject("giveup", "g"), "it stays in the queue until somebody closes it"


async def test_taking_gets_what_is_there_at_once_a_redelivered_message_too_and_waits_for_nothing(bus: Bus) -> None:
    await bus.ensure_stream(tasks_config("take"))
    puller = await bus.puller(names.tasks_stream("take"), actors_consumer(30.0))
    assert await puller.take() is None
    assert await puller.waiting() == 0
    for group in ("g1", "g2"):
        await bus.publish(names.task_subject("take", group), task(group), id=group)
    assert await puller.waiting() == 2
    first, second = await puller.take(), await puller.take()
    assert first is not None
    assert second is not None
    assert [first.attempt, second.attempt] == [1, 1]
    assert await puller.take() is None
    await first.release()
    again = None
    while again is None:
        again = await puller.take()
    assert (again.subject, again.attempt) == (first.subject, 2)
    await bus.delete_consumers(names.tasks_stream("take"), lambda name: True)
    with pytest.raises(ConsumerGone):
        await puller.take()
    with pytest.raises(ConsumerGone):
        await puller.waiting()


# ------------------------------------------------------------------------------------- connections that are refused


def with_configuration(server: Server, old: str, new: str) -> None:
    """Start the server again with one thing changed in its configuration."""
    server.stop()
    path = Path(server.launch.command[-1])
    path.write_text(path.read_text().replace(old, new))
    server.start()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    server = Server(nats_launch(tmp_path), tmp_path / "log")
    server.start()
    yield server
    server.stop()


async def test_credentials_that_are_refused_for_a_while_do_not_end_reconnecting(own_server: Server) -> None:
    bus = await Bus.connect(own_server.launch.url, "test")
    with_configuration(own_server, 'password: "', 'password: "not-')
    await asyncio.sleep(4.0)  # an attempt each second or so is refused
    assert not bus.client.is_connected
    with_configuration(own_server, 'password: "not-', 'password: "')
    await until(lambda: bus.client.is_connected, within=20, what="it is connected again")
    assert not bus.lost
    await bus.close()


async def test_whoever_is_connected_ends_when_the_broker_gives_the_connection_up(
    nats_server: Server, store_server: Server
) -> None:
    connection = Connection(nats=nats_server.launch.url, store=StoreAddress.parse(store_server.launch.url))

    async def component() -> None:
        async with connected(connection, "test") as (bus, _, _):
            await bus.client._process_err("'Too Many Subscriptions'")  # such a line from the server closes the client
            await asyncio.sleep(60)

    with pytest.raises(ConnectionFailed, match=r"closed the connection for good: .*Too Many Subscriptions"):
        await asyncio.create_task(component())
