"""Calling the user's code: it may be sync or async, slow, wrong, or never return.

A sync function runs in a daemon thread of its own, so that neither generation nor the process's end ever waits for
it; how many run at once is bounded by the episodes in flight. What goes wrong becomes an EpisodeError.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from broker.errors import EpisodeFailed
from broker.messages import FailureKind

CANCEL_GRACE = 10.0
"""Seconds that the user's coroutine has to end once it is cancelled: enough to stop a container."""

log = logging.getLogger(__name__)


class EpisodeError(EpisodeFailed):
    """Why one episode failed. `retryable` tells whether a fresh attempt can end otherwise."""

    def __init__(self, category: FailureKind, reason: str, *, retryable: bool = False) -> None:
        super().__init__(reason)
        self.category: FailureKind = category
        self.retryable = retryable
        self.sampled_tokens = 0
        """Tokens that the episode had sampled by then."""


async def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, sync or async, without ever holding up the event loop. Whatever it raises is raised here."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await _cancellable(function(*args, **kwargs))
    result = await _in_thread(lambda: function(*args, **kwargs))
    return await _cancellable(result) if inspect.isawaitable(result) else result


async def _cancellable(awaitable: Awaitable[Any]) -> Any:
    """Await the user's coroutine; when this is cancelled, so is it, and it has CANCEL_GRACE seconds to end.

    One that goes on all the same is left alone: no slot and no lease waits for it. One that is cancelled from within
    raises RuntimeError: to whoever awaits this, CancelledError means that they are cancelled themselves.
    """
    running = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if running.cancelled() and this is not None and not this.cancelling():
            raise RuntimeError("what it awaited was cancelled, and nobody had asked for that") from None
        if not running.done():
            running.cancel()
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await asyncio.wait([running], timeout=CANCEL_GRACE)
            if not running.done():
                log.warning("user code goes on %g s after it was cancelled: %r", CANCEL_GRACE, awaitable)
        raise


def describe(error: BaseException) -> str:
    """The error's type, message and the line that raised it, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


async def _in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if isinstance(error, StopIteration):
            error = RuntimeError("StopIteration left the function")
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, problem = None, None
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001 - it crosses over to the awaiting coroutine
            problem = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, problem)

    threading.Thread(target=work, name="user-code", daemon=True).start()
    return await outcome
