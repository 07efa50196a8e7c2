"""The HTTP face of a fleet's router: OpenAI's endpoints for the base model and the policies that are being trained.

A client's request becomes generation requests on the bus, which this face's own router places. Answers carry token ids
and logprobs where asked, and always the name of the adapter that served them (`system_fingerprint`), so that a harness
that knows nothing of Farflung can sample from the newest policy and say which it was.

An engine answers with a whole continuation, so a streamed answer brings each choice in one piece when it is there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.errors import ModelError
from broker.messages import GenerateReply, GenerateRequest, Ids, pack_ids, unpack_floats, unpack_ids
from broker.registry import Heads, Registry
from router import openai, policies
from router.asking import Asker
from router.exposition import metric
from router.face import FAILED, Face
from router.http import Exchange
from router.openai import BadRequest, ChatRequest, CompletionRequest, SamplingRequest, decode
from router.placement import Placer
from router.policies import Policy
from router.service import RouterService

log = logging.getLogger(__name__)

COMPLETION_TOKENS = 16
"""What a completion may sample at most where the client does not say, as with OpenAI."""

UNKNOWN_CONTEXT = 4096
"""The context of replicas that do not say."""


@dataclass(frozen=True)
class _Choice:
    index: int
    prompt: Ids
    reply: GenerateReply
    ids: list[int]
    logprobs: list[float]
    text: str
    finish: str


class FleetFace(Face):
    """The face of one router of a fleet."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        service: RouterService,
        *,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`token`: see Face. `wall`: seconds since 1970, for `created`."""
        super().__init__(token=token)
        self._registry = registry
        self._service = service
        self._asker = Asker(bus, fleet=service.fleet, router=service.id, clock=clock)
        self._wall = wall
        self._heads: Heads | None = None
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.tokenizer: ChatTokenizer | None = None
        """Set once it has been found; until then token ids alone are taken."""
        self.no_tokenizer = "the tokenizer is being loaded"
        """Why there is none."""

    async def run(self) -> None:
        """Follow the runs until cancelled."""
        self._heads = Heads(self._registry)
        try:
            await self._asker.start()
            await asyncio.Event().wait()
        finally:
            await end(*self._tasks)
            await self.hang_up()
            await self._heads.close()

    # ------------------------------------------------------------------------------------------------- the face's part

    def placer(self) -> Placer:
        return self._service.placer

    def models(self) -> list[tuple[str, str | None]]:
        return policies.listed(self._service.fleet, self._fleet_heads())

    def healthy(self) -> str:
        if self._service.placer.can_serve(None):
            return ""
        return f"no replica of fleet {self._service.fleet} takes requests"

    def more_metrics(self) -> str:
        readings = self._service.readings()
        return "".join(
            [
                metric("farflung_router_waiting", "gauge", "Requests without a replica", [({}, readings["waiting"])]),
                metric("farflung_router_refused_total", "counter", "Requests refused", [({}, readings["refused"])]),
                metric(
                    "farflung_router_replicas",
                    "gauge",
                    "Replicas, by state",
                    [
                        ({"state": "eligible"}, len(self._service.placer.eligible(None))),
                        ({"state": "failing"}, readings["failing"]),
                    ],
                ),
            ]
        )

    def completions(self, exchange: Exchange) -> None:
        asked = decode(exchange.body, CompletionRequest)
        if asked.echo:
            raise BadRequest("echo is not served here", param="echo")
        if (asked.logprobs or 0) > 1:
            raise BadRequest("only the sampled token's logprob is known; ask for logprobs=1", param="logprobs")
        policy = self._policy(asked.model)
        prompts = [
            openai.token_ids(self._tokens().encode(prompt)) if isinstance(prompt, str) else prompt
            for prompt in openai.prompts(asked)
        ]
        if any(len(prompt) == 0 for prompt in prompts):
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        requests = self._requests(asked, policy, prompts, asked.max_tokens or COMPLETION_TOKENS)
        self._spawn(exchange, self._answer(exchange, _Completion(self, asked), requests))

    def chat(self, exchange: Exchange) -> None:
        asked = decode(exchange.body, ChatRequest)
        if not asked.messages:
            raise BadRequest("expected at least one message", param="messages")
        if asked.tools:
            raise BadRequest("tools are not rendered here; put them into the messages", param="tools")
        if asked.top_logprobs:
            raise BadRequest("only the sampled token's logprob is known; leave top_logprobs out", param="top_logprobs")
        policy = self._policy(asked.model)
        try:
            text = self._tokens().render([_plain(message) for message in asked.messages])
        except ModelError as error:
            raise BadRequest(str(error), param="messages") from None
        prompt = openai.token_ids(self._tokens().encode(text))
        most = asked.max_completion_tokens or asked.max_tokens or max(1, self._context() - len(prompt))
        requests = self._requests(asked, policy, [prompt], most)
        self._spawn(exchange, self._answer(exchange, _Chat(self, asked), requests))

    # -------------------------------------------------------------------------------------------------------- requests

    def _fleet_heads(self) -> list[Any]:
        heads = self._heads.heads.values() if self._heads is not None else ()
        return [head for head in heads if head.fleet == self._service.fleet]

    def _policy(self, model: str) -> Policy:
        found = policies.find(model, self._service.fleet, self._fleet_heads())
        if found is None:
            raise self.unknown_model(model)
        return found

    def _tokens(self) -> ChatTokenizer:
        if self.tokenizer is None:
            raise BadRequest(f"this router takes prompts in token ids only: {self.no_tokenizer}", status=503)
        return self.tokenizer

    def _context(self) -> int:
        return self._service.context or UNKNOWN_CONTEXT

    def _requests(
        self, asked: SamplingRequest, policy: Policy, prompts: Sequence[Ids], most: int
    ) -> list[tuple[Ids, GenerateRequest]]:
        if most < 1:
            raise BadRequest(f"expected max_tokens of at least 1, got {most}", param="max_tokens")
        if not 0 <= (asked.temperature if asked.temperature is not None else 1.0) <= 100:
            raise BadRequest("expected a temperature from 0 on", param="temperature")
        if not 0 < (asked.top_p if asked.top_p is not None else 1.0) <= 1:
            raise BadRequest("expected top_p above 0 and at most 1", param="top_p")
        longest = max(len(prompt) for prompt in prompts)
        if longest + most > self._context():
            raise BadRequest(
                f"the longest context is {self._context()} tokens; the prompt has {longest}, {most} more are asked for",
                code="context_length_exceeded",
            )
        stop_ids = [] if asked.ignore_eos or self.tokenizer is None else list(self.tokenizer.eos_ids)
        requests = []
        for prompt in prompts:
            number = next(self._numbers)
            for member in range(asked.n):
                request = GenerateRequest(
                    id=f"{self._service.id}-http-{number}-{member}",
                    run=policy.run,
                    group=f"{self._service.id}-http-{number}" if asked.n > 1 else "",
                    siblings=asked.n,
                    adapter=policy.adapter,
                    version=policy.version,
                    prompt=pack_ids(prompt),
                    max_new_tokens=most,
                    temperature=1.0 if asked.temperature is None else asked.temperature,
                    stop_token_ids=[*stop_ids, *(asked.stop_token_ids or [])],
                    seed=None if asked.seed is None else asked.seed + member,
                    top_p=1.0 if asked.top_p is None else asked.top_p,
                    top_k=max(0, asked.top_k or 0),
                )
                requests.append((prompt, request))
        return requests

    # --------------------------------------------------------------------------------------------------------- answers

    def _spawn(self, exchange: Exchange, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def stop() -> None:
            task.cancel()

        exchange.on_gone = stop

    async def _answer(self, exchange: Exchange, form: _Form, requests: list[tuple[Ids, GenerateRequest]]) -> None:
        try:
            if form.asked.stream:
                await self._stream(exchange, form, requests)
            else:
                choices = [choice async for choice in self._choices(form, requests)]
                choices.sort(key=lambda choice: choice.index)
                body = form.whole(choices)
                self.count(exchange, 200)
                exchange.send(200, msgspec.json.encode(body))
        except BadRequest as problem:
            self.refuse(exchange, problem)
        except asyncio.CancelledError:
            self.count(exchange, 499)
            raise
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            self.refuse(exchange, BadRequest(FAILED, status=500))

    async def _choices(self, form: _Form, requests: list[tuple[Ids, GenerateRequest]]) -> AsyncIterator[_Choice]:
        """Each choice as it comes. When one fails, or nobody waits any more, the others are cancelled."""

        async def one(index: int, prompt: Ids, request: GenerateRequest) -> _Choice:
            return self._choice(index, prompt, await self._asker.ask(request), form.asked)

        tasks = [asyncio.create_task(one(index, *pair)) for index, pair in enumerate(requests)]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            await end(*tasks)

    def _choice(self, index: int, prompt: Ids, reply: GenerateReply, asked: SamplingRequest) -> _Choice:
        ids, logprobs = unpack_ids(reply.token_ids).tolist(), unpack_floats(reply.logprobs).tolist()
        text = self.tokenizer.decode(ids) if self.tokenizer is not None else ""
        finish = "length" if reply.finish == "length" else "stop"
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        cut = min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=-1)
        if cut >= 0 and self.tokenizer is not None:
            kept = next(n for n in range(len(ids) + 1) if len(self.tokenizer.decode(ids[:n])) >= cut)
            ids, logprobs, text, finish = ids[:kept], logprobs[:kept], text[:cut], "stop"
        return _Choice(index, prompt, reply, ids, logprobs, text, finish)

    async def _stream(self, exchange: Exchange, form: _Form, requests: list[tuple[Ids, GenerateRequest]]) -> None:
        choices = []
        async for choice in self._choices(form, requests):
            if not exchange.started:
                exchange.start(200, b"text/event-stream")
            choices.append(choice)
            for piece in form.pieces(choice):
                exchange.piece(b"data: " + msgspec.json.encode(piece) + b"\n\n")
        if form.asked.stream_options is not None and form.asked.stream_options.include_usage:
            last = form.head(choices, piece=True) | {"choices": [], "usage": usage(choices)}
            exchange.piece(b"data: " + msgspec.json.encode(last) + b"\n\n")
        exchange.piece(b"data: [DONE]\n\n")
        self.count(exchange, 200)
        exchange.end()

    def created(self) -> int:
        """Now, for `created`."""
        return int(self._wall())

    def answer_id(self, kind: str) -> str:
        """An id for an answer."""
        return f"{kind}-{self._service.id}-{next(self._numbers)}"

    def token_text(self, id: int) -> str:
        """One token as text."""
        return self.tokenizer.decode([id], skip_special=False) if self.tokenizer is not None else f"token_id:{id}"


class _Form:
    """How an answer is written."""

    kind = ""
    object = ""
    piece_object = ""

    def __init__(self, face: FleetFace, asked: SamplingRequest) -> None:
        self.face = face
        self.asked = asked
        self._id = face.answer_id(self.kind)
        self._created = face.created()

    def head(self, choices: Sequence[_Choice], *, piece: bool = False) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self.piece_object if piece else self.object,
            "created": self._created,
            "model": self.asked.model,
            "system_fingerprint": (choices[0].reply.adapter if choices else None) or "base",
        }

    def whole(self, choices: Sequence[_Choice]) -> dict[str, Any]:
        """The body of an answer in one piece."""
        return self.head(choices) | {"choices": [self.choice(choice) for choice in choices], "usage": usage(choices)}

    def pieces(self, choice: _Choice) -> list[dict[str, Any]]:
        """The pieces of a streamed choice."""
        raise NotImplementedError

    def choice(self, choice: _Choice) -> dict[str, Any]:
        """A choice in one piece."""
        raise NotImplementedError

    def _ids(self, choice: _Choice) -> dict[str, Any]:
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": choice.ids, "prompt_token_ids": choice.prompt.tolist()}


class _Completion(_Form):
    kind, object, piece_object = "cmpl", "text_completion", "text_completion"
    asked: CompletionRequest

    def choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish,
            **self._ids(choice),
        }

    def pieces(self, choice: _Choice) -> list[dict[str, Any]]:
        return [self.head([choice], piece=True) | {"choices": [self.choice(choice)]}]

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        tokens = [self.face.token_text(id) for id in choice.ids]
        offsets = list(itertools.accumulate((len(token) for token in tokens), initial=0))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": choice.logprobs,
            "top_logprobs": [{token: value} for token, value in zip(tokens, choice.logprobs, strict=True)]
            if self.asked.logprobs
            else None,
            "text_offset": offsets,
        }


class _Chat(_Form):
    kind, object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def choice(self, choice: _Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish,
            **self._ids(choice),
        }

    def pieces(self, choice: _Choice) -> list[dict[str, Any]]:
        said = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice),
            "finish_reason": None,
            **self._ids(choice),
        }
        over = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish}
        return [self.head([choice], piece=True) | {"choices": [piece]} for piece in (said, over)]

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(map(self.face.token_text, choice.ids), choice.logprobs, strict=True)
            ]
        }


def usage(choices: Sequence[_Choice]) -> dict[str, Any]:
    """`usage` over all choices; a prompt that was sampled several times counts once."""
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    prompt = sum(len(choice.prompt) for choice in prompts)
    sampled = sum(len(choice.ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(choice.reply.cached_tokens for choice in prompts)},
    }


def _plain(message: openai.Message) -> dict[str, Any]:
    """A message as chat templates take it. Raises BadRequest for what is no text."""
    content = message.content
    if content is not None and not isinstance(content, str):
        if any(not isinstance(part.get("text"), str) for part in content):
            raise BadRequest("expected messages of text alone", param="messages")
        content = "".join(part["text"] for part in content)
    fields = {"role": message.role, "content": content or "", "name": message.name, "tool_calls": message.tool_calls}
    fields |= {"tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning_content}
    return {key: value for key, value in fields.items() if value is not None}
