"""What an actor knows of one run: its configuration, its environment, and whether the actor may work for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from actors.environment import EnvironmentFactory, load_environment
from broker.code import source_hash
from broker.errors import ConfigError, FarflungError
from broker.messages import Head
from broker.runspec import RunSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workload:
    """One incarnation of a run, ready to work on."""

    run: str
    incarnation: str
    spec: RunSpec
    factory: EnvironmentFactory
    evaluation: EnvironmentFactory
    """What its evaluations use: the same environment, and rewards of their own if the run names any."""


class Workloads:
    """The workloads of an actor, prepared once per epoch of a run. A run it cannot work for is left alone, and said."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._ready: dict[str, Workload] = {}
        self.refused: dict[str, str] = {}
        """Runs this actor takes no tasks of, with the reason."""
        self._judged: dict[str, tuple[str, int]] = {}
        self.code: dict[str, str] = {}
        """Source hashes of the code in use."""

    def of(self, head: Head) -> Workload | None:
        """The workload of `head`'s run, None when this actor cannot work for it."""
        # A learner that resumes may bring a changed configuration or mended code: each epoch is judged anew.
        if self._judged.get(head.run) != (head.incarnation, head.epoch):
            self._judged[head.run] = (head.incarnation, head.epoch)
            self._ready.pop(head.run, None)
            self.refused.pop(head.run, None)
            try:
                self._ready[head.run] = self._prepare(head)
            except FarflungError as error:
                self.refused[head.run] = str(error)
                log.warning("no tasks of run %s are taken: %s", head.run, error)
        return self._ready.get(head.run)

    def _prepare(self, head: Head) -> Workload:
        try:
            spec = msgspec.convert(head.spec, RunSpec)
        except msgspec.ValidationError as error:
            raise ConfigError(f"its configuration is not of this release: {error}") from error
        for name, expected in head.code.items():
            found = source_hash(name, self._roots)
            if found != expected:
                raise ConfigError(
                    f"{name} here has the source hash {found}, the learner's has {expected}; "
                    "give this actor the same files with --code"
                )
            self.code[name] = found
        factory = load_environment(spec.environment, spec.tasks, self._roots)
        evaluation = load_environment(spec.evaluation_environment, spec.tasks, self._roots)
        return Workload(run=head.run, incarnation=head.incarnation, spec=spec, factory=factory, evaluation=evaluation)
