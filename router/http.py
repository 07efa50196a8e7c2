"""A small HTTP/1.1 server on httptools: what a router needs, at a cost per request that leaves room for routing.

A handler is called once for each complete request, in the event loop, and answers through the exchange: at once or
later, whole or in pieces. Requests that a client sends ahead on one connection wait for the answers before them. A
client that hangs up ends its exchange: whoever serves it is told through `on_gone`. One that does not read its answers
gets no further ones, and is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import cast

import httptools

MAX_BODY = 64 * 1024 * 1024
"""Bytes of a request's body at most: twenty million token ids in JSON or so."""

MAX_HEAD = 64 * 1024
"""Bytes of a request's target and headers at most."""

MAX_AHEAD = 16
"""Requests that a client may send ahead on one connection before its bytes are left unread."""

Handler = Callable[["Exchange"], None]


class Exchange:
    """One request and its answer. Header names are lower-case bytes."""

    __slots__ = ("_connection", "_ended", "_started", "body", "headers", "keep_alive", "method", "on_gone", "path")

    def __init__(
        self, connection: Connection, method: str, path: str, headers: Mapping[bytes, bytes], body: bytes, keep: bool
    ) -> None:
        self._connection = connection
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.keep_alive = keep
        self.on_gone: Callable[[], None] | None = None
        """Called once if the client hangs up before the answer is complete."""
        self._started = False
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, or nobody is there to receive it."""
        return self._ended

    @property
    def started(self) -> bool:
        """Whether part of the answer has been sent."""
        return self._started

    def send(self, status: int, body: bytes, content_type: bytes = b"application/json", more: bytes = b"") -> None:
        """The whole answer. `more`: further header lines, each with its line end."""
        if self._ended:
            return
        keep = b"" if self.keep_alive else b"Connection: close\r\n"
        self._write(
            b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s%s\r\n"
            % (status, _phrase(status), content_type, len(body), keep, more)
            + (b"" if self.method == "HEAD" else body)
        )
        self._finish()

    def start(self, status: int, content_type: bytes, more: bytes = b"") -> None:
        """The head of an answer that comes in pieces."""
        if not self._ended:
            keep = b"" if self.keep_alive else b"Connection: close\r\n"
            self._write(
                b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n"
                b"Cache-Control: no-cache\r\n%s%s\r\n" % (status, _phrase(status), content_type, keep, more)
            )

    def piece(self, data: bytes) -> None:
        """A piece of such an answer."""
        if data and not self._ended:
            self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        """Its end."""
        if not self._ended:
            self._write(b"0\r\n\r\n")
            self._finish()

    def raw(self, data: bytes, *, last: bool = False, close: bool = False) -> None:
        """Bytes of an answer that is framed already. `close`: the connection cannot be used again after the last."""
        if self._ended:
            return
        if data:
            self._write(data)
        if last:
            self.keep_alive = self.keep_alive and not close
            self._finish()

    def abort(self) -> None:
        """Hang up in the middle of an answer, so that the client does not take it for a complete one."""
        if not self._ended:
            self._ended = True
            self._connection.hang_up()

    def gone(self) -> None:
        """The client has hung up."""
        if not self._ended:
            self._ended = True
            if self.on_gone is not None:
                self.on_gone()

    def _write(self, data: bytes) -> None:
        self._started = True
        self._connection.write(data)

    def _finish(self) -> None:
        self._ended = True
        self._connection.answered(self)


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._full = False
        """Whether the client does not read what it is sent."""
        self._paused = False
        self._refusal: tuple[int, bytes] | None = None
        """Status and body for bytes that were no request: the last answer."""
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_size = 0
        self._body: list[bytes] = []
        self._body_size = 0

    # ------------------------------------------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # an offer, which is not taken: the connection goes on as it was
            self._parser = httptools.HttpRequestParser(self)
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            status = cause.status if isinstance(cause, _TooLarge) else HTTPStatus.BAD_REQUEST
            self._refuse(status, str(cause or error))
        except httptools.HttpParserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"no HTTP/1.1 request: {error}")

    def pause_writing(self) -> None:
        self._full = True
        self._throttle()

    def resume_writing(self) -> None:
        self._full = False
        self._serve_next()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        if self._current is not None:
            self._current.gone()
        for exchange in self._waiting:
            exchange.gone()
        self._waiting.clear()

    # ---------------------------------------------------------------------------------------------- httptools' calls

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._grow(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        self._grow(len(name) + len(value))

    def on_headers_complete(self) -> None:
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY:
            raise _TooLarge(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected a body of at most {MAX_BODY} bytes")
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._body_size > MAX_BODY:
            raise _TooLarge(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected a body of at most {MAX_BODY} bytes")
        self._body.append(data)

    def on_message_complete(self) -> None:
        parser = self._parser
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        path = self._target.decode("latin-1").partition("?")[0]
        exchange = Exchange(self, parser.get_method().decode(), path, self._headers, body, parser.should_keep_alive())
        self._reset()
        if self._current is None and not self._waiting and not self._full:
            self._current = exchange
            self._handler(exchange)
        else:
            self._waiting.append(exchange)
            self._throttle()

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise _TooLarge(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"expected at most {MAX_HEAD} bytes of headers")

    # ------------------------------------------------------------------------------------------- the exchange's calls

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """The current exchange is complete: the next may be served."""
        self._current = None
        if exchange.keep_alive:
            self._serve_next()
        else:
            self.hang_up()

    def _serve_next(self) -> None:
        if self._current is None and not self._full:
            if self._waiting:
                self._current = self._waiting.popleft()
                asyncio.get_running_loop().call_soon(self._serve_current, self._current)
            elif self._refusal is not None:
                Exchange(self, "POST", "", {}, b"", keep=False).send(*self._refusal)
        self._throttle()

    def _throttle(self) -> None:
        """Leave the client's bytes unread while it does not read, or has sent too much ahead."""
        pause = self._full or len(self._waiting) >= MAX_AHEAD
        if pause == self._paused or self._transport is None or self._transport.is_closing():
            return
        self._paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _serve_current(self, exchange: Exchange) -> None:
        if not exchange.ended:
            self._handler(exchange)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, status: int, reason: str) -> None:
        """What came is no request: nothing more is read, and that is answered behind all that is owed."""
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % (
            reason.replace("\\", "").replace('"', "'").encode("ascii", "replace")
        )
        self._refusal = status, body
        self._serve_next()


class _TooLarge(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Server:
    """A listening socket."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which is a free one where `port` is 0. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections), host, port, backlog=1024
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more connections and hang up those there are."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.hang_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self._server.wait_closed()


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
