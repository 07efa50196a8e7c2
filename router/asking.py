"""Asking for continuations on behalf of HTTP clients: a router is here its own asker.

Each request gets one answer or one error. It is sent again under the same id while no answer comes; whoever is
cancelled while waiting cancels the generation in the engine too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import nats.errors
from nats.aio.msg import Msg

from broker import names
from broker.bus import Bus
from broker.messages import CancelRequest, GenerateRefused, GenerateReply, GenerateRequest, decode_one_of
from router.openai import BadRequest

log = logging.getLogger(__name__)

RESEND_SECONDS = 20.0
"""A request without an answer is sent again after this long; who has it already ignores that."""

PATIENCE_SECONDS = 30.0
"""How long refusals that may pass are put up with."""

PAUSE_SECONDS = 0.25
"""The pause before asking again after such a refusal."""

_STATUS = {"prompt_too_long": 400, "invalid": 400, "unavailable": 503, "failed": 502}
_CODE = {"prompt_too_long": "context_length_exceeded"}


class Asker:
    """Sends requests to one router and hands each answer to who waits for it."""

    def __init__(self, bus: Bus, *, fleet: str, router: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._fleet = fleet
        self._subject = names.router_generate(router)
        self._clock = clock
        self._inbox = str(bus.client.new_inbox())
        self._answers: dict[str, asyncio.Future[GenerateReply | GenerateRefused | None]] = {}
        self._subscription: object = None

    async def start(self) -> None:
        """Listen for answers."""
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)

    async def _on_answer(self, message: Msg) -> None:
        answer = self._answers.get(message.subject.rsplit(".", 1)[-1])
        if answer is None or answer.done():
            return  # a second answer to a request that has one
        if (message.headers or {}).get("Status") == "503":
            answer.set_result(None)
            return
        answer.set_result(decode_one_of(message.data, GenerateReply, GenerateRefused))  # type: ignore[arg-type]

    async def ask(self, request: GenerateRequest) -> GenerateReply:
        """The first answer to `request`, whose id must hold no dot. Raises BadRequest."""
        began = self._clock()
        try:
            while True:
                answer = await self._send(request)
                if isinstance(answer, GenerateReply):
                    return answer
                refused = answer if isinstance(answer, GenerateRefused) else None
                reason = refused.reason if refused else "the router does not hear itself"
                passing = refused is None or (refused.retryable and refused.code == "failed")
                if not passing or self._clock() - began > PATIENCE_SECONDS:
                    code = refused.code if refused else "unavailable"
                    raise BadRequest(reason, status=_STATUS[code], code=_CODE.get(code))
                log.info("request %s refused, asking again: %s", request.id, reason)
                await asyncio.sleep(PAUSE_SECONDS)
        except asyncio.CancelledError:
            await self._cancel(request.id)
            raise
        finally:
            self._answers.pop(request.id, None)

    async def _send(self, request: GenerateRequest) -> GenerateReply | GenerateRefused | None:
        while True:
            answer: asyncio.Future[GenerateReply | GenerateRefused | None] = asyncio.get_running_loop().create_future()
            self._answers[request.id] = answer
            try:
                await self._bus.send(self._subject, request, reply=f"{self._inbox}.{request.id}")
                async with asyncio.timeout(RESEND_SECONDS):
                    return await answer
            except TimeoutError:
                continue
            except nats.errors.Error as error:
                log.info("request %s not sent: %s", request.id, error)
                return None

    async def _cancel(self, id: str) -> None:
        try:
            await self._bus.send(names.cancel_subject(self._fleet), CancelRequest(id=id))
        except nats.errors.Error as error:
            log.info("cancellation of %s not sent: %s", id, error)
