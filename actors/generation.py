"""Asking the fleet for a continuation: the actor's end of a generation request.

Invariant: each request gets one answer or one error. A request is sent again under the same id while no answer
comes, so neither a lost message nor a dead router loses it; whoever has it already ignores the repetition, and the
first answer counts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Literal

import nats.errors
import numpy as np
from nats.aio.msg import Msg

from actors.episode import Generate, Sampled, episode_seed
from broker import names
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.errors import GenerationError, PromptTooLong
from broker.messages import (
    CancelRequest,
    GenerateRefused,
    GenerateReply,
    GenerateRequest,
    Ids,
    Task,
    decode_one_of,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from observability import metrics, tracing

log = logging.getLogger(__name__)

RESEND_SECONDS = 20.0
"""A request without an answer is sent again after this long: the router that had it may be gone."""

NOBODY_SECONDS = 0.5
"""When nobody listens at all, the next try comes after this long."""

PATIENCE_SECONDS = 300.0
"""How long refusals, or that no router is there, are put up with before the episode fails."""


class Generator:
    """Sends generation requests of one actor and hands each answer to who asked."""

    def __init__(self, bus: Bus, *, fleet: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._fleet = fleet
        self._clock = clock
        self._inbox = f"{bus.client.new_inbox()}"
        self._numbers = itertools.count()
        self._nonce = secrets.token_hex(3)
        self._waiting: dict[str, asyncio.Future[GenerateReply | GenerateRefused | None]] = {}
        self._subscription: object = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)

    def request_id(self, group: str, episode: int, turn: int) -> str:
        """A fresh id for a request."""
        return f"{group}.{episode}.{turn}.{self._nonce}{next(self._numbers)}"

    async def _on_answer(self, message: Msg) -> None:
        token = message.subject.rsplit(".", 1)[-1]
        future = self._waiting.get(token)
        if future is None or future.done():
            return  # a second answer to a request that has one
        if (message.headers or {}).get("Status") == "503":
            future.set_result(None)
            return
        answer = decode_one_of(message.data, GenerateReply, GenerateRefused)
        if isinstance(answer, GenerateReply | GenerateRefused):
            future.set_result(answer)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The first answer to `request`. Raises GenerationError; whatever ends it otherwise cancels the request.

        A request that a router took may take as long as it takes; only refusals and the absence of routers are put up
        with for a bounded time.
        """
        token = request.id.rsplit(".", 1)[-1]
        began = self._clock()
        trouble_since: float | None = None
        with tracing.span("generate", request=request.id, group=request.group, version=request.version):
            headers = tracing.headers()
            try:
                while True:
                    answer = await self._ask(request, token, headers)
                    if isinstance(answer, GenerateReply):
                        metrics.record("farflung.generate.seconds", self._clock() - began)
                        return answer
                    if answer == "silence":
                        trouble_since = None
                        continue
                    reason = answer.reason if isinstance(answer, GenerateRefused) else "no router is there"
                    if isinstance(answer, GenerateRefused):
                        if answer.code == "prompt_too_long":
                            raise PromptTooLong(answer.reason)
                        if not answer.retryable:
                            raise GenerationError(answer.reason, retryable=False)
                        log.info("generation refused by %s, asking again: %s", answer.source, answer.reason)
                    trouble_since = self._clock() if trouble_since is None else trouble_since
                    if self._clock() - trouble_since > PATIENCE_SECONDS:
                        raise GenerationError(f"no continuation for {PATIENCE_SECONDS:.0f} s: {reason}")
                    await asyncio.sleep(NOBODY_SECONDS)
            except BaseException:
                await self._cancel(request.id)
                raise
            finally:
                self._waiting.pop(token, None)

    async def _ask(
        self, request: GenerateRequest, token: str, headers: dict[str, str]
    ) -> GenerateReply | GenerateRefused | Literal["silence"] | None:
        """Send once and wait: the answer, None when nobody listens, "silence" when none came in time."""
        future: asyncio.Future[GenerateReply | GenerateRefused | None] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            await self._bus.send(
                names.generate_subject(self._fleet), request, reply=f"{self._inbox}.{token}", headers=headers
            )
            async with asyncio.timeout(RESEND_SECONDS):
                return await future
        except TimeoutError:
            return "silence"
        except nats.errors.Error as error:
            log.info("generation request not sent: %s", error)
            return None

    async def _cancel(self, id: str) -> None:
        try:
            await self._bus.send(names.cancel_subject(self._fleet), CancelRequest(id=id))
        except nats.errors.Error as error:
            log.info("cancellation of %s not sent: %s", id, error)


def generate_for(
    generator: Generator,
    tokenizer: ChatTokenizer,
    task: Task,
    *,
    version: int,
    adapter: str | None,
    temperature: float,
    top_p: float = 1.0,
    on_reply: Callable[[int, GenerateReply], None],
) -> Generate:
    """The `generate` that a task's episodes call: one version for all of them.

    `on_reply` sees each reply with its episode's number; what it raises ends the episode's attempt.
    """

    async def generate(episode: int, turn: int, prompt: Ids, max_new_tokens: int) -> Sampled:
        reply = await generator.generate(
            GenerateRequest(
                id=generator.request_id(task.group, episode, turn),
                run=task.run,
                group=task.group,
                siblings=task.group_size,
                adapter=adapter,
                version=version,
                prompt=pack_ids(prompt),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                stop_token_ids=list(tokenizer.eos_ids),
                seed=episode_seed(task.seed + turn, episode),
            )
        )
        on_reply(episode, reply)
        return Sampled(
            token_ids=np.asarray(unpack_ids(reply.token_ids), dtype=np.int32),
            logprobs=unpack_floats(reply.logprobs),
            finish=reply.finish,
            version=reply.version,
            replica=reply.replica,
            seconds=reply.seconds,
        )

    return generate
