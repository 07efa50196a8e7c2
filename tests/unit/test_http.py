"""The HTTP server: framing, order, limits, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import router.http as module
from router.http import Exchange, Server
from tests.waiting import until


class Subject:
    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.at_once = True
        self.server = Server(self.handle)
        self.port = 0

    def handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if self.at_once:
            exchange.send(200, exchange.method.encode() + b" " + exchange.path.encode() + b" " + exchange.body)

    async def talk(self, data: bytes) -> bytes:
        """Send, hang up the sending side's hope of more by `Connection: close`, and read to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    subject = Subject()
    subject.port = await subject.server.start("127.0.0.1", 0)
    yield subject
    await subject.server.close()


LAST = b"Connection: close\r\n\r\n"


async def test_requests_sent_ahead_are_answered_in_order(subject: Subject) -> None:
    ahead = b"".join(b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n%d" % (n, n) for n in range(5))
    answer = await subject.talk(ahead + b"GET /last HTTP/1.1\r\n" + LAST)
    places = [answer.index(b"POST /%d %d" % (n, n)) for n in range(5)] + [answer.index(b"GET /last")]
    assert places == sorted(places)


async def test_an_answer_that_comes_later_holds_up_those_behind_it(subject: Subject) -> None:
    subject.at_once = False
    talk = asyncio.create_task(subject.talk(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n" + LAST))
    await until(lambda: len(subject.exchanges) == 1)
    subject.exchanges[0].send(200, b"one")
    await until(lambda: len(subject.exchanges) == 2)
    subject.exchanges[1].send(200, b"two")
    assert (await talk).count(b"200 OK") == 2


async def test_a_body_may_come_in_chunks_and_bytes_may_come_one_by_one(subject: Subject) -> None:
    whole = b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + LAST + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert (await subject.talk(whole)).endswith(b"POST /c abcde")
    reader, writer = await asyncio.open_connection("127.0.0.1", subject.port)
    for byte in whole:
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.read()).endswith(b"POST /c abcde")


async def test_an_answer_in_pieces_is_framed(subject: Subject) -> None:
    subject.at_once = False
    talk = asyncio.create_task(subject.talk(b"GET /s HTTP/1.1\r\n" + LAST))
    await until(lambda: subject.exchanges)
    exchange = subject.exchanges[0]
    exchange.start(200, b"text/event-stream")
    exchange.piece(b"hello")
    exchange.piece(b"")
    exchange.end()
    exchange.piece(b"too late")
    assert (await talk).endswith(b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
    ],
)
async def test_what_is_no_request_is_refused_and_hung_up_on(subject: Subject, data: bytes, status: bytes) -> None:
    answer = await subject.talk(data)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b'{"error":{"message":"' in answer


async def test_an_offer_of_another_protocol_is_not_taken(subject: Subject) -> None:
    offer = b"GET /1 HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    answer = await subject.talk(offer + b"GET /2 HTTP/1.1\r\n" + LAST)
    assert answer.index(b"GET /1 ") < answer.index(b"GET /2 ")


async def test_a_body_that_grows_too_large_in_chunks_is_refused(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 4)
    answer = await subject.talk(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nabcdef\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert subject.exchanges == []


async def test_who_serves_a_client_that_hangs_up_is_told_once(subject: Subject) -> None:
    subject.at_once = False
    told: list[int] = []
    _, writer = await asyncio.open_connection("127.0.0.1", subject.port)
    writer.write(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\n")
    await until(lambda: subject.exchanges)
    subject.exchanges[0].on_gone = lambda: told.append(1)
    writer.close()
    await until(lambda: told)
    assert subject.exchanges[0].ended
    subject.exchanges[0].send(200, b"nobody hears this")
    assert told == [1]
    assert len(subject.exchanges) == 1, "what it had sent ahead is not served any more"


async def test_an_answer_that_cannot_be_finished_does_not_look_complete(subject: Subject) -> None:
    subject.at_once = False
    talk = asyncio.create_task(subject.talk(b"GET /s HTTP/1.1\r\n\r\n"))
    await until(lambda: subject.exchanges)
    subject.exchanges[0].start(200, b"text/event-stream")
    subject.exchanges[0].piece(b"half")
    subject.exchanges[0].abort()
    assert not (await talk).endswith(b"0\r\n\r\n")


async def test_a_client_that_sends_too_much_ahead_is_not_read(subject: Subject) -> None:
    subject.at_once = False
    count = module.MAX_AHEAD * 3
    talk = asyncio.create_task(
        subject.talk(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % n for n in range(count)) + b"GET /last HTTP/1.1\r\n" + LAST)
    )
    for served in range(count + 1):
        await until(lambda: len(subject.exchanges) > served)  # noqa: B023
        subject.exchanges[served].send(200, b"")
    assert (await talk).count(b"200 OK") == count + 1


async def test_a_client_that_does_not_read_its_answers_gets_no_more_of_them() -> None:
    count, body = 3000, bytes(20_000)
    buffered: list[int] = []

    def handle(exchange: Exchange) -> None:
        [connection] = server._connections
        assert connection._transport is not None
        buffered.append(connection._transport.get_write_buffer_size())
        exchange.send(200, body)

    server = Server(handle)
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start("127.0.0.1", 0))
    writer.write(b"GET /1 HTTP/1.1\r\n\r\n" * count)
    for _ in range(3):
        await until(lambda: len(buffered) == count or any(connection._full for connection in server._connections))
        async with asyncio.timeout(20):
            for _ in range(count // 3):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(body)) == body
    assert len(buffered) == count
    assert max(buffered) < 10 * len(body)
    writer.close()
    await server.close()


async def test_what_is_no_request_is_refused_behind_the_answers_that_are_owed(subject: Subject) -> None:
    subject.at_once = False
    talk = asyncio.create_task(subject.talk(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nnonsense\r\n\r\n"))
    for number in range(2):
        await until(lambda: len(subject.exchanges) > number)  # noqa: B023
        subject.exchanges[number].send(200, b"")
    answer = await talk
    assert [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/")] == [b"200", b"200", b"400"]


async def test_who_sends_what_is_no_request_and_hangs_up_ends_the_request_before_it(subject: Subject) -> None:
    subject.at_once = False
    told: list[int] = []
    _, writer = await asyncio.open_connection("127.0.0.1", subject.port)
    writer.write(b"GET /1 HTTP/1.1\r\n\r\nnonsense\r\n\r\n")
    await until(lambda: subject.exchanges)
    subject.exchanges[0].on_gone = lambda: told.append(1)
    writer.close()
    await until(lambda: told)
