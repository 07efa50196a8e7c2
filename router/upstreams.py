"""The stand-alone router: plain model servers behind one HTTP face, with the placement of a fleet and no bus.

Invariant: a request that a client still waits for has exactly one place to be: at one server, or in the queue. A
server that refuses, hangs up, fails or goes silent loses its requests to the others; only an answer of which the client
has seen the beginning cannot be repeated.

Servers are asked every second for their health, and now and then for their models and the size of their cache. A server
gets a model's requests if it lists the model, or if no server does: then the server is left to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np

from broker.blocks import BLOCK, HASH, chain, usable_block
from broker.ending import end
from broker.errors import ConfigError
from broker.messages import Ids
from router import openai
from router.exposition import metric
from router.face import Face
from router.http import Exchange
from router.openai import BadRequest, ChatRequest, CompletionRequest, decode, text_units
from router.placement import MAX_BYTES, SPILL_REQUESTS, Placer, Request

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""How often each server is asked for its health."""

SILENT_SECONDS = 2.5
"""A server that does not answer for this long is out; its requests go elsewhere."""

AWAY_SECONDS = 1.0
"""A short sleep that took this long says that the router itself did not run."""

LOOK_SECONDS = 10.0
"""How often each server is asked for its models and the size of its cache."""

WAIT_SECONDS = 30.0
"""How long a request may wait while no server is well."""

MAX_WAITING = 8192

CACHE_TOKENS = 262_144
"""The KV cache of a server that does not say how large it is, in tokens."""

UNLISTED_MODELS = 256
"""Models that no server lists and that are sent on all the same, newest kept."""

STREAM_KEPT = 8 * 1024 * 1024
"""Bytes of a streamed answer that are kept to learn from; a longer one teaches nothing."""

_HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"accept-encoding",
    )
)  # fmt: skip


@dataclass(frozen=True)
class UpstreamOptions:
    """How a stand-alone router behaves. `cache_tokens`: of a server that does not say. `token`: see Face."""

    token: str = ""
    spill: float = SPILL_REQUESTS
    max_bytes: int = MAX_BYTES
    cache_tokens: int = CACHE_TOKENS
    wait_seconds: float = WAIT_SECONDS
    max_waiting: int = MAX_WAITING


@dataclass
class Upstream:
    """One server. `models` are those it lists."""

    name: str
    host: str
    port: int
    prefix: str
    idle: list[_Link] = field(default_factory=list)
    busy: set[_Link] = field(default_factory=set)
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


class _Link(asyncio.Protocol):
    """One connection to a server, kept open from request to request."""

    def __init__(self, upstream: Upstream, *, shared: bool) -> None:
        """`shared`: clients' requests may use it, one after the other."""
        self.upstream = upstream
        self.transport: asyncio.Transport | None = None
        self.used = False
        self._shared = shared
        self.reusable = True
        self.receiver: Forward | _Fetch | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.streams = False
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, data: bytes, receiver: Forward | _Fetch) -> None:
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

    def on_head(self, link: _Link) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        pass

    def on_answer(self, link: _Link, data: bytes) -> None:
        if not self.result.done():
            self.result.set_result((link.status, b"".join(link.body)))

    def on_failure(self, link: _Link, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(ConnectionError(reason))


class Forward:
    """A client's request on its way."""

    def __init__(self, router: StandAlone, exchange: Exchange, request: Request, text: str | None) -> None:
        self.router = router
        self.exchange = exchange
        self.request = request
        self.text = text
        """The prompt, where it is no token ids."""
        self.waiting_since: float | None = None
        self.link: _Link | None = None
        self.failed_at: set[str] = set()
        self._data: list[bytes] = []
        self._streaming = False
        self._kept = 0
        exchange.on_gone = self._gone

    def on_head(self, link: _Link) -> None:
        self._streaming = link.streams and link.status < 500

    def on_data(self, data: bytes) -> None:
        """Part of the answer came."""
        if not self._streaming:
            self._data.append(data)
            return
        if self._data:
            data = b"".join((*self._data, data))
            self._data = []
        self.exchange.raw(data)
        self._kept += len(data)
        if self.link is not None and self._kept > STREAM_KEPT:
            self.link.body.clear()

    def on_answer(self, link: _Link, data: bytes) -> None:
        """The answer is complete with `data`."""
        self.link = None
        if link.status >= 500 and self.router.try_elsewhere(self, link.upstream, f"it answered {link.status}"):
            self._data = []
            return
        if not self._streaming and self._data:
            data = b"".join((*self._data, data))
        self.router.answered(self, link)
        self.exchange.raw(data, last=True, close=not link.reusable)

    def on_failure(self, link: _Link, reason: str) -> None:
        """The server hung up before the answer was complete."""
        self.link = None
        self.router.hung_up(self, link, reason)
        self._data = []

    def _gone(self) -> None:
        """The client hung up: the server is to stop."""
        link, self.link = self.link, None
        if link is not None:
            link.close()
        self.router.abandoned(self)


class StandAlone(Face):
    """The router."""

    def __init__(
        self,
        urls: Sequence[str],
        options: UpstreamOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a URL that is none."""
        options = options or UpstreamOptions()
        super().__init__(token=options.token)
        self._options = options
        self._clock = clock
        self._placer = Placer(spill=options.spill, max_bytes=options.max_bytes)
        self._upstreams = {upstream.name: upstream for upstream in map(Upstream.parse, urls)}
        if len(self._upstreams) != len(urls) or not urls:
            raise ConfigError("--upstream: expected at least one URL, each once")
        for upstream in self._upstreams.values():
            upstream.cache_tokens = options.cache_tokens
            upstream.clock = clock
        self._ids = itertools.count()
        self._waiting: deque[Forward] = deque()
        self._unlisted: OrderedDict[str, None] = OrderedDict()
        self._models: frozenset[str] = frozenset()
        self._heads: dict[tuple[str, str], bytes] = {}
        self._retries = 0
        self._away = -SILENT_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow the servers until cancelled."""
        followers = [asyncio.create_task(self._follow(upstream)) for upstream in self._upstreams.values()]
        try:
            await asyncio.gather(self._expire(), *followers)
        finally:
            await end(*followers, *self._tasks)
            await self.hang_up()
            for upstream in self._upstreams.values():
                for link in [*upstream.idle, *upstream.busy]:
                    link.close()

    # ------------------------------------------------------------------------------------------------- the face's part

    def placer(self) -> Placer:
        return self._placer

    def models(self) -> list[tuple[str, str | None]]:
        return list(dict.fromkeys(model for upstream in self._upstreams.values() for model in upstream.models))

    def healthy(self) -> str:
        if any(upstream.well for upstream in self._upstreams.values()):
            return ""
        return f"none of the {len(self._upstreams)} servers answers"

    def more_metrics(self) -> str:
        well = sum(upstream.well for upstream in self._upstreams.values())
        return "".join(
            [
                metric(
                    "farflung_router_replicas",
                    "gauge",
                    "Servers, by state",
                    [({"state": "well"}, well), ({"state": "failing"}, len(self._upstreams) - well)],
                ),
                metric(
                    "farflung_router_waiting", "gauge", "Requests that wait for a server", [({}, len(self._waiting))]
                ),
                metric(
                    "farflung_router_retries_total", "counter", "Requests sent to another server", [({}, self._retries)]
                ),
            ]
        )

    def completions(self, exchange: Exchange) -> None:
        asked = decode(exchange.body, CompletionRequest)
        prompt = openai.prompts(asked)[0]
        text = prompt if isinstance(prompt, str) else None
        self._forward(
            exchange, asked, text_units(prompt) if isinstance(prompt, str) else prompt, text, asked.max_tokens or 16
        )

    def chat(self, exchange: Exchange) -> None:
        asked = decode(exchange.body, ChatRequest)
        if not asked.messages:
            raise BadRequest("expected at least one message", param="messages")
        text = openai.conversation_text(asked.messages, asked.tools)
        most = asked.max_completion_tokens or asked.max_tokens or 1024
        self._forward(exchange, asked, text_units(text), text, most)

    def _forward(
        self, exchange: Exchange, asked: openai.SamplingRequest, prompt: Ids, text: str | None, most: int
    ) -> None:
        if asked.model not in self._models:
            self._learn_model(asked.model)
        request = Request(
            id=f"{next(self._ids)}",
            prompt=prompt,
            most=most * asked.n,
            adapter=asked.model,
            salt=asked.cache_salt or "",
        )
        self._send(Forward(self, exchange, request, text))

    # ------------------------------------------------------------------------------------------------------ forwarding

    def _send(self, forward: Forward) -> None:
        """Place a request and send it, or let it wait."""
        placed = self._placer.place(forward.request, self._clock())
        if placed is None:
            self._wait(forward)
            return
        forward.waiting_since = None
        upstream = self._upstreams[placed.replica]
        while upstream.idle:
            link = upstream.idle.pop()
            if link.transport is not None and not link.transport.is_closing():
                forward.link = link
                link.send(self._message(upstream, forward.exchange), forward)
                return
        self._spawn(self._send_anew(upstream, forward))

    async def _send_anew(self, upstream: Upstream, forward: Forward) -> None:
        """Send over a new connection."""
        try:
            link = await self._connect(upstream, shared=True)
        except OSError as error:
            if not forward.exchange.ended:
                self._placer.complete(forward.request.id)
                self._fail(upstream, str(error))
                self._again(forward, upstream)
            return
        if forward.exchange.ended:  # the client left meanwhile
            upstream.idle.append(link)
            return
        forward.link = link
        link.send(self._message(upstream, forward.exchange), forward)

    async def _connect(self, upstream: Upstream, *, shared: bool) -> _Link:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SILENT_SECONDS):
            _, link = await loop.create_connection(lambda: _Link(upstream, shared=shared), upstream.host, upstream.port)
        return link

    def _message(self, upstream: Upstream, exchange: Exchange) -> bytes:
        lines = [b"%s: %s\r\n" % pair for pair in exchange.headers.items() if pair[0] not in _HOP_BY_HOP]
        if self._expected:  # the token was for this router
            lines = [line for line in lines if not line.startswith(b"authorization:")]
        head = self._heads.get((upstream.name, exchange.path))
        if head is None:
            target = f"{upstream.prefix}{exchange.path}"
            head = f"POST {target} HTTP/1.1\r\nhost: {upstream.host}:{upstream.port}\r\n".encode()
            self._heads[upstream.name, exchange.path] = head
        return b"%s%scontent-length: %d\r\n\r\n%s" % (head, b"".join(lines), len(exchange.body), exchange.body)

    def answered(self, forward: Forward, link: _Link) -> None:
        """A request has its answer: learn from it."""
        self.count(forward.exchange, link.status)
        request = forward.request
        answer = None
        if link.status == 200:
            body = link.body[0] if len(link.body) == 1 else b"".join(link.body)
            answer = openai.decode_stream(body) if link.streams else openai.decode_answer(body)
        elif link.status == 404 and request.adapter is not None and request.adapter in self._unlisted:
            del self._unlisted[request.adapter]
            self._tell_placer()
        if answer is None or answer.usage is None or not answer.choices:
            choice = answer.choices[0] if answer is not None and answer.choices else None
            sampled = len(choice.token_ids) if choice and choice.token_ids else None
            self._placer.complete(request.id, output_tokens=sampled)
            return
        usage, choice = answer.usage, answer.choices[0]
        cached = usage.cached
        if cached is not None and forward.text is not None:  # in the units of the text
            cached = cached * len(request.prompt) // max(1, usage.prompt_tokens)
        self._placer.complete(
            request.id,
            output_tokens=usage.completion_tokens,
            cached_tokens=cached,
            prompt_tokens=len(request.prompt),
            blocks=self._continuation(forward, link.upstream.block, choice),
        )

    @staticmethod
    def _continuation(forward: Forward, block: int, choice: openai.AnswerChoice) -> bytes:
        """Hashes of the full blocks that an answer added behind its prompt's."""
        request = forward.request
        if forward.text is None:
            if not choice.token_ids:
                return b""
            more = np.array(choice.token_ids[:-1], dtype=np.int32)  # the last one was never fed back
            if len(more) + len(request.prompt) % block < block:
                return b""
            whole = np.concatenate([request.prompt, more])
        else:
            said = choice.said
            if forward.exchange.path.endswith("/chat/completions"):
                said = openai.spoken(openai.Message("assistant", said))
            whole = text_units(forward.text + said)
            whole = whole[: len(whole) // block * block]
        prompt = (
            len(request.prompt) if forward.text is None else len(forward.text.encode("utf-8", "surrogatepass")) // 4
        )
        return chain(request.adapter, whole, salt=request.salt, block=block)[prompt // block * HASH :]

    def abandoned(self, forward: Forward) -> None:
        """The client of a request hung up."""
        self.count(forward.exchange, 499)
        self._placer.complete(forward.request.id)
        with contextlib.suppress(ValueError):
            self._waiting.remove(forward)

    # -------------------------------------------------------------------------------------------------------- failures

    def hung_up(self, forward: Forward, link: _Link, reason: str) -> None:
        """A server closed the connection before its answer was complete."""
        self._placer.complete(forward.request.id)
        if link.used and not link.status:  # it had been idle for too long: ask once more, over a new connection
            link.upstream.idle.clear()
        else:
            self._fail(link.upstream, reason)
        if forward.exchange.started:
            self.count(forward.exchange, 502)
            forward.exchange.abort()
        elif not forward.exchange.ended:
            self._again(forward, link.upstream)

    def try_elsewhere(self, forward: Forward, upstream: Upstream, reason: str) -> bool:
        """A server failed at a request; False when the request has failed elsewhere too, or has nowhere to go."""
        self._fail(upstream, reason)
        if forward.failed_at or not self._placer.can_serve(forward.request.adapter):
            return False
        forward.failed_at.add(upstream.name)
        self._placer.complete(forward.request.id)
        self._again(forward, upstream)
        return True

    def _again(self, forward: Forward, upstream: Upstream) -> None:
        self._retries += 1
        log.info("request %s goes elsewhere: %s has not answered it", forward.request.id, upstream.name)
        self._send(forward)

    def _wait(self, forward: Forward) -> None:
        if forward.waiting_since is None:
            forward.waiting_since = self._clock()
        if len(self._waiting) >= self._options.max_waiting:
            self.refuse(forward.exchange, BadRequest(f"{len(self._waiting)} requests wait already", status=503))
            return
        self._waiting.append(forward)

    async def _expire(self) -> None:
        """Give up on what has waited for too long."""
        while True:
            began = self._clock()
            await asyncio.sleep(PROBE_SECONDS / 4)
            now = self._clock()
            if now - began > AWAY_SECONDS:
                self._away = now
            self._placer.expire(now)
            while self._waiting and now - (self._waiting[0].waiting_since or now) > self._options.wait_seconds:
                forward = self._waiting.popleft()
                self.refuse(
                    forward.exchange,
                    BadRequest(
                        f"no server that has {forward.request.adapter!r} has answered for "
                        f"{self._options.wait_seconds:.0f} s",
                        status=503,
                    ),
                )

    def _fail(self, upstream: Upstream, reason: str) -> None:
        """A server is out until it answers for its health again."""
        if upstream.well:
            log.warning("%s is out: %s", upstream.name, reason)
        upstream.well = False
        self._placer.bar(upstream.name)

    # --------------------------------------------------------------------------------------------------------- servers

    async def _follow(self, upstream: Upstream) -> None:
        """Ask a server for its health every second, and now and then for what it has."""
        looked = -LOOK_SECONDS
        while True:
            began = self._clock()
            try:
                status, _ = await self._fetch(upstream, "/health")
                if status != 200:
                    raise ConnectionError(f"/health answered {status}")
                if not upstream.well or began - looked >= LOOK_SECONDS:
                    await self._look(upstream)
                    looked = began
            except (OSError, TimeoutError) as error:
                self._lose(upstream, error)
            else:
                if not upstream.well:
                    upstream.well = True
                    log.info("%s is in use", upstream.name)
                    self._tell_placer()
                    self._retry_waiting()
            await asyncio.sleep(max(0.0, began + PROBE_SECONDS - self._clock()))

    def _lose(self, upstream: Upstream, error: Exception) -> None:
        """A server has not answered for its health: it is out; if it is silent, what it has goes elsewhere."""
        now = self._clock()
        if now - self._away < SILENT_SECONDS:
            return  # who was away oneself has answers unread, and must not take that for silence
        if now - upstream.answered < SILENT_SECONDS and isinstance(error, TimeoutError):
            return  # it is busy, not dead: answers come
        self._fail(upstream, str(error) or "no answer")
        if now - upstream.answered > SILENT_SECONDS:
            for link in [*upstream.busy, *upstream.idle]:
                receiver = link.receiver
                link.close()
                if isinstance(receiver, Forward):
                    receiver.link = None
                    self.hung_up(receiver, link, "it is silent")
            upstream.idle.clear()
            self._placer.clear_cache(upstream.name)

    async def _look(self, upstream: Upstream) -> None:
        """What models a server lists, and how large its cache is."""
        status, body = await self._fetch(upstream, "/v1/models")
        if status == 200:
            with contextlib.suppress(msgspec.DecodeError):
                listed = msgspec.json.decode(body, type=_Models)
                upstream.models = [(model.id, model.parent) for model in listed.data]
        status, body = await self._fetch(upstream, "/metrics")
        if status == 200:
            upstream.block, upstream.cache_tokens = _cache_of(body.decode(errors="replace")) or (
                BLOCK,
                self._options.cache_tokens,
            )
        self._tell_placer()

    async def _fetch(self, upstream: Upstream, path: str) -> tuple[int, bytes]:
        link = await self._connect(upstream, shared=False)
        fetch = _Fetch()
        target, host = f"{upstream.prefix}{path}", f"{upstream.host}:{upstream.port}"
        link.send(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode(), fetch)
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                return await fetch.result
        finally:
            link.close()

    def _learn_model(self, model: str) -> None:
        """Somebody asks for a model that no server lists."""
        if model in self._unlisted:
            self._unlisted.move_to_end(model)
            return
        self._unlisted[model] = None
        while len(self._unlisted) > UNLISTED_MODELS:
            self._unlisted.popitem(last=False)
        self._tell_placer()

    def _tell_placer(self) -> None:
        listed = {model for upstream in self._upstreams.values() for model, _ in upstream.models}
        for model in listed & set(self._unlisted):
            del self._unlisted[model]
        self._models = frozenset(listed)
        for upstream in self._upstreams.values():
            self._placer.update_replica(
                upstream.name,
                confirmed=[*(model for model, _ in upstream.models), *self._unlisted],
                accepts=upstream.well,
                cache_tokens=upstream.cache_tokens,
                block=upstream.block,
            )

    def _retry_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            self._send(self._waiting.popleft())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _ListedModel(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_ListedModel]


def _cache_of(metrics: str) -> tuple[int, int] | None:
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
