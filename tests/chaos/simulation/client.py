"""What nats-py offers, as far as Farflung uses it, between a simulated process and the simulated server.

A connection keeps its order both ways, as TCP does. A request takes time to arrive, takes effect at one moment, and
its answer takes time to come back; either may be lost, and then the caller times out without knowing whether it took
effect. A killed process's requests that are under way still arrive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from operator import itemgetter
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import ConsumerConfig, KeyValueConfig, StreamConfig

from tests.chaos.simulation.loop import Process, VirtualLoop
from tests.chaos.simulation.server import Bucket, Pull, Server, Stored, Subscription
from tests.subjects import matches

T = TypeVar("T")

EARLY_MARK = 0.05
"""The chance that a watch is told that it has all there is before it has any of it."""


class Network(Protocol):
    """What decides how long messages take and which are lost."""

    @property
    def down(self) -> bool: ...
    def latency(self) -> float: ...
    def loses(self) -> bool: ...
    def before_effect(self, process: Process) -> None: ...


class Connection:
    """One process's connection."""

    def __init__(self, loop: VirtualLoop, server: Server, network: Network, process: Process, random: Random) -> None:
        self._loop = loop
        self.server = server
        self._network = network
        self.process = process
        self.random = random
        self._sent = 0.0
        self._received = 0.0
        self.closed = False
        self.epoch = 0
        """Counts reconnections: what was under way when the connection broke never arrives."""
        self.pulls: list[PullSubscription] = []
        process.on_death.append(self.close_now)

    # ---------------------------------------------------------------------------------------------------- transport

    def send(self, effect: Callable[[], object]) -> None:
        """Let `effect` happen at the server, some time from now, if it gets there; of a process that was stopped in the
        midst of what it did, once it goes on.
        """
        if self.process.paused:
            self._loop.when_it_goes_on(self.process, self.send, effect)
            return
        if self.closed or self._network.down or self._network.loses():
            return
        self._sent = max(self._sent + 1e-6, self._loop.time() + self._network.latency())
        self._loop.in_world(self._sent - self._loop.time(), self._arrive, effect, self.epoch)

    def _arrive(self, effect: Callable[[], object], epoch: int) -> None:
        if epoch == self.epoch and not self._network.down:
            effect()

    def settle(self, effect: Callable[[], object]) -> None:
        """Let `effect` happen for certain: what a client repeats by itself whenever it reconnects."""
        if self.closed:
            return
        if self._network.down:
            self._loop.in_world(1.0, self.settle, effect)
            return
        self._loop.in_world(self._network.latency(), effect)

    def hand(self, callback: Callable[..., object], *args: object) -> None:
        """Let the process have something from the server, some time from now, if it gets there."""
        if self.closed or self._network.down:
            return
        self._received = max(self._received + 1e-6, self._loop.time() + self._network.latency())
        self._loop.call_at(self._received, self._take, callback, args, self.epoch, context=self.process.context)

    def _take(self, callback: Callable[..., object], args: tuple[object, ...], epoch: int) -> None:
        if epoch == self.epoch:
            callback(*args)

    async def ask(self, operation: Callable[[], T], timeout: float = 5.0) -> T:
        """Run `operation` at the server and return its result or raise its error. Raises nats' TimeoutError."""
        if self.process.paused:
            gone_on: asyncio.Future[None] = self._loop.create_future()
            self._loop.when_it_goes_on(self.process, lambda: gone_on.done() or gone_on.set_result(None))
            await gone_on
        if self.closed:
            raise nats.errors.ConnectionClosedError
        future: asyncio.Future[T] = self._loop.create_future()
        self._network.before_effect(self.process)
        self.process.calls += 1
        asked = self._loop.time()

        def happen() -> None:
            try:
                answer, value = future.set_result, operation()
            except nats.errors.Error as error:
                answer, value = future.set_exception, error  # type: ignore[assignment]
            if not self._network.loses():
                self.hand(lambda: future.done() or answer(value))

        self.send(happen)
        timer = self._loop.call_at(asked + timeout, _time_out, future, context=self.process.context)
        try:
            return await future
        finally:
            timer.cancel()

    def close_now(self) -> None:
        """The server sees the connection end."""
        self.closed = True
        self.server.subscriptions = [one for one in self.server.subscriptions if one.owner is not self]
        for pull in self.pulls:
            pull.drop()

    def break_off(self) -> None:
        """The connection breaks and comes back by itself: what was under way is lost, subscriptions are kept."""
        self.epoch += 1
        for pull in self.pulls:
            pull.drop()


class Client:
    """nats.aio.client.Client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inboxes = 0
        self.is_connecting = False
        self.is_connected = True
        self._transport = None

    def jetstream(self, timeout: float = 5.0) -> JetStream:
        return JetStream(self._connection, timeout)

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.{self._connection.process.name}-{self._inboxes}"

    async def publish(self, subject: str, data: bytes = b"", reply: str = "", headers: Any = None) -> None:
        if self._connection.closed:
            raise nats.errors.ConnectionClosedError
        plain = dict(headers or {})
        server = self._connection.server
        self._connection.send(lambda: server.publish(subject, data, reply, plain))

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Any], Awaitable[None]] | None = None
    ) -> SimpleNamespace:
        """Messages are handled one after the other, as the real client does."""
        connection, server = self._connection, self._connection.server
        inbox: asyncio.Queue[Any] = asyncio.Queue()

        async def handle() -> None:
            while True:
                message = await inbox.get()
                if cb is not None:
                    await cb(message)

        def deliver(at: str, reply: str, data: bytes, headers: dict[str, str]) -> None:
            if not connection._network.loses():
                message = SimpleNamespace(subject=at, reply=reply, data=data, headers=headers)
                connection.hand(inbox.put_nowait, message)

        one = Subscription(subject, queue, deliver, connection)
        task = asyncio.get_running_loop().create_task(handle())
        connection.settle(lambda: connection.closed or server.subscriptions.append(one))

        async def unsubscribe() -> None:
            task.cancel()
            connection.settle(lambda: one in server.subscriptions and server.subscriptions.remove(one))

        return SimpleNamespace(unsubscribe=unsubscribe)

    async def flush(self, timeout: float = 2.0) -> None:
        return

    async def close(self) -> None:
        self._connection.close_now()


class DeliveredMessage:
    """nats.aio.msg.Msg of a pull consumer."""

    def __init__(self, connection: Connection, consumer: Any, stored: Stored, count: int) -> None:
        self._connection = connection
        self._consumer = consumer
        self.subject = stored.subject
        self.data = stored.data
        self.headers = stored.headers
        self.metadata = SimpleNamespace(num_delivered=count, sequence=SimpleNamespace(stream=stored.sequence))
        self.is_acked = False

    async def ack_sync(self, timeout: float = 5.0) -> None:
        sequence = self.metadata.sequence.stream

        def acknowledge() -> None:
            if self._consumer.gone:
                raise nats.errors.NoRespondersError
            self._consumer.acknowledge(sequence)

        await self._connection.ask(acknowledge, timeout)
        self.is_acked = True

    async def in_progress(self) -> None:
        self._connection.send(lambda: self._consumer.gone or self._consumer.extend(self.metadata.sequence.stream))

    async def nak(self, delay: float | None = None) -> None:
        self._connection.send(
            lambda: self._consumer.gone or self._consumer.release(self.metadata.sequence.stream, delay or 0.0)
        )


class PullSubscription:
    """What `pull_subscribe_bind` returns. Messages that come after a fetch gave up wait for the next."""

    def __init__(self, connection: Connection, stream: str, consumer: str) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._queue: deque[DeliveredMessage] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._open = 0
        connection.pulls.append(self)

    async def fetch(self, batch: int = 1, timeout: float = 5.0, heartbeat: float | None = None) -> list[Any]:
        if self._connection.closed:
            raise nats.errors.ConnectionClosedError
        loop = self._connection._loop
        if not self._queue:
            pull_epoch = self._open
            until = loop.time() + timeout

            def take(stored: Stored, count: int) -> bool:
                if self._connection.closed or pull_epoch != self._open:
                    return False
                consumer = self._connection.server.streams[self._stream].consumers[self._consumer]
                message = DeliveredMessage(self._connection, consumer, stored, count)
                if not self._connection._network.loses():
                    self._connection.hand(self._arrived, message)
                return True

            def ask() -> None:
                try:
                    consumer = self._connection.server.consumer(self._stream, self._consumer)
                except nats.js.errors.NotFoundError:
                    return  # a pull from a consumer that is gone is answered by silence
                consumer.pull(Pull(take, batch, until))

            self._connection.send(ask)
            waiting = self._waiting = loop.create_future()
            timer = loop.call_later(timeout, _give_up, waiting)
            try:
                await waiting
            finally:
                timer.cancel()
                self._waiting = None
        if not self._queue:
            raise nats.errors.TimeoutError
        found = list(self._queue)[:batch]
        for _ in found:
            self._queue.popleft()
        return found

    def _arrived(self, message: DeliveredMessage) -> None:
        self._queue.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def drop(self) -> None:
        """The server forgets what this connection asked for."""
        self._open += 1

    async def unsubscribe(self) -> None:
        self.drop()


class JetStream:
    """nats.js.JetStreamContext."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._server = connection.server

    async def _ask(self, operation: Callable[[], T]) -> T:
        return await self._connection.ask(operation, self._timeout)

    async def publish(self, subject: str, data: bytes, headers: Any = None, timeout: float | None = None) -> Any:
        plain = dict(headers or {})

        def store() -> Any:
            stream = self._server.stream_of(subject)
            if stream is None:
                raise nats.js.errors.NoStreamResponseError
            return stream.publish(subject, data, plain)

        return await self._connection.ask(store, self._timeout)

    async def add_stream(self, config: StreamConfig) -> None:
        await self._ask(lambda: self._server.add_stream(config))

    async def update_stream(self, config: StreamConfig) -> None:
        await self._ask(lambda: self._server.add_stream(config))

    async def delete_stream(self, name: str) -> None:
        await self._ask(lambda: self._server.delete_stream(name))

    async def stream_info(self, name: str, subjects_filter: str) -> Any:
        def look() -> Any:
            if name.startswith("KV_"):
                bucket = name.removeprefix("KV_")
                there = [f"$KV.{bucket}.{key}" for key in self._server.buckets[bucket].entries]
            else:
                there = list(self._server.stream(name).by_subject)
            held = {subject: 1 for subject in there if matches(subjects_filter, subject)}
            return SimpleNamespace(state=SimpleNamespace(subjects=held))

        return await self._ask(look)

    async def add_consumer(self, stream: str, config: ConsumerConfig) -> None:
        await self._ask(lambda: self._server.stream(stream).add_consumer(config))

    async def consumer_info(self, stream: str, consumer: str) -> Any:
        def look() -> Any:
            found = self._server.consumer(stream, consumer)
            return SimpleNamespace(name=found.name, num_pending=found.num_pending)

        return await self._ask(look)

    async def consumers_info(self, stream: str) -> list[Any]:
        def look() -> list[Any]:
            return [SimpleNamespace(name=name) for name in self._server.stream(stream).consumers]

        return await self._ask(look)

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        await self._ask(lambda: self._server.stream(stream).delete_consumer(consumer))

    async def pull_subscribe_bind(self, consumer: str, stream: str) -> PullSubscription:
        await self._ask(lambda: self._server.consumer(stream, consumer))
        return PullSubscription(self._connection, stream, consumer)

    async def get_last_msg(self, stream: str, subject: str) -> Any:
        def look() -> Any:
            found = self._server.stream(stream)
            if subject not in found.by_subject:
                raise nats.js.errors.NotFoundError(code=404, err_code=10037, description="no message found")
            return found.messages[found.by_subject[subject]]

        return await self._ask(look)

    async def get_msg(self, stream: str, sequence: int) -> Any:
        def look() -> Any:
            found = self._server.stream(stream).messages.get(sequence)
            if found is None:
                raise nats.js.errors.NotFoundError(code=404, err_code=10037, description="no message found")
            return found

        return await self._ask(look)

    async def purge_stream(self, stream: str, subject: str) -> None:
        def purge() -> None:
            found = self._server.stream(stream)
            if subject in found.by_subject:
                found.remove(found.by_subject[subject])

        await self._ask(purge)

    async def create_key_value(self, config: KeyValueConfig) -> KeyValue:
        name = str(config.bucket)

        def create() -> None:
            self._server.buckets.setdefault(name, Bucket(float(config.ttl or 0.0)))

        await self._ask(create)
        return KeyValue(self._connection, name, self._timeout)


class KeyValue:
    """nats.js.kv.KeyValue."""

    def __init__(self, connection: Connection, bucket: str, timeout: float) -> None:
        self._connection = connection
        self._bucket = bucket
        self._timeout = timeout

    async def _ask(self, operation: Callable[[], T]) -> T:
        return await self._connection.ask(operation, self._timeout)

    def _there(self) -> Bucket:
        return self._connection.server.buckets[self._bucket]

    def _now(self) -> float:
        return self._connection.server.timers.time()

    async def get(self, key: str) -> Any:
        def look() -> Any:
            found = self._there().at(key, self._now())
            if found is None or found[0] is None:
                raise nats.js.errors.KeyNotFoundError
            return SimpleNamespace(key=key, value=found[0], revision=found[1])

        return await self._ask(look)

    async def put(self, key: str, value: bytes) -> int:
        return await self._ask(lambda: self._connection.server.put(self._bucket, key, value))

    async def update(self, key: str, value: bytes, last: int) -> int:
        return await self._ask(lambda: self._connection.server.update(self._bucket, key, value, last))

    async def create(self, key: str, value: bytes) -> int:
        return await self._ask(lambda: self._connection.server.create(self._bucket, key, value))

    async def delete(self, key: str, last: int | None = None) -> None:
        server = self._connection.server
        if last is None:
            await self._ask(lambda: server.put(self._bucket, key, None))
        else:
            await self._ask(lambda: server.update(self._bucket, key, None, last))

    async def status(self) -> Any:
        def look() -> Any:
            bucket = self._there()
            there = sum(bucket.at(key, self._now()) is not None for key in bucket.entries)
            state = SimpleNamespace(last_seq=bucket.last_sequence, messages=there)
            return SimpleNamespace(stream_info=SimpleNamespace(created=bucket.created, state=state))

        return await self._ask(look)

    async def watchall(self) -> Watcher:
        watcher = Watcher(self._connection)

        def begin() -> None:
            bucket, now = self._there(), self._now()
            there = [(key, *entry) for key in bucket.entries if (entry := bucket.at(key, now)) is not None]
            early = self._connection.random.random() < EARLY_MARK
            if early:
                watcher.put(None)
            for number, (key, value, revision) in enumerate(sorted(there, key=itemgetter(2)), 1):
                watcher.tell(key, value, revision, len(there) - number)
            if not early:
                watcher.put(None)
            bucket.watchers.append(watcher.tell)

            def leave() -> None:
                if watcher.tell in bucket.watchers:
                    bucket.watchers.remove(watcher.tell)

            watcher.leave = leave
            self._connection.process.on_death.append(watcher.leave)

        await self._ask(begin)
        return watcher


class _Entries(deque[Any]):
    """What has arrived; asked whether it is empty as an asyncio.Queue is."""

    def empty(self) -> bool:
        return not self


def _time_out(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(nats.errors.TimeoutError())


def _give_up(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Watcher:
    """nats.js.kv.KeyValue.KeyWatcher. Deaf from a restart of the server on, until whoever owns it begins anew."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._updates = _Entries()
        self._epoch = connection.epoch
        self._waiting: asyncio.Future[None] | None = None
        self.leave: Callable[[], object] = lambda: None

    def tell(self, key: str, value: bytes | None, revision: int, delta: int = 0) -> None:
        """`delta`: how many entries are still to come of those that were there when it began."""
        if self._connection.epoch == self._epoch:
            operation = "DEL" if value is None else None
            self.put(SimpleNamespace(key=key, value=value, revision=revision, delta=delta, operation=operation))

    def put(self, entry: Any) -> None:
        self._connection.hand(self._arrived, entry)

    def _arrived(self, entry: Any) -> None:
        self._updates.append(entry)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def updates(self, timeout: float = 5.0) -> Any:
        if not self._updates:
            loop = self._connection._loop
            waiting = self._waiting = loop.create_future()
            timer = loop.call_later(timeout, _give_up, waiting)
            try:
                await waiting
            finally:
                timer.cancel()
        if not self._updates:
            raise nats.errors.TimeoutError
        return self._updates.popleft()

    async def stop(self) -> None:
        self.leave()
