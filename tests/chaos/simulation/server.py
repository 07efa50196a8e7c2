"""A NATS server in memory: subjects, work-queue streams, consumers with leases, and KV buckets.

It does what nats-server 2.15 was seen to do, as far as Farflung relies on it; `tests/integration/test_bus.py` holds
the real server to the same. Its state is changed by whole operations at one moment each; that they are late, lost or
answered into the void is the connection's business (`client.py`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol

import nats.js.errors as jetstream_errors
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

DEDUP_SECONDS = 120.0


class Timers(Protocol):
    """What the server needs of the loop."""

    def time(self) -> float: ...
    def in_world(self, delay: float, callback: Callable[..., object], *args: object) -> None: ...


@dataclass
class Stored:
    """One message of a stream."""

    sequence: int
    subject: str
    data: bytes
    headers: dict[str, str]


@dataclass
class Pull:
    """A request for messages that the consumer has not yet filled."""

    take: Callable[[Stored, int], bool]
    """Hands over a message and its delivery count; False when whoever asked is gone."""
    left: int
    until: float


@dataclass
class Lease:
    """A delivered message that is not acknowledged."""

    until: float
    holder: str = ""


class Consumer:
    """A durable pull consumer of a work queue."""

    def __init__(self, stream: Stream, config: ConsumerConfig, timers: Timers) -> None:
        self.stream = stream
        self.config = config
        self.name = str(config.durable_name)
        self._timers = timers
        self.leases: dict[int, Lease] = {}
        self.deliveries: dict[int, int] = {}
        self._again: deque[int] = deque()
        self._next = 1
        self.pulls: deque[Pull] = deque()
        self.gone = False
        self._given_up: set[int] = set()

    @property
    def num_pending(self) -> int:
        """Messages never delivered so far."""
        return sum(sequence >= self._next for sequence in self.stream.messages)

    def pull(self, pull: Pull) -> None:
        self.pulls.append(pull)
        self.pump()

    def pump(self) -> None:
        """Fill what can be filled."""
        now = self._timers.time()
        while self.pulls:
            pull = self.pulls[0]
            if pull.until <= now or pull.left <= 0:
                self.pulls.popleft()
                continue
            message = self._take_next()
            if message is None:
                return
            count = self.deliveries.get(message.sequence, 0) + 1
            self.deliveries[message.sequence] = count
            if not pull.take(message, count):
                self.pulls.popleft()
                self.deliveries[message.sequence] = count - 1
                self._again.appendleft(message.sequence)
                continue
            pull.left -= 1
            self._lease(message.sequence, float(self.config.ack_wait or 30.0))

    def _take_next(self) -> Stored | None:
        limit = self.config.max_deliver or 0
        while self._again:
            sequence = self._again.popleft()
            message = self.stream.messages.get(sequence)
            if message is None:
                continue
            if limit > 0 and self.deliveries.get(sequence, 0) >= limit:
                if sequence not in self._given_up:
                    self._given_up.add(sequence)
                    self.stream.advise(self.name, sequence)
                continue
            return message
        for sequence, message in self.stream.messages.items():
            if sequence >= self._next:
                self._next = sequence + 1
                return message
        return None

    def _lease(self, sequence: int, seconds: float) -> None:
        lease = Lease(self._timers.time() + seconds)
        self.leases[sequence] = lease
        self._timers.in_world(seconds, self._expire, sequence, lease)

    def _expire(self, sequence: int, lease: Lease) -> None:
        if self.gone or self.leases.get(sequence) is not lease:
            return
        left = lease.until - self._timers.time()
        if left > 1e-9:
            self._timers.in_world(left, self._expire, sequence, lease)
            return
        del self.leases[sequence]
        self._again.append(sequence)
        self.pump()

    def acknowledge(self, sequence: int) -> None:
        """Accepted from whoever holds, or once held, the message."""
        self.leases.pop(sequence, None)
        if sequence < self._next:
            self.stream.remove(sequence)

    def extend(self, sequence: int) -> None:
        if sequence in self.leases:
            self.leases[sequence].until = self._timers.time() + float(self.config.ack_wait or 30.0)

    def release(self, sequence: int, delay: float) -> None:
        if self.leases.pop(sequence, None) is not None:
            self._timers.in_world(delay, self._return, sequence)

    def _return(self, sequence: int) -> None:
        if not self.gone and sequence not in self.leases:
            self._again.append(sequence)
            self.pump()


class Stream:
    """A stream with one message per subject and `discard new`."""

    def __init__(self, server: Server, config: StreamConfig) -> None:
        self._server = server
        self.config = config
        self.messages: dict[int, Stored] = {}
        self.by_subject: dict[str, int] = {}
        self.last_sequence = 0
        self.ids: dict[str, tuple[float, int]] = {}
        self.consumers: dict[str, Consumer] = {}

    @property
    def name(self) -> str:
        return str(self.config.name)

    def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> SimpleNamespace:
        now = self._server.timers.time()
        id = headers.get("Nats-Msg-Id", "")
        seen = self.ids.get(id)
        if id and seen is not None and now - seen[0] < DEDUP_SECONDS:
            return SimpleNamespace(seq=seen[1], duplicate=True)
        limit = self.config.max_msgs
        if self.config.max_msgs_per_subject == 1 and subject in self.by_subject:
            raise _refused(503, 10077, "maximum messages per subject exceeded")
        if limit and limit > 0 and len(self.messages) >= limit:
            raise _refused(503, 10077, "maximum messages exceeded")
        self.last_sequence += 1
        self.messages[self.last_sequence] = Stored(self.last_sequence, subject, data, headers)
        self.by_subject[subject] = self.last_sequence
        if id:
            self.ids[id] = (now, self.last_sequence)
        for consumer in list(self.consumers.values()):
            consumer.pump()
        return SimpleNamespace(seq=self.last_sequence, duplicate=None)

    def remove(self, sequence: int) -> None:
        message = self.messages.pop(sequence, None)
        if message is not None:
            self.by_subject.pop(message.subject, None)
            self._server.on_removed(self, message)

    def add_consumer(self, config: ConsumerConfig) -> None:
        name = str(config.durable_name)
        if name in self.consumers:
            return
        if self.consumers and self.config.retention == RetentionPolicy.WORK_QUEUE:
            raise jetstream_errors.BadRequestError(
                code=400, err_code=10099, description="multiple non-filtered consumers not allowed on workqueue stream"
            )
        self.consumers[name] = Consumer(self, config, self._server.timers)

    def delete_consumer(self, name: str) -> None:
        consumer = self.consumers.pop(name, None)
        if consumer is None:
            raise _absent(10014, "consumer not found")
        consumer.gone = True
        for pull in consumer.pulls:
            pull.until = 0.0

    def advise(self, consumer: str, sequence: int) -> None:
        """Say that a message will be delivered no more."""
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{self.name}.{consumer}"
        self._server.publish(subject, json.dumps({"stream_seq": sequence}).encode(), "", {})


@dataclass
class Bucket:
    """A KV bucket: the newest value of each key, None for a deleted one."""

    ttl: float
    created: float = 0.0
    entries: dict[str, tuple[bytes | None, int, float]] = field(default_factory=dict)
    last_sequence: int = 0
    watchers: list[Callable[[str, bytes | None, int], None]] = field(default_factory=list)

    def at(self, key: str, now: float) -> tuple[bytes | None, int] | None:
        entry = self.entries.get(key)
        if entry is None or (self.ttl and now - entry[2] > self.ttl):
            return None
        return entry[0], entry[1]

    def write(self, key: str, value: bytes | None, now: float) -> int:
        self.last_sequence += 1
        self.entries[key] = (value, self.last_sequence, now)
        for tell in list(self.watchers):
            tell(key, value, self.last_sequence)
        return self.last_sequence


Deliver = Callable[[str, str, bytes, dict[str, str]], None]
"""(subject, reply, data, headers)"""


@dataclass
class Subscription:
    pattern: str
    queue: str
    deliver: Deliver
    owner: object

    def matches(self, subject: str) -> bool:
        if self.pattern.endswith(".*"):
            return subject.rpartition(".")[0] == self.pattern[:-2]
        return subject == self.pattern


class Server:
    """All of it."""

    def __init__(self, timers: Timers, choose: Callable[[int], int]) -> None:
        self.timers = timers
        self._choose = choose
        self.streams: dict[str, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.subscriptions: list[Subscription] = []
        self.on_removed: Callable[[Stream, Stored], None] = lambda stream, message: None
        self.on_published: Callable[[str, bytes], None] = lambda subject, data: None
        self.on_written: Callable[[str, str, bytes | None, int], None] = lambda bucket, key, value, revision: None

    # --------------------------------------------------------------------------------------------------- subjects

    def publish(self, subject: str, data: bytes, reply: str, headers: dict[str, str]) -> None:
        """Hand a message to whoever listens; one of each queue group. Nobody: the asker is told so."""
        self.on_published(subject, data)
        found = [one for one in self.subscriptions if one.matches(subject)]
        queues: dict[str, list[Subscription]] = {}
        for one in found:
            if one.queue:
                queues.setdefault(one.queue, []).append(one)
            else:
                one.deliver(subject, reply, data, headers)
        for members in queues.values():
            members[self._choose(len(members))].deliver(subject, reply, data, headers)
        if not found and reply:
            for one in list(self.subscriptions):
                if one.matches(reply):
                    one.deliver(reply, "", b"", {"Status": "503"})

    # ----------------------------------------------------------------------------------------------------- streams

    def stream(self, name: str) -> Stream:
        found = self.streams.get(name)
        if found is None:
            raise _absent(10059, "stream not found")
        return found

    def consumer(self, stream: str, name: str) -> Consumer:
        found = self.stream(stream).consumers.get(name)
        if found is None:
            raise _absent(10014, "consumer not found")
        return found

    def stream_of(self, subject: str) -> Stream | None:
        root = subject.rpartition(".")[0]
        for stream in self.streams.values():
            for pattern in stream.config.subjects or []:
                if pattern[:-2] == root or (pattern.endswith(".>") and subject.startswith(pattern[:-1])):
                    return stream
        return None

    def add_stream(self, config: StreamConfig) -> None:
        there = self.streams.get(str(config.name))
        if there is None:
            self.streams[str(config.name)] = Stream(self, config)
        else:
            there.config = config

    def delete_stream(self, name: str) -> None:
        stream = self.stream(name)
        for consumer in list(stream.consumers):
            stream.delete_consumer(consumer)
        del self.streams[name]

    def forget_ids(self) -> None:
        """A restart: the ids of messages that are gone are not remembered."""
        for stream in self.streams.values():
            held = {message.headers.get("Nats-Msg-Id", "") for message in stream.messages.values()}
            stream.ids = {id: seen for id, seen in stream.ids.items() if id in held}

    def wipe(self) -> None:
        """All that was stored is gone. The buckets are made anew at once, as the next component to start would."""
        for stream in self.streams.values():
            for name in list(stream.consumers):
                stream.delete_consumer(name)
        self.streams.clear()
        for name, bucket in self.buckets.items():
            self.buckets[name] = Bucket(bucket.ttl, self.timers.time())

    # ------------------------------------------------------------------------------------------------------ buckets

    def put(self, bucket: str, key: str, value: bytes | None) -> int:
        revision = self.buckets[bucket].write(key, value, self.timers.time())
        self.on_written(bucket, key, value, revision)
        return revision

    def update(self, bucket: str, key: str, value: bytes | None, last: int) -> int:
        there = self.buckets[bucket].entries.get(key)
        if (there[1] if there else 0) != last:
            raise jetstream_errors.KeyWrongLastSequenceError(description=f"wrong last sequence: {key}")
        return self.put(bucket, key, value)

    def create(self, bucket: str, key: str, value: bytes) -> int:
        there = self.buckets[bucket].at(key, self.timers.time())
        if there is not None and there[0] is not None:
            raise jetstream_errors.KeyWrongLastSequenceError(description=f"wrong last sequence: {key}")
        return self.put(bucket, key, value)


def _refused(code: int, number: int, description: str) -> jetstream_errors.APIError:
    return jetstream_errors.ServiceUnavailableError(code=code, err_code=number, description=description)


def _absent(number: int, description: str) -> jetstream_errors.NotFoundError:
    return jetstream_errors.NotFoundError(code=404, err_code=number, description=description)
