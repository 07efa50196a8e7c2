"""What a commit stores beside the weights: enough to go on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import msgspec

from broker.messages import BlobRef, Message


class TrainedGroup(msgspec.Struct, frozen=True):
    """One group of a step, and the very bytes that were trained on."""

    id: str
    blob: BlobRef


class Arithmetic(msgspec.Struct, frozen=True):
    """What decides the last bits of a step's numbers beside its inputs."""

    torch: str
    """The release of torch."""
    device: str
    """`cpu`, or the name of the GPU."""
    threads: int
    """CPU threads: sums are split among them."""

    def __str__(self) -> str:
        return f"torch {self.torch} on {self.device}, {self.threads} threads"


class Checkpoint(Message, frozen=True, kw_only=True, tag="checkpoint"):
    """The state of a run after `step`. A LoRA state is megabytes, so every step has one."""

    run: str
    incarnation: str
    step: int
    version: int
    """The newest published version."""
    weights: BlobRef
    optimizer: BlobRef | None
    """None: a run that was branched without its origin's optimizer begins with a fresh one."""
    ledger: dict[str, Any]
    rewards: list[float]
    """Mean reward of each step so far."""
    tails: dict[str, Any] = {}
    """Lengths and durations of the groups closed so far, by what became of them."""
    trained: list[TrainedGroup]
    """The groups this step was made from, in the order they were packed; those without signal are among them."""
    previous: BlobRef | None = None
    """The checkpoint that this step started from; None for an incarnation's first. It leads back to every step's."""
    spec: dict[str, Any] = {}
    """The configuration that this step was made under."""
    arithmetic: Arithmetic | None = None
    """What computed it."""
    record: dict[str, float] = {}
    """The step's line of `steps.jsonl`, for the learner that goes on after one that died before it wrote it."""
    seconds: float
    """Time the run has taken so far, over all its learners."""
