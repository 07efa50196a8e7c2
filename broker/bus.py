"""The bus: one NATS connection, set up so that it survives what happens to connections.

What experience with NATS taught it: reconnect for ever, but bound the first connect; keep 64 MB pending while
disconnected; give the socket a user timeout, again after every reconnect, or a half-open link hangs for minutes; retry
a publish with the same message id, because a rejected id is not remembered and a stored one answers "duplicate".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from broker import names
from broker.clock import now
from broker.errors import ConnectionFailed, FarflungError, MalformedMessage, StoreError
from broker.messages import DeadLetter, Message

log = logging.getLogger(__name__)

T = TypeVar("T")

Stored = Literal["stored", "duplicate", "occupied"]
"""stored: new. duplicate: this id was stored before. occupied: the subject holds another message already."""

FETCH_SECONDS = 5.0
"""A fetch across a server restart hangs its full timeout, so no fetch waits longer than this."""

CONSUMER_CHECK_SECONDS = 2.0
"""How often an empty-handed pull makes sure that its consumer still exists."""

USER_TIMEOUT_MS = 3000
"""Unacknowledged data on a socket fails it after this long; a half-open link then recovers in about 3 s."""

NOTHING_THERE = ("404", "408")
"""What the server says to a pull that finds no message, and to an older one whose time is up."""

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_FULL = 10077
NO_ROOM = (10023, 10047)
"""The server's disk or memory for streams is used up."""


class Receipt(NamedTuple):
    """What the broker said to a publish; `sequence` is the message's place in the stream, 0 if it was not stored."""

    outcome: Stored
    sequence: int


class StreamFull(FarflungError):
    """The stream has no room. Publishing again later, with the same id, is safe."""


class ConsumerGone(FarflungError):
    """The consumer or its stream is gone: another learner took over, the run was deleted, or the broker lost it."""


class Delivery:
    """One message from a work queue, held under a lease until it is acknowledged."""

    def __init__(self, message: Msg) -> None:
        self._message = message
        self.subject: str = message.subject
        self.data: bytes = message.data
        self.headers: Mapping[str, str] = message.headers or {}

    @property
    def attempt(self) -> int:
        """1 at the first delivery."""
        return int(self._message.metadata.num_delivered or 1)

    @property
    def sequence(self) -> int:
        """Its place in the stream: no two messages of a stream share one."""
        return int(self._message.metadata.sequence.stream)

    async def ack(self, timeout: float = 5.0) -> bool:
        """Acknowledge and wait for the broker to agree; tells whether it did."""
        if self._message.is_acked:
            return True
        for _ in range(3):
            try:
                await self._message.ack_sync(timeout=timeout)
                return True
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.2)
        return False

    async def in_progress(self) -> None:
        """Extend the lease by another ack_wait."""
        with contextlib.suppress(nats.errors.Error):
            await self._message.in_progress()

    async def release(self, delay: float = 0.0) -> None:
        """Give the message back, to be delivered again after `delay` seconds."""
        with contextlib.suppress(nats.errors.Error):
            await self._message.nak(delay=delay or None)


class Puller:
    """Fetches from one durable consumer."""

    def __init__(self, jetstream: JetStreamContext, subscription: object, stream: str, consumer: str) -> None:
        self._jetstream = jetstream
        self._subscription = subscription
        self.stream = stream
        self.consumer = consumer
        self._checked = 0.0

    async def fetch(self, batch: int, timeout: float) -> list[Delivery]:
        """Up to `batch` messages; an empty list when none came within `timeout` seconds. Raises ConsumerGone.

        A pull from a consumer that was deleted meanwhile is answered by silence, so silence is looked into.
        """
        try:
            messages = await self._subscription.fetch(batch, timeout=min(timeout, FETCH_SECONDS))  # type: ignore[attr-defined]
        except (TimeoutError, nats.errors.TimeoutError):
            await self._check()
            return []
        except nats.js.errors.APIError as error:
            if "consumer deleted" in str(error).lower():
                raise ConsumerGone(f"consumer {self.consumer} of {self.stream} was deleted") from error
            log.warning("fetch from %s failed, trying again: %s", self.stream, error)
            await asyncio.sleep(0.5)
            await self._check()
            return []
        except (nats.errors.Error, OSError) as error:
            log.info("fetch from %s failed, trying again: %s", self.stream, error)
            await asyncio.sleep(0.5)
            return []
        return [Delivery(message) for message in messages]

    async def take(self) -> Delivery | None:
        """A message that may be had at once, a redelivered one too; None when there is none. Raises ConsumerGone."""
        pull = self._subscription
        queue = pull._sub._pending_queue  # type: ignore[attr-defined]
        if queue.empty():
            # `fetch` lingers for its whole timeout; the server answers a request without one at once.
            request = json.dumps({"batch": 1, "no_wait": True}).encode()
            try:
                await pull._nc.publish(pull._nms, request, pull._deliver)  # type: ignore[attr-defined]
                message = await pull._sub.next_msg(timeout=FETCH_SECONDS)  # type: ignore[attr-defined]
            except (TimeoutError, nats.errors.Error, OSError) as error:
                log.info("pull from %s failed: %s", self.stream, error or type(error).__name__)
                await self._check()
                return None
        else:  # it came for a fetch that had given up
            message = await pull._sub.next_msg(timeout=FETCH_SECONDS)  # type: ignore[attr-defined]
        if not message.headers or "Status" not in message.headers:
            return Delivery(message)
        if message.headers["Status"] not in NOTHING_THERE:
            await self._check()
        return None

    async def waiting(self) -> int:
        """How many messages wait to be had; 0 when the broker does not say. Raises ConsumerGone."""
        try:
            info = await self._jetstream.consumer_info(self.stream, self.consumer)
        except nats.js.errors.NotFoundError as error:
            raise ConsumerGone(f"consumer {self.consumer} of {self.stream} is gone: {error.description}") from error
        except (nats.errors.Error, TimeoutError, OSError):
            return 0
        return int(info.num_pending or 0) + int(info.num_redelivered or 0)

    async def _check(self) -> None:
        if now() - self._checked < CONSUMER_CHECK_SECONDS:
            return
        self._checked = now()
        try:
            await self._jetstream.consumer_info(self.stream, self.consumer)
        except nats.js.errors.NotFoundError as error:
            raise ConsumerGone(f"consumer {self.consumer} of {self.stream} is gone: {error.description}") from error
        except (nats.errors.Error, TimeoutError, OSError):
            return

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error, ValueError):
            await self._subscription.unsubscribe()  # type: ignore[attr-defined]


Handler = Callable[[Msg], Awaitable[None]]


class Bus:
    """A connection to NATS, and what Farflung does with it."""

    def __init__(self, client: Client, url: str, component: str) -> None:
        self.client = client
        self.url = url
        self.component = component
        self.jetstream = client.jetstream(timeout=5.0)
        self.refused_seconds = 0.0
        """Time spent in publishes that the stream refused because it was full: backpressure."""
        self.dead_letters = 0
        self.errors: deque[str] = deque(maxlen=100)
        """The newest complaints of the client."""
        self.lost = ""
        """Why the connection was given up for good, though nobody closed it; empty while it was not."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called then."""
        self._closing = False

    @classmethod
    async def connect(cls, url: str, component: str, *, timeout: float = 15.0) -> Bus:
        """Connect to `url` (nats://, tls://, ws:// or wss://, user:password@ inside).

        Raises ConnectionFailed, naming the URL without its password, when the server cannot be reached or refuses
        the credentials within `timeout` seconds.
        """
        shown = without_password(url)
        await _reach(url, timeout)
        client = Client()
        problem, began = "", False
        bus = cls(client, shown, component)

        async def on_error(error: Exception) -> None:
            nonlocal problem
            problem = str(error) or type(error).__name__
            if not began and client.is_connecting and "uthorization" in problem:
                raise PermissionError(problem)  # leaves connect(): the same credentials are refused every time
            if bus.client.is_connected:
                bus.errors.append(problem)
                log.warning("nats: %s", problem)

        async def on_closed() -> None:
            if began and not bus._closing:
                bus.lost = str(client.last_error or problem or "no reason given")
                log.error("%s closed the connection for good: %s", shown, bus.lost)
                bus.on_lost()

        async def on_reconnect() -> None:
            _set_user_timeout(client)
            log.warning("reconnected to %s", shown)

        async def on_disconnect() -> None:
            if not bus._closing:
                log.warning("disconnected from %s, reconnecting", shown)

        try:
            async with asyncio.timeout(timeout):
                await client.connect(
                    url,
                    name=component,
                    connect_timeout=5,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1.0 + random.random() / 2,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    pending_size=64 * 1024 * 1024,
                    error_cb=on_error,
                    reconnected_cb=on_reconnect,
                    disconnected_cb=on_disconnect,
                    closed_cb=on_closed,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            bus._closing = True
            with contextlib.suppress(Exception):
                await client.close()
            reason = problem or str(error) or "no answer"
            # A server that refuses the credentials hangs up at once, at times before its reason has been read.
            refused = "uthorization" in reason or "reset by peer" in reason
            hint = "check the user and password" if refused else "check the URL and the server"
            raise ConnectionFailed(f"NATS at {shown} refused the connection: {reason}; {hint}") from error
        began = True
        _set_user_timeout(client)
        return bus

    async def close(self) -> None:
        """Flush and close. `drain` is not used: it hangs with pull subscriptions."""
        self._closing = True
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            await self.client.flush(timeout=2)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.close()

    # ------------------------------------------------------------------------------------------- core messages

    async def send(
        self, subject: str, message: Message, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without storage; lost if nobody listens."""
        await self.client.publish(subject, message.encode(), reply=reply, headers=dict(headers) if headers else None)

    async def request(
        self, subject: str, message: Message, *, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Msg | None:
        """Ask and wait for one answer. None when nobody listens there, or no answer came within `timeout` seconds."""
        try:
            return await self.client.request(
                subject, message.encode(), timeout=timeout, headers=dict(headers) if headers else None
            )
        except (
            TimeoutError,
            nats.errors.TimeoutError,
            nats.errors.NoRespondersError,
            nats.errors.ConnectionClosedError,
        ):
            return None

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> object:
        """Call `handler` for each message, one after the other; a handler that raises is logged, not fatal."""

        async def guarded(message: Msg) -> None:
            try:
                await handler(message)
            except MalformedMessage as error:
                await self.dead_letter(message.subject, message.data, str(error))
            except FarflungError as error:
                log.warning("message on %s could not be handled: %s", message.subject, error)

        return await self.client.subscribe(subject, queue=queue, cb=guarded)

    # ------------------------------------------------------------------------------------------------- streams

    async def publish(
        self,
        subject: str,
        message: Message,
        *,
        id: str,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Receipt:
        """Store one message and wait for the broker's word.

        Retried with the same `id` until `timeout` seconds have passed, so that a lost answer stores nothing twice.
        Raises StreamFull when the stream has no room (at once: the caller decides whether to wait), StoreError when
        the broker's disk is full, ConnectionFailed when it did not answer in time.
        """
        data = message.encode()
        deadline = now() + timeout
        problem = "no answer"
        while True:
            try:
                answer = await self.jetstream.publish(subject, data, headers={**(headers or {}), "Nats-Msg-Id": id})
            except nats.js.errors.APIError as error:
                if error.err_code in WRONG_LAST_SEQUENCE:
                    raise
                if error.err_code == STREAM_FULL:
                    if "per subject" in str(error.description):
                        return Receipt("occupied", 0)
                    raise StreamFull(f"{subject}: {error.description}") from error
                if error.err_code in NO_ROOM or "no space" in str(error.description).lower():
                    raise StoreError(f"NATS cannot store {subject}: {error.description}; free its disk") from error
                problem = str(error)
            except (nats.js.errors.NoStreamResponseError, nats.errors.Error, TimeoutError, OSError) as error:
                problem = str(error) or type(error).__name__
            else:
                return Receipt("duplicate" if answer.duplicate else "stored", int(answer.seq))
            if now() > deadline:
                hint = "it is there, but does its disk have room?" if self.client.is_connected else "is it running?"
                raise ConnectionFailed(
                    f"NATS at {self.url} did not store {subject} in {timeout:.0f} s: {problem}; {hint}"
                )
            await asyncio.sleep(0.1 + random.random() * 0.4)

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Create the stream, or update it to this configuration."""
        try:
            try:
                await self.jetstream.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != 10058:  # "stream name already in use with a different configuration"
                    raise ConnectionFailed(f"NATS refused the stream {config.name}: {error.description}") from error
                await self.jetstream.update_stream(config)
        except nats.js.errors.APIError as error:
            raise ConnectionFailed(
                f"NATS at {self.url} cannot hold the stream {config.name}: {error.description}. "
                "Expected a server with JetStream and file storage"
            ) from error
        except (TimeoutError, nats.errors.Error) as error:
            raise ConnectionFailed(f"NATS at {self.url} has no JetStream or does not answer: {error}") from error

    async def delete_stream(self, name: str) -> None:
        """Delete a stream, if it is there. Raises ConnectionFailed."""
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self.answered(f"to delete {name}", lambda: self.jetstream.delete_stream(name))

    async def subjects_held(self, stream: str, pattern: str = ">") -> set[str]:
        """The subjects of every message the stream holds that match `pattern`, unacknowledged ones included.

        Raises ConsumerGone when there is no such stream, ConnectionFailed.
        """
        try:
            info = await self.answered(
                f"for {stream}", lambda: self.jetstream.stream_info(stream, subjects_filter=pattern)
            )
        except nats.js.errors.NotFoundError as error:
            raise ConsumerGone(f"the stream {stream} is gone") from error
        return set(info.state.subjects or {})

    async def puller(self, stream: str, config: ConsumerConfig) -> Puller:
        """Create the consumer, or bring it to this configuration, and pull from it.

        Raises ConsumerGone when the stream does not take it, ConnectionFailed.
        """
        name = str(config.durable_name)
        what = f"for {name} of {stream}"
        try:
            await self.answered(what, lambda: self.jetstream.add_consumer(stream, config))
            subscription = await self.answered(
                what, lambda: self.jetstream.pull_subscribe_bind(consumer=name, stream=stream)
            )
        except (nats.js.errors.NotFoundError, nats.js.errors.BadRequestError) as error:
            raise ConsumerGone(f"{stream} does not accept the consumer {name}: {error.description}") from error
        return Puller(self.jetstream, subscription, stream, name)

    async def delete_consumers(self, stream: str, doomed: Callable[[str], bool]) -> list[str]:
        """Delete the consumers of `stream` whose names are `doomed`; returns those names.

        Raises ConsumerGone when there is no such stream, ConnectionFailed.
        """
        try:
            infos = await self.answered(f"for {stream}", lambda: self.jetstream.consumers_info(stream))
        except nats.js.errors.NotFoundError as error:
            raise ConsumerGone(f"the stream {stream} is gone") from error
        found = [str(info.name) for info in infos if doomed(str(info.name))]
        for name in found:
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await self.answered(f"to delete {name}", partial(self.jetstream.delete_consumer, stream, name))
        return found

    async def purge(self, stream: str, subject: str) -> None:
        """Remove every message at `subject` from `stream`. Raises ConnectionFailed."""
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self.answered(f"to purge {subject}", lambda: self.jetstream.purge_stream(stream, subject=subject))

    async def answered(self, what: str, ask: Callable[[], Awaitable[T]], patience: float = 30.0) -> T:
        """What the broker answers to a request that may be repeated. Raises ConnectionFailed, or what it refuses."""
        deadline = now() + patience
        while True:
            try:
                return await ask()
            except nats.js.errors.APIError as error:
                if not isinstance(error, nats.js.errors.ServiceUnavailableError) or now() > deadline:
                    raise
            except (TimeoutError, nats.errors.Error, OSError) as error:
                if now() > deadline:
                    raise ConnectionFailed(f"NATS at {self.url} did not answer {what} in {patience:.0f} s") from error
            await asyncio.sleep(0.2)

    async def dead_letter(self, subject: str, payload: bytes, reason: str) -> None:
        """Keep a message nobody can use, with the reason, and go on."""
        self.dead_letters += 1
        log.warning("dead letter from %s: %s", subject, reason)
        letter = DeadLetter(subject=subject, reason=reason, component=self.component, payload=payload[: 256 * 1024])
        try:
            await self.publish(
                names.dead_subject(self.component), letter, id=f"{self.component}-{time.time_ns()}", timeout=10
            )
        except FarflungError as error:
            log.error("a dead letter from %s was lost: %s", subject, error)


def tasks_config(run: str, epoch: int = 1, replicas: int = 1) -> StreamConfig:
    """The stream of one run's tasks. It takes those of `epoch` only: a learner that was displaced can issue nothing,
    not even what it had sent before it stood still. Tasks of earlier epochs that are in it stay.
    """
    return StreamConfig(
        name=names.tasks_stream(run),
        subjects=[names.task_subject(run, "*", epoch)],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_msgs_per_subject=1,
        max_msgs=100_000,
        storage=StorageType.FILE,
        num_replicas=replicas,
    )


def groups_config(run: str, window: int, replicas: int = 1) -> StreamConfig:
    """The stream of one run's finished groups, bounded at `window` of them."""
    return StreamConfig(
        name=names.groups_stream(run),
        subjects=[f"groups.{run}.*"],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_msgs_per_subject=1,
        max_msgs=window,
        storage=StorageType.FILE,
        num_replicas=replicas,
    )


def dead_config() -> StreamConfig:
    """The stream of dead letters: two weeks, 64 MiB."""
    return StreamConfig(
        name=names.DEAD_STREAM,
        subjects=[names.DEAD_SUBJECTS],
        max_age=14 * 24 * 3600,
        max_msgs=10_000,
        max_msg_size=1024 * 1024,
        storage=StorageType.FILE,
    )


HEARTBEATS = 3
"""The holder of a lease gives this many signs of life in the time for which a lease lasts without one."""

HOLD_WAIT = 300.0
"""A group that a learner holds is delivered again after this long without a sign of life."""

HOLD_HEARTBEAT = 60.0
"""How often a learner gives a sign of life for every group it holds."""

MAX_DELIVERIES = 5
"""A task that killed this many actors is not given to another."""


def actors_consumer(lease_seconds: float) -> ConsumerConfig:
    """The consumer that all actors of a run share; a lease lasts `lease_seconds` without a sign of life."""
    return ConsumerConfig(
        durable_name=names.ACTORS_CONSUMER,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=lease_seconds,
        max_deliver=MAX_DELIVERIES,
        max_ack_pending=20_000,
        max_waiting=4096,
    )


def learner_consumer(run: str, incarnation: str, epoch: int) -> ConsumerConfig:
    """The consumer of one learner's epoch: deliveries are held until the commit that closes their groups."""
    return ConsumerConfig(
        durable_name=names.learner_consumer(run, incarnation, epoch),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=HOLD_WAIT,
        max_ack_pending=20_000,
        max_waiting=4096,
    )


def without_password(url: str) -> str:
    """`url` with whatever stands before the @ removed, for messages and logs."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]


async def _reach(url: str, timeout: float) -> None:
    """Open and close a TCP connection, so that "nobody listens there" is told from "refused"."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    if not parts.hostname:
        raise ConnectionFailed(f"{without_password(url)!r} is no NATS URL; expected nats://user:password@host:port")
    port = parts.port or {"ws": 80, "wss": 443}.get(parts.scheme, 4222)
    deadline = now() + timeout
    while True:
        try:
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_connection(parts.hostname, port)
            writer.close()
            return
        except (OSError, TimeoutError) as error:
            if now() > deadline:
                raise ConnectionFailed(
                    f"NATS at {without_password(url)} cannot be reached ({error or 'timed out'}); "
                    "is the server running, and is the URL right?"
                ) from error
        await asyncio.sleep(0.5)


def _set_user_timeout(client: Client) -> None:
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if writer is None or option is None:
        return
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, USER_TIMEOUT_MS)


def advisory_sequence(data: bytes) -> int | None:
    """The stream sequence named in a max-deliveries advisory, None when the advisory says none."""
    with contextlib.suppress(ValueError, TypeError):
        return int(json.loads(data).get("stream_seq"))
    return None
