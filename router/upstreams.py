"""The stand-alone router: plain model servers behind one HTTP face, with the placement of a fleet and no bus.

Invariant: a request that a client still waits for has exactly one place to be: at one server, or in the queue. A
server that refuses, hangs up, fails or goes silent loses its requests to the others; what cannot be repeated is an
answer of which the client has seen the beginning, and a request at which several servers failed.

Servers are asked every second for their health, and now and then for their models and the size of their cache. A server
gets a model's requests if it lists the model, or if no server does: then the server is left to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import numpy as np

from broker.blocks import HASH, chain, end_of, extend
from broker.ending import end
from broker.errors import ConfigError
from broker.messages import Ids
from router import openai
from router.exposition import metric
from router.face import Face
from router.http import Exchange
from router.openai import BadRequest, ChatRequest, CompletionRequest, decode, text_units
from router.placement import MAX_BYTES, SPILL_REQUESTS, Placer, Request
from router.servers import CACHE_TOKENS, SILENT_SECONDS, Link, Upstream

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""How often each server is asked for its health."""

AWAY_SECONDS = 1.0
"""A short sleep that took this long says that the router itself did not run."""

LOOK_SECONDS = 10.0
"""How often each server is asked for its models and the size of its cache."""

WAIT_SECONDS = 30.0
"""How long a request may wait while no server is well."""

HANG_UPS = 3
"""A request at which servers hung up this often is refused: it may be what ends them. One that is innocent and meets as
many restarts is its client's to repeat."""

MAX_WAITING = 8192

UNLISTED_MODELS = 256
"""Models that no server lists and that are sent on all the same, newest kept."""

STREAM_KEPT = 8 * 1024 * 1024
"""Bytes of a streamed answer that are kept to learn from; a longer one teaches nothing."""


@dataclass(frozen=True)
class UpstreamOptions:
    """How a stand-alone router behaves. `cache_tokens`: of a server that does not say. `token`: see Face."""

    token: str = ""
    spill: float = SPILL_REQUESTS
    max_bytes: int = MAX_BYTES
    cache_tokens: int = CACHE_TOKENS
    wait_seconds: float = WAIT_SECONDS
    max_waiting: int = MAX_WAITING


class Forward:
    """A client's request on its way."""

    def __init__(self, router: StandAlone, exchange: Exchange, request: Request, text: str | None) -> None:
        self.router = router
        self.exchange = exchange
        self.request = request
        self.text = text
        """The prompt, where it is no token ids."""
        self.waiting_since: float | None = None
        self.link: Link | None = None
        self.failed_at: set[str] = set()
        self.hang_ups = 0
        self._data: list[bytes] = []
        self._streaming = False
        self._kept = 0
        exchange.on_gone = self._gone

    def on_head(self, link: Link) -> None:
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

    def on_answer(self, link: Link, data: bytes) -> None:
        """The answer is complete with `data`."""
        self.link = None
        if link.status >= 500 and self.router.try_elsewhere(self, link.upstream, f"it answered {link.status}"):
            self._data = []
            return
        if not self._streaming and self._data:
            data = b"".join((*self._data, data))
        self.router.answered(self, link)
        self.exchange.raw(data, last=True, close=not link.reusable)

    def on_failure(self, link: Link, reason: str) -> None:
        """The server hung up before the answer was complete."""
        self.link = None
        self._data = []
        self.router.hung_up(self, link, reason)

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
        link = upstream.idle_link()
        if link is None:
            self._spawn(self._send_anew(upstream, forward))
        else:
            self._send_over(link, forward)

    async def _send_anew(self, upstream: Upstream, forward: Forward) -> None:
        """Send over a new connection."""
        try:
            link = await upstream.connect(shared=True)
        except OSError as error:
            if not forward.exchange.ended:
                self._placer.complete(forward.request.id)
                self._fail(upstream, str(error))
                self._again(forward, upstream)
            return
        if forward.exchange.ended:  # the client left meanwhile
            upstream.idle.append(link)
            return
        self._send_over(link, forward)

    def _send_over(self, link: Link, forward: Forward) -> None:
        exchange = forward.exchange
        forward.link = link
        message = link.upstream.message(exchange.path, exchange.headers, exchange.body, show_token=not self._expected)
        link.send(message, forward)

    def answered(self, forward: Forward, link: Link) -> None:
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

    def _continuation(self, forward: Forward, block: int, choice: openai.AnswerChoice) -> bytes:
        """Hashes of the full blocks that an answer added behind its prompt's."""
        request = forward.request
        if forward.text is None:
            if not choice.token_ids:
                return b""
            more = np.array(choice.token_ids[:-1], dtype=np.int32)  # the last one was never fed back
            left = request.prompt[len(request.prompt) // block * block :]
            if len(left) + len(more) < block:
                return b""
            start = end_of(self._placer.prompt_chain(request.id))
            return extend(request.adapter, start, np.concatenate([left, more]), salt=request.salt, block=block)[0]
        said = choice.said
        if forward.exchange.path.endswith("/chat/completions"):
            said = openai.spoken(openai.Message("assistant", said))
        whole = text_units(forward.text + said)
        whole = whole[: len(whole) // block * block]
        prompt = len(forward.text.encode("utf-8", "surrogatepass")) // 4
        return chain(request.adapter, whole, salt=request.salt, block=block)[prompt // block * HASH :]

    def abandoned(self, forward: Forward) -> None:
        """The client of a request hung up."""
        self.count(forward.exchange, 499)
        self._placer.complete(forward.request.id)
        with contextlib.suppress(ValueError):
            self._waiting.remove(forward)

    # -------------------------------------------------------------------------------------------------------- failures

    def hung_up(self, forward: Forward, link: Link, reason: str) -> None:
        """A server closed the connection before its answer was complete."""
        self._placer.complete(forward.request.id)
        if link.used and not link.status:  # it had been idle for too long: ask once more, over a new connection
            link.upstream.idle.clear()
        else:
            self._fail(link.upstream, reason)
        if forward.exchange.ended:
            return
        forward.hang_ups += 1
        if forward.exchange.started:
            self.count(forward.exchange, 502)
            forward.exchange.abort()
        elif forward.hang_ups >= HANG_UPS:
            problem = f"servers hung up {forward.hang_ups} times on this request, {link.upstream.name} last: {reason}"
            self.refuse(forward.exchange, BadRequest(problem, status=502))
        else:
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
                status, _ = await upstream.fetch("/health")
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
                if receiver is not None:
                    receiver.on_failure(link, "it is silent")
            upstream.idle.clear()
            self._placer.clear_cache(upstream.name)

    async def _look(self, upstream: Upstream) -> None:
        await upstream.look(self._options.cache_tokens)
        self._tell_placer()
        self._retry_waiting()

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
