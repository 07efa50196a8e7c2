"""A model server as the stand-alone router sees it: its connections, its health, its models, the size of its cache."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from broker.blocks import BLOCK, usable_block
from broker.errors import ConfigError

SILENT_SECONDS = 2.5
"""A server that does not answer for this long is out; its requests go elsewhere."""

CACHE_TOKENS = 262_144
"""The KV cache of a server that does not say how large it is, in tokens."""

_HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"accept-encoding",
    )
)  # fmt: skip


class Receiver(Protocol):
    """Who is told what comes over a link."""

    def on_head(self, link: Link) -> None:
        """The answer's status and headers are there."""

    def on_data(self, data: bytes) -> None:
        """Part of the answer came, with more to follow; framed as the server sent it."""

    def on_answer(self, link: Link, data: bytes) -> None:
        """The answer is complete with `data`."""

    def on_failure(self, link: Link, reason: str) -> None:
        """The server hung up before the answer was complete."""


@dataclass
class Upstream:
    """One server. `models` are those it lists, each with the one it is an adapter of."""

    name: str
    host: str
    port: int
    prefix: str
    idle: list[Link] = field(default_factory=list)
    busy: set[Link] = field(default_factory=set)
    clock: Callable[[], float] = time.monotonic
    well: bool = False
    answered: float = 0.0
    """When the last byte came from it."""
    models: list[tuple[str, str | None]] = field(default_factory=list)
    cache_tokens: int = CACHE_TOKENS
    block: int = BLOCK

    @classmethod
    def parse(cls, url: str) -> Upstream:
        """From http://HOST:PORT[/PREFIX]. Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"--upstream: expected http://HOST:PORT, got {url!r}")
        return cls(url.rstrip("/"), parts.hostname, port, parts.path.rstrip("/"))

    def idle_link(self) -> Link | None:
        """A connection that is open and free."""
        while self.idle:
            link = self.idle.pop()
            if link.transport is not None and not link.transport.is_closing():
                return link
        return None

    async def connect(self, *, shared: bool) -> Link:
        """A new connection. `shared`: see Link. Raises OSError, of which TimeoutError is one."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SILENT_SECONDS):
            _, link = await loop.create_connection(lambda: Link(self, shared=shared), self.host, self.port)
        return link

    def message(self, path: str, headers: Mapping[bytes, bytes], body: bytes, *, show_token: bool) -> bytes:
        """A client's POST as this server gets it. `show_token`: the client's token is for the server."""
        lines = [
            b"%s: %s\r\n" % pair
            for pair in headers.items()
            if pair[0] not in _HOP_BY_HOP and (show_token or pair[0] != b"authorization")
        ]
        head = f"POST {self.prefix}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n".encode()
        return b"%s%scontent-length: %d\r\n\r\n%s" % (head, b"".join(lines), len(body), body)

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET of the router's own, over a connection of its own. Raises OSError."""
        link = await self.connect(shared=False)
        fetch = _Fetch()
        head = f"GET {self.prefix}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nconnection: close\r\n\r\n"
        link.send(head.encode(), fetch)
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                return await fetch.result
        finally:
            link.close()

    async def look(self, cache_tokens: int) -> None:
        """Ask what models it lists and how large its cache is, `cache_tokens` if it does not say. Raises OSError."""
        status, body = await self.fetch("/v1/models")
        if status == 200:
            with contextlib.suppress(msgspec.DecodeError):
                listed = msgspec.json.decode(body, type=_Models)
                self.models = [(model.id, model.parent) for model in listed.data]
        status, body = await self.fetch("/metrics")
        if status == 200:
            self.block, self.cache_tokens = cache_of(body.decode(errors="replace")) or (BLOCK, cache_tokens)


class Link(asyncio.Protocol):
    """One connection to a server, kept open from request to request."""

    def __init__(self, upstream: Upstream, *, shared: bool) -> None:
        """`shared`: clients' requests may use it, one after the other."""
        self.upstream = upstream
        self.transport: asyncio.Transport | None = None
        self.used = False
        self._shared = shared
        self.reusable = True
        self.receiver: Receiver | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.streams = False
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, data: bytes, receiver: Receiver) -> None:
        """Ask; `receiver` is told what comes. The link must be unused."""
        self._begin()
        if self.transport is None:
            asyncio.get_running_loop().call_soon(receiver.on_failure, self, "the connection was closed")
            return
        self.receiver = receiver
        self.upstream.busy.add(self)
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.upstream.answered = self.upstream.clock()
        receiver = self.receiver
        if receiver is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP answer: {error}")
            return
        if self.receiver is receiver:
            receiver.on_data(data)
        else:
            receiver.on_answer(self, data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.streams = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.receiver is not None:
            self.receiver.on_head(self)

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.receiver = None
        self.used = True
        self.upstream.busy.discard(self)
        self.reusable = self._parser.should_keep_alive()
        if self.transport is None or not self._shared:
            return
        if self.reusable:
            self.upstream.idle.append(self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self in self.upstream.idle:
            self.upstream.idle.remove(self)
        self._fail(str(exc) if exc else "the connection was closed")

    def _fail(self, reason: str) -> None:
        self.upstream.busy.discard(self)
        receiver, self.receiver = self.receiver, None
        if self.transport is not None:
            self.transport.close()
        if receiver is not None:
            receiver.on_failure(self, reason)

    def close(self) -> None:
        """Hang up; nobody is told."""
        self.receiver = None
        self.upstream.busy.discard(self)
        if self.transport is not None:
            self.transport.abort()


class _Fetch:
    """One question of the router's own."""

    def __init__(self) -> None:
        self.result: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def on_head(self, link: Link) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        pass

    def on_answer(self, link: Link, data: bytes) -> None:
        if not self.result.done():
            self.result.set_result((link.status, b"".join(link.body)))

    def on_failure(self, link: Link, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(ConnectionError(reason))


class _ListedModel(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_ListedModel]


def cache_of(metrics: str) -> tuple[int, int] | None:
    """(block size, tokens of KV cache) as vLLM's metrics say; None where they do not."""
    found = re.search(r"^vllm:cache_config_info\{([^}]*)\}", metrics, re.MULTILINE)
    if found is None:
        return None
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1)))
    try:
        block, blocks = int(labels["block_size"]), int(labels["num_gpu_blocks"])
    except (KeyError, ValueError):
        return None
    return usable_block(block), usable_block(block) * blocks
