"""An event loop with virtual time, whose work belongs to processes that can be paused and killed.

Nothing here waits: when nothing is ready, time jumps to the next timer. Every callback carries a context, and the
context says which process it belongs to. What a killed process had still to do is dropped, what a paused one has to do
waits until it goes on. Everything runs in one thread in one order, so a seed replays exactly.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any


class ProcessDied(BaseException):
    """The process reached a point at which it was to die: nothing of it runs on."""


class Process:
    """A simulated operating-system process: alive, paused or dead. A revived component is a new process."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.alive = True
        self.paused = False
        self.held: list[Handle] = []
        """What came due while it was paused."""
        self.context = Context()
        self.context.run(PROCESS.set, self)
        self.root: asyncio.Task[Any] | None = None
        self.calls = 0
        """Requests it has sent to broker and store."""
        self.on_death: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return self.name

    def kill(self) -> None:
        """SIGKILL: from here on nothing of it runs, and its connections are gone."""
        if self.alive:
            self.alive = False
            for tell in self.on_death:
                tell()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that the running callback belongs to; None: the world outside of all."""


class Handle:
    """A callback, its context, and the process that it belongs to. What asyncio.TimerHandle is, and lighter."""

    __slots__ = ("_when", "args", "callback", "context", "gone", "process")

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self._when = when
        self.callback = callback
        self.args = args
        self.context = context
        self.process = context.get(PROCESS)
        self.gone = False

    def cancel(self) -> None:
        self.gone = True

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self._when


class VirtualLoop(asyncio.AbstractEventLoop):
    """One thread, one order, time that jumps."""

    def __init__(self, executor_seconds: Callable[[object], float] = lambda executor: 0.001) -> None:
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._time = 0.0
        self._sequence = 0
        self._processes: list[Process] = []
        self._world = Context()
        self._executor_seconds = executor_seconds
        self._reaping = False
        self._kept: list[asyncio.Task[Any]] = []
        self._dropped: list[Handle] = []
        """What killed processes had still to do: run when everything is ended, so that their tasks can end."""
        self.ran = 0
        """Callbacks run so far."""
        self.halted = False
        """Set to stop `run` after the callback that runs now."""
        self.faults: list[dict[str, Any]] = []
        """What was handed to the exception handler."""

    # ---------------------------------------------------------------------------------------------- what asyncio asks

    def time(self) -> float:
        return self._time

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        handle = Handle(self._time, callback, args, context if context is not None else copy_context())
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        handle = Handle(when, callback, args, context if context is not None else copy_context())
        self._sequence += 1
        heappush(self._timers, (when, self._sequence, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self._time + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._kept.append(task)
        if len(self._kept) > 2048:
            self._kept = [kept for kept in self._kept if not kept.done()]
        return task

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` at one later moment, and hand over its result at another: its process may die in between."""
        future = self.create_future()
        context = copy_context()

        def work() -> None:
            finish: Callable[[Any], None]
            try:
                finish, outcome = future.set_result, func(*args)
            except BaseException as error:  # noqa: BLE001 - it crosses over to the awaiting coroutine
                finish, outcome = future.set_exception, error
            self.call_later(seconds / 2, lambda: future.done() or finish(outcome), context=context)

        seconds = 0.0 if self._reaping else self._executor_seconds(executor)
        self.call_later(seconds / 2, work, context=context)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._reaping:
            self.faults.append(context)

    async def shutdown_asyncgens(self) -> None:
        return

    # ------------------------------------------------------------------------------------------------- driving it

    def in_world(self, delay: float, callback: Callable[..., object], *args: object) -> None:
        """Call `callback` after `delay` seconds, on behalf of no process."""
        self.call_at(self._time + delay, callback, *args, context=self._world)

    def start(self, process: Process, main: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Begin `main` as the root task of `process`."""
        self._processes.append(process)
        process.root = process.context.run(lambda: self.create_task(main, name=process.name, context=process.context))
        return process.root

    def when_it_goes_on(self, process: Process, callback: Callable[..., object], *args: object) -> None:
        """Call `callback` on behalf of `process`, which is paused, as soon as it goes on."""
        process.held.append(Handle(self._time, callback, args, process.context))

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        process.paused = False
        self._ready.extend(process.held)
        process.held.clear()

    def run(self, until: float) -> None:
        """Run until `halted` is set, or nothing is left to do before time `until`."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        ready = self._ready
        try:
            while not self.halted and (ready or self._advance(until)):
                handle = ready.popleft()
                process = handle.process
                if handle.gone:
                    continue
                if process is not None and not self._reaping:
                    if not process.alive:
                        self._dropped.append(handle)
                        continue
                    if process.paused:
                        process.held.append(handle)
                        continue
                self.ran += 1
                try:
                    handle.context.run(handle.callback, *handle.args)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt | SystemExit):
                        raise
                    self.call_exception_handler({"message": "a callback raised", "exception": error})
        finally:
            events._set_running_loop(before)

    def _advance(self, until: float) -> bool:
        """Go on to the next timer and make what is due then ready; False when there is none before `until`."""
        timers = self._timers
        while timers and timers[0][2].gone:
            heappop(timers)
        if not timers or timers[0][0] > until:
            return False
        self._time = now = max(self._time, timers[0][0])
        while timers and timers[0][0] <= now:
            self._ready.append(heappop(timers)[2])
        return True

    def reap(self) -> None:
        """End every task there is, so that nothing is left behind; what they still say counts no more."""
        self._reaping = True
        for process in self._processes:
            self._dropped += process.held
        self._ready.extend(self._dropped)
        self._dropped.clear()
        for _ in range(20):
            tasks = [task for task in self._kept if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.halted = False
            self.run(self._time + 3.0)
        self._kept.clear()
        self._ready.clear()
        self._timers.clear()
