"""The HTTP face of a fleet before answers and requests that cannot be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from broker.ending import end
from broker.messages import GenerateReply, GenerateRequest
from router.fleet import FleetFace


class StubBus:
    """Every request is answered at once, with token ids that are none."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(new_inbox=lambda: "inbox")
        self.asked: list[GenerateRequest] = []
        self.answer: Callable[[Any], Awaitable[None]] | None = None

    async def subscribe(self, subject: str, handler: Callable[[Any], Awaitable[None]]) -> None:
        self.answer = handler

    async def send(self, subject: str, message: GenerateRequest, *, reply: str = "") -> None:
        message.encode()
        self.asked.append(message)
        answer = GenerateReply(
            id=message.id, replica="a", token_ids=b"123", logprobs=b"", finish="stop", adapter=None, version=0,
            cached_tokens=0, seconds=0.0,
        )  # fmt: skip
        assert self.answer is not None
        await self.answer(SimpleNamespace(subject=reply, data=answer.encode(), headers={}))


class Scene:
    def __init__(self, bus: StubBus, port: int) -> None:
        self.bus = bus
        self.port = port

    async def ask(self, **body: object) -> tuple[int, dict[str, Any]]:
        """Status and body of one completion."""
        data = json.dumps({"model": "f", "prompt": [1, 2, 3], **body}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data)
        writer.write(head + data)
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    bus = StubBus()
    stub: Any = bus
    service: Any = SimpleNamespace(id="router", fleet="f", context=512)
    registry: Any = None
    face = FleetFace(stub, registry, service)
    await face._asker.start()
    port = await face.listen("127.0.0.1", 0)
    yield Scene(bus, port)
    await end(*face._tasks)
    await face.hang_up()


async def test_an_exception_that_nobody_expected_is_answered_too(scene: Scene) -> None:
    status, body = await scene.ask()
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert len(scene.bus.asked) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", 1 << 70), ("seed", (1 << 63) - 1), ("stop_token_ids", [1 << 70]), ("top_k", 1 << 70), ("n", 1 << 70)],
)
async def test_a_number_that_no_message_can_hold_is_bad_input(scene: Scene, field: str, value: object) -> None:
    status, body = await scene.ask(**{field: value})
    assert (status, body["error"]["param"]) == (400, field)
    assert scene.bus.asked == []


async def test_the_largest_seed_leaves_room_for_every_choice(scene: Scene) -> None:
    await scene.ask(seed=(1 << 63) - 128, n=128)
    assert max(asked.seed or 0 for asked in scene.bus.asked) == (1 << 63) - 1
