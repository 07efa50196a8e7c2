"""The child processes of `farflung up`: started, watched, started again when they crash, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.parent import die_with_parent
from deploy.processes import cores

RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""How long to wait before the next start, by the number of crashes in a row."""

STEADY_SECONDS = 60.0
"""A child that lived this long has not crashed "in a row"."""

ELSEWHERE = frozenset({"FARFLUNG_NATS", "FARFLUNG_S3", "FARFLUNG_PROFILE"})
"""Not handed on to a child: its `--profile` says where broker and store are."""


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads for the learner and for each actor when they share a machine."""

    learner: int
    actor: int


def share_cores(total: int, actors: int) -> Threads:
    """Divide `total` cores: half to the learner, the rest among the actors, at least one each.

    Compute threads beyond the cores would spin against each other, so nobody gets all of them.
    """
    learner = max(1, total // 2)
    return Threads(learner=learner, actor=max(1, (total - learner) // actors))


def thread_environment(threads: int) -> dict[str, str]:
    """Environment that keeps numeric libraries to `threads` threads, and lets idle ones sleep, not spin."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Child:
    """One component as a process of its own, with its output in a file."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.log = log
        self._arguments = [sys.executable, "-m", "deploy.cli", *arguments]
        inherited = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
        self._environment = {**inherited, **(environment or {})}
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._crashes = 0
        self._next_start = 0.0
        self.exit_code: int | None = None

    def forget(self, argument: str) -> None:
        """From now on it is started without `argument`, which was for one start only."""
        if argument in self._arguments:
            self._arguments.remove(argument)

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._arguments,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only makes one system call
            )
        self._started = self._clock()
        self.exit_code = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def poll(self) -> int | None:
        """The exit code of a child that ended, once; None while it runs or waits to be started again."""
        if self._process is None or self.exit_code is not None:
            return None
        self.exit_code = self._process.poll()
        if self.exit_code is None:
            return None
        self._crashes = 1 if self._clock() - self._started > STEADY_SECONDS else self._crashes + 1
        self._next_start = self._clock() + RESTART_SECONDS[min(self._crashes, len(RESTART_SECONDS)) - 1]
        return self.exit_code

    def restart_if_due(self) -> bool:
        """Start again a child that ended, once its waiting time is over."""
        if self.exit_code is None or self._clock() < self._next_start:
            return False
        self.start()
        return True

    def last_lines(self, count: int = 3) -> str:
        """The end of its output, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-count:])

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def end_all(children: Sequence[Child], grace: float = 15.0) -> None:
    """SIGTERM to all, then SIGKILL to those that are still there after `grace` seconds."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(child.alive for child in children):
        time.sleep(0.05)
    for child in children:
        child.kill()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


__all__ = ["Child", "Threads", "cores", "describe_exit", "end_all", "share_cores", "thread_environment"]
