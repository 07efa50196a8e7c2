"""A run's policy and its steps, made one way, so that a replay computes what the learner computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from broker.models import resolve
from broker.runspec import RunSpec
from broker.trajectories import Group
from learner.batch import sequences_of
from learner.checkpoint import Arithmetic

if TYPE_CHECKING:
    from learner.model import Policy, StepStats


def new_policy(
    spec: RunSpec,
    directory: Path,
    *,
    model_name: str,
    threads: int | None,
    make: Callable[..., Policy] | None = None,
) -> Policy:
    """The policy of a run before its first step; the model lies in `directory`. Raises ModelError."""
    from learner.model import Policy

    teacher = spec.algorithm.teacher
    return (make or Policy)(
        directory,
        model_name=model_name,
        lora=spec.lora,
        optimizer=spec.optimizer,
        temperature=spec.sampling.temperature,
        dtype=spec.run.dtype,
        seed=spec.run.seed,
        threads=threads,
        teacher_dir=resolve(teacher).directory if teacher else None,
    )


def train(
    policy: Policy,
    groups: Sequence[Group],
    spec: RunSpec,
    head: int,
    *,
    progress: Callable[[str], None] = lambda label: None,
) -> StepStats:
    """The optimizer step from version `head` that `spec` makes of `groups`, in their order.

    Raises RunFailed; see `Policy.train_step`.
    """
    return policy.train_step(
        sequences_of(groups, spec, head),
        token_budget=spec.optimizer.token_budget,
        algorithm=spec.algorithm,
        progress=progress,
    )


def arithmetic() -> Arithmetic:
    """What computes here. Ask in the thread that trains."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Arithmetic(torch=str(torch.__version__), device=device, threads=torch.get_num_threads())
