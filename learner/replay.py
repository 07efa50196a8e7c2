"""The replay: trains a run's recorded groups again from its start, and compares the bytes of every step.

When each step is bit-identical, the weights are those of an undisturbed run over the same groups in the same order,
whatever was killed, stalled or delivered twice on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import safetensors.numpy

from broker.adapters import adapter_config
from broker.errors import ConfigError, ObjectMissing, ReplayMismatch, RunConflict
from broker.messages import BlobRef, Head
from broker.models import ModelFiles
from broker.runspec import RunSpec
from broker.store import Store
from broker.trajectories import Group
from learner.branch import FIRST
from learner.checkpoint import Arithmetic, Checkpoint, TrainedGroup
from learner.lineage import lineage
from learner.training import arithmetic, new_policy, train

if TYPE_CHECKING:
    from learner.model import Policy


@dataclass(frozen=True, slots=True)
class StepMade:
    """Adapter and optimizer after a step, as the bytes that a commit stores."""

    adapter: bytes
    optimizer: bytes


@dataclass(frozen=True, slots=True)
class StepReplayed:
    """One step made again, beside what was committed."""

    step: int
    version: int
    groups: list[str]
    adapter: str
    """sha256 of the adapter made again."""
    optimizer: str
    difference: str
    """How it differs from the commit; empty when both are bit-identical."""

    @property
    def identical(self) -> bool:
        return not self.difference

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "groups": self.groups,
            "adapter": self.adapter,
            "optimizer": self.optimizer,
            "identical": self.identical,
            "difference": self.difference,
        }


class Maker(Protocol):
    """Makes steps one after the other. Its methods block."""

    def make(self, groups: Sequence[Group], checkpoint: Checkpoint) -> StepMade:
        """The step that follows the last one, of `groups`, under the configuration that `checkpoint` records."""
        ...

    def go_on_from(self, made: StepMade) -> None:
        """The next step starts from here."""
        ...

    def begin_from(self, adapter: bytes, optimizer: bytes | None) -> None:
        """The first step starts from here, not from a fresh policy; `optimizer` None: but with a fresh optimizer."""
        ...

    def arithmetic(self) -> Arithmetic: ...


class Retrainer:
    """Makes steps as a learner does, beginning with a fresh policy."""

    def __init__(self, directory: Path, model_name: str) -> None:
        self._directory = directory
        self._model_name = model_name
        self._policy: Policy
        self._made_for: object = None
        self._start: tuple[bytes, bytes | None] | None = None
        self._head = 0
        """The version that the next step starts from."""

    def make(self, groups: Sequence[Group], checkpoint: Checkpoint) -> StepMade:
        spec = msgspec.convert(checkpoint.spec, RunSpec)
        threads = checkpoint.arithmetic.threads if checkpoint.arithmetic else None
        settings = (
            spec.run.dtype,
            spec.lora,
            spec.optimizer,
            spec.sampling.temperature,
            spec.algorithm.teacher,
            threads,
        )
        if settings != self._made_for:
            # A run that was resumed under another configuration went on like this too: a new policy, the old state.
            state = self._state() if self._made_for else None
            self._policy = new_policy(spec, self._directory, model_name=self._model_name, threads=threads)
            self._made_for = settings
            if state is not None:
                self.go_on_from(state)
            elif self._start is not None:
                adapter, optimizer = self._start
                self._policy.load_adapter_bytes(adapter)
                if optimizer is not None:
                    self._policy.load_optimizer_bytes(optimizer)
        train(self._policy, groups, spec, self._head)
        self._head = checkpoint.version
        return self._state()

    def _state(self) -> StepMade:
        return StepMade(self._policy.adapter_bytes(), self._policy.optimizer_bytes())

    def begin_from(self, adapter: bytes, optimizer: bytes | None) -> None:
        self._start, self._head = (adapter, optimizer), FIRST

    def go_on_from(self, made: StepMade) -> None:
        self._policy.load_adapter_bytes(made.adapter)
        self._policy.load_optimizer_bytes(made.optimizer)

    def arithmetic(self) -> Arithmetic:
        return arithmetic()


async def recorded_steps(store: Store, head: Head) -> list[Checkpoint]:
    """Every commit of a run's present incarnation, oldest first; a branched run's first is its step 0, its start.

    Raises ConfigError before the first step, ObjectMissing when a commit was swept, and ReplayMismatch when a group
    was trained on twice or a step is missing.
    """
    found: list[Checkpoint] = []
    try:
        async for _, checkpoint in lineage(store, head.checkpoint):
            found.insert(0, checkpoint)
    except ObjectMissing as error:
        oldest = f"the one before step {found[0].step}" if found else "the newest one"
        raise ObjectMissing(
            f"run {head.run} cannot be replayed: of its commits {oldest} is gone ({error}). Only a run whose commits "
            "and trained groups are all kept can be (storage.keep_versions = 0, and within keep_groups_hours)"
        ) from error
    if not any(checkpoint.step for checkpoint in found):
        raise ConfigError(f"run {head.run} has made no step yet, so there is nothing to replay")
    if problem := history_problem(found):
        raise ReplayMismatch(f"run {head.run}: {problem}")
    return found


def history_problem(steps: Sequence[Checkpoint]) -> str | None:
    """What is wrong with a history: a step that is missing, a group that was trained on twice. Pure."""
    numbers = [checkpoint.step for checkpoint in steps if checkpoint.step]
    if numbers != list(range(1, len(numbers) + 1)):
        return f"its commits are the steps {numbers}, not 1 to {len(numbers)}"
    seen: dict[str, int] = {}
    for checkpoint in steps:
        for group in checkpoint.trained:
            if group.id in seen:
                return f"group {group.id} is in step {seen[group.id]} and again in step {checkpoint.step}"
            seen[group.id] = checkpoint.step
    return None


async def replay(
    store: Store,
    head: Head,
    model: ModelFiles,
    *,
    on_step: Callable[[StepReplayed], None] = lambda step: None,
    maker: Maker | None = None,
) -> list[StepReplayed]:
    """Make every step of a run again from its recorded groups; `on_step` is told of each.

    A step that differs is reported, and the next one starts from what was committed: each is judged by itself.

    Raises RunConflict when `model` is not the run's, ObjectMissing when a commit or a trained group was swept, and
    what `recorded_steps` raises.
    """
    if model.fingerprint != head.model:
        raise RunConflict(
            f"run {head.run} was created on the base model {head.model}, {model.directory} is {model.fingerprint}; "
            "name the run's own with --model"
        )
    steps = await recorded_steps(store, head)
    start = steps.pop(0) if steps[0].step == 0 else None
    name = str(adapter_config(await _get(store, head, steps[0].weights))["base_model_name_or_path"])
    maker = maker or Retrainer(model.directory, name)
    if start is not None:
        optimizer = await _get(store, head, start.optimizer) if start.optimizer is not None else None
        maker.begin_from(await _get(store, head, start.weights), optimizer)
    replayed = []
    with ThreadPoolExecutor(1, thread_name_prefix="train") as compute:
        loop = asyncio.get_running_loop()
        for checkpoint in steps:
            groups = await asyncio.gather(*(_group(store, head, group) for group in checkpoint.trained))
            made = await loop.run_in_executor(compute, maker.make, groups, checkpoint)
            difference = ""
            refs = [ref for ref in (checkpoint.weights, checkpoint.optimizer) if ref is not None]
            if [_sha256(made.adapter), _sha256(made.optimizer)] != [ref.sha256 for ref in refs]:
                committed = StepMade(*[await _get(store, head, ref) for ref in refs])
                here = await loop.run_in_executor(compute, maker.arithmetic)
                difference = differences(made, committed, here, checkpoint.arithmetic)
                await loop.run_in_executor(compute, maker.go_on_from, committed)
            step = StepReplayed(
                step=checkpoint.step,
                version=checkpoint.version,
                groups=[group.id for group in checkpoint.trained],
                adapter=_sha256(made.adapter),
                optimizer=_sha256(made.optimizer),
                difference=difference,
            )
            replayed.append(step)
            on_step(step)
    return replayed


def require_identical(run: str, steps: Sequence[StepReplayed]) -> None:
    """Raise ReplayMismatch that names every step which is not what its groups make."""
    wrong = [f"step {step.step} ({step.difference})" for step in steps if not step.identical]
    if wrong:
        raise ReplayMismatch(
            f"run {run}: {len(wrong)} of {len(steps)} steps are not what their recorded groups make: {'; '.join(wrong)}"
        )


def differences(made: StepMade, committed: StepMade, here: Arithmetic, there: Arithmetic | None) -> str:
    """How two states differ, in words, and whether other arithmetic may be why. Pure."""
    parts = [
        f"{name}: {_difference(ours, theirs)}"
        for name, ours, theirs in (
            ("adapter", made.adapter, committed.adapter),
            ("optimizer", made.optimizer, committed.optimizer),
        )
        if ours != theirs
    ]
    if there != here:
        parts.append(f"computed then by {there or 'something unrecorded'}, now by {here}, so the last bits may differ")
    return ", ".join(parts)


def _difference(ours: bytes, theirs: bytes) -> str:
    """How two safetensors blobs differ."""
    made, committed = safetensors.numpy.load(ours), safetensors.numpy.load(theirs)
    if made.keys() != committed.keys():
        return "other tensors"
    apart = {
        name: float(np.abs(made[name].astype(np.float64) - committed[name].astype(np.float64)).max(initial=0.0))
        if made[name].shape == committed[name].shape
        else float("inf")
        for name in made
        if made[name].shape != committed[name].shape or made[name].tobytes() != committed[name].tobytes()
    }
    if not apart:
        return "the same tensors under another header"
    return f"{len(apart)} of {len(made)} tensors, by up to {max(apart.values()):.2g}"


async def _group(store: Store, head: Head, trained: TrainedGroup) -> Group:
    return Group.from_blob(await _get(store, head, trained.blob))


async def _get(store: Store, head: Head, ref: BlobRef) -> bytes:
    try:
        return await store.get(ref)
    except ObjectMissing as error:
        raise ObjectMissing(
            f"run {head.run} cannot be replayed: {ref.key} is gone. Trained groups are kept for "
            "storage.keep_groups_hours, commits while storage.keep_versions is 0"
        ) from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
