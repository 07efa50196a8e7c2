"""Running a component as a process: its event loop, its signals, its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from broker.bus import Bus
from broker.errors import ConnectionFailed, FarflungError
from broker.registry import Registry
from broker.store import Store
from deploy.profile import Connection
from observability import logs, tracing

log = logging.getLogger(__name__)

CANCEL_AGAIN_SECONDS = 5.0
"""A component that has not ended this long after a signal is cancelled again; `broker.ending` tells why."""

TELEMETRY_SECONDS = 4.0
"""How long the last spans and metrics may take to leave: an endpoint that is gone must not keep the process."""

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a component that a signal stopped, as shells have them: 130 after Ctrl-C, 143 after SIGTERM."""


def node_id(kind: str) -> str:
    """A fresh id for a component: where it runs, and a part that no restart repeats."""
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname().lower())[:24].strip("-")
    return f"{kind}-{host or 'host'}-{secrets.token_hex(3)}"


@asynccontextmanager
async def connected(connection: Connection, component: str) -> AsyncIterator[tuple[Bus, Registry, Store]]:
    """The bus, the registry and the store, open. Raises ConnectionFailed when one cannot be reached in time, and when
    the broker gives the connection up for good later on.
    """
    bus = await Bus.connect(connection.nats, component)
    store = Store(connection.store)
    whole = asyncio.current_task()
    assert whole is not None
    bus.on_lost = whole.cancel
    try:
        registry = await Registry.open(bus)
        await store.open()
        yield bus, registry, store
    except asyncio.CancelledError as error:
        if not bus.lost:
            raise
        raise ConnectionFailed(f"NATS at {bus.url} closed the connection for good: {bus.lost}") from error
    finally:
        store.close()
        await bus.close()


def run(
    component: str,
    instance: str,
    main: Callable[[], Coroutine[Any, Any, int]],
    *,
    telemetry: Path | None = None,
    endpoint: str = "",
    level: int = logging.INFO,
) -> int:
    """Run `main` to its end and return the exit code. SIGTERM and SIGINT cancel it, so that it can leave in order.

    Threads that still compute are not waited for; `end` leaves them behind.
    """
    logs.configure(component, level=level)
    traces = tracing.configure(component, instance, endpoint=endpoint, directory=telemetry)
    # Never closed: that would wait for the threads of `asyncio.to_thread`, which no signal stops.
    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        try:
            return runner.run(_guarded(main))
        finally:
            runner.run(_leave())
    except FarflungError as error:
        print(f"farflung {component}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        last = threading.Thread(target=_shut_down, args=(traces,), daemon=True)
        last.start()
        last.join(TELEMETRY_SECONDS)


def _shut_down(traces: tracing.Telemetry) -> None:
    with contextlib.suppress(Exception):
        traces.shutdown()


async def _leave() -> None:
    """Cancel the tasks that are left and finish the asynchronous generators, as closing the runner would."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def end(code: int) -> None:
    """Leave the process now: threads that still compute are not waited for, nothing of theirs counts any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _guarded(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    task = asyncio.ensure_future(main())
    received: list[int] = []

    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        received.append(number)
        cancel()

    def cancel() -> None:
        if not task.done():
            task.cancel()
            loop.call_later(CANCEL_AGAIN_SECONDS, cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        log.info("stopped")
        return 128 + (received[0] if received else signal.SIGTERM)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
