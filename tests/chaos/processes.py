"""Components as processes of their own that can be killed, stopped and continued, started in a moment.

Each runs the command line's `main` with arguments, environment, working directory and output of its own. They are
forked from a server process that has imported what they need and done nothing else, so that a test may start a dozen
of them: importing torch and transformers anew would take five seconds each time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from broker.faults import VARIABLE
from tests.waiting import until

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.chaos.processes", "deploy.cli", "deploy.components", "learner.service", "learner.model", "uvloop",
        "actors.engines.embedded", "actors.service", "actors.replica", "actors.adapter_cache", "router.service",
        "transformers.models.llama.modeling_llama",
    ]
)  # fmt: skip

PATIENCE = 120.0
"""Seconds for anything to happen before it counts as hung: many times what it takes on two busy cores."""


def _run(arguments: list[str], environment: dict[str, str], directory: str, output: str) -> None:
    """Become `farflung` with `arguments`."""
    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["farflung", *arguments]
    from deploy.cli import main

    main()


class Component:
    """One process."""

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str], directory: Path, output: Path, *, fault: str
    ) -> None:
        self.name = f"{output.stem} ({arguments[0]}{', ' + fault if fault else ''})"
        self._output = output
        self._process = FORKS.Process(
            target=_run,
            args=(arguments, {**environment, **({VARIABLE: fault} if fault else {})}, str(directory), str(output)),
            daemon=True,
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative of the signal that killed it."""
        return self._process.exitcode

    @property
    def said(self) -> str:
        """What it has printed and logged so far."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def stopped(self) -> bool:
        """Whether a SIGSTOP holds it."""
        return self.exit_code is None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def proceed(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.exit_code is None:
            self._process.kill()
        self._process.join(PATIENCE)

    async def wait(self) -> int:
        """Its exit code once it has ended; fails the test when it does not."""
        await until(lambda: self.exit_code is not None, within=PATIENCE, what=f"{self.name} ends")
        return int(self.exit_code or 0)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Return once `condition` holds; fail when the process ends before, or when it takes too long."""
        await until(lambda: condition() or self.exit_code is not None, within=PATIENCE, what=f"{self.name}: {what}")
        assert condition(), f"{self.name} ended with {self.exit_code} before: {what}"

    async def killed(self) -> None:
        """Wait until its fault has killed it."""
        code = await self.wait()
        assert code == -signal.SIGKILL, f"{self.name} ended with {code} before its fault"

    async def halted(self) -> None:
        """Wait until its fault has stopped it."""
        await self.until(lambda: self.stopped, "a fault stops it")
