"""The command line as a person runs it: processes of their own, a home of its own, and a run's configuration file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PATIENCE = 240.0
"""Seconds that a command gets before it counts as hung: several times what it takes on two busy cores."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of its output."""
        return json.loads(self.out.strip().splitlines()[-1])


class Command:
    """A command that runs."""

    def __init__(self, arguments: list[str], *, home: Path, log: Path, wrapper: Sequence[str] = ()) -> None:
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = psutil.Popen(
                [*wrapper, sys.executable, "-m", "deploy.cli", *arguments],
                cwd=home,
                env=environment(home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def descendants(self) -> list[psutil.Process]:
        """The processes it has started that still run."""
        return list(self._process.children(recursive=True))

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, within: float = PATIENCE) -> Ended:
        """Wait for its end; a command that is not done by then is killed, and fails the test with what it said."""
        try:
            code = self._process.wait(within)
        except psutil.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended within {within:.0f} s:\n{self.out[-2000:]}\n{self.err[-2000:]}") from None
        return Ended(code, self.out, self.err)

    def until(self, condition: Callable[[], object], what: str, within: float = PATIENCE) -> None:
        """Return once `condition` holds; fail when the command ends before, or when it takes too long."""
        deadline = time.monotonic() + within
        while not condition():
            if not self.running or time.monotonic() > deadline:
                state = "not within the time" if self.running else "the command ended first"
                raise AssertionError(f"{what}: {state}\n{self.out[-2000:]}\n{self.err[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it, and whatever it has started, the hard way."""
        if self.running:
            for process in [*self.descendants(), self._process]:
                process.kill()
            self._process.wait()


class Home:
    """A folder in which commands run, with the configuration and the cache that are usually the user's."""

    def __init__(self, directory: Path, wrapper: Sequence[str] = ()) -> None:
        self.directory = directory
        self._wrapper = wrapper
        self._started: list[Command] = []
        directory.mkdir(parents=True, exist_ok=True)

    def start(self, *arguments: object) -> Command:
        """Start `farflung` with `arguments`."""
        log = self.directory / f"command-{len(self._started)}"
        command = Command(
            [str(argument) for argument in arguments], home=self.directory, log=log, wrapper=self._wrapper
        )
        self._started.append(command)
        return command

    def farflung(self, *arguments: object) -> Ended:
        """Run `farflung` with `arguments` to its end."""
        return self.start(*arguments).wait()

    def close(self) -> None:
        """End whatever a failed test left running."""
        for command in self._started:
            command.kill()

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def write_run(self, name: str, model: Path, **sections: Mapping[str, object]) -> Path:
        """Write the configuration of a small run: 1 actor, few short episodes, and what `sections` say otherwise."""
        plain: dict[str, dict[str, object]] = {
            "run": {"name": name, "model": str(model)},
            "tasks": {"source": "tasks.jsonl"},
            "environment": {"rewards": ["reward.py:low_letters"]},
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"group_size": 8, "groups_per_step": 4, "max_staleness": 1},
            "optimizer": {"lr": 1e-2},
            "fleet": {"actors": 1},
        }
        for section, changes in sections.items():
            plain[section] = {**plain.get(section, {}), **changes}
        return self.write(f"{name}.toml", to_toml(plain))


def environment(home: Path) -> dict[str, str]:
    """The environment of a user whose home is `home`, with nothing of Farflung's set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARFLUNG_", "AWS_", "OTEL_"))}
    return {**kept, "XDG_CONFIG_HOME": str(home / "config"), "FARFLUNG_CACHE": str(home / "cache")}


def to_toml(plain: Mapping[str, Mapping[str, object]]) -> str:
    """TOML of sections of plain values."""
    lines = []
    for section, values in plain.items():
        lines += [f"[{section}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def read_steps(run_directory: Path) -> list[dict[str, Any]]:
    """What a run's learner has logged of its steps so far, whole lines only."""
    path = run_directory / "steps.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def made_step(run_directory: Path, step: int) -> bool:
    """Whether the run has logged `step`."""
    return any(record["step"] >= step for record in read_steps(run_directory))
