"""An engine and a policy that compute nothing, yet know which adapter is which: for runs of real services in one loop.

A version's weights are one number. A reply's logprobs tell it, and the policy's scores expect it, so that the learner's
truth check fails when another adapter has answered than the one that was recorded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as read_tensors
from safetensors.numpy import save

from actors.engines.base import EngineHealth, Generation, Sampling
from broker.errors import AdapterNotLoaded
from broker.trajectories import Row
from learner.model import StepStats
from tests.tiny import EOS


def adapter_of(weight: float) -> bytes:
    """An adapter blob whose only weight is `weight`."""
    return save({"weight": np.asarray([weight], np.float32)}, {"adapter_config": json.dumps({"peft_type": "LORA"})})


def logprob_of(weight: float) -> float:
    """The logprob of every token that this weight samples."""
    return -1.0 - weight / 16


class StubEngine:
    """Answers three tokens at once. `load` decides how loading goes: it may wait, or raise."""

    def __init__(self, slots: int = 8, load: Callable[[str], Any] | None = None) -> None:
        self.slots = slots
        self.load = load
        self.weights: dict[str | None, float] = {None: 0.0}
        self.loading: list[str] = []
        """Names whose loading was begun, in order."""
        self.served: list[str | None] = []
        """The adapter of every request that was answered."""
        self.strangers: list[str | None] = []
        """Adapters that were asked for and not there."""

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def load_adapter(self, name: str, directory: Path) -> None:
        self.loading.append(name)
        if self.load is not None:
            await self.load(name)
        self.weights[name] = float(read_tensors((directory / "adapter_model.safetensors").read_bytes())["weight"][0])

    async def unload_adapter(self, name: str) -> None:
        self.weights.pop(name, None)

    async def generate(self, request_id: str, adapter: str | None, prompt: Any, sampling: Sampling) -> Generation:
        if adapter not in self.weights:
            self.strangers.append(adapter)
            raise AdapterNotLoaded(f"{adapter} is not loaded")
        self.served.append(adapter)
        await asyncio.sleep(0)
        letter = 3 + (sampling.seed or 0) % 26
        logprobs = np.full(3, logprob_of(self.weights[adapter]), np.float32)
        return Generation(np.asarray([letter, letter, EOS], np.int32), logprobs, "stop", adapter, 0)

    async def cancel(self, request_id: str) -> None:
        return None

    async def health(self) -> EngineHealth:
        names = tuple(name for name in self.weights if name is not None)
        return EngineHealth(True, "", names, self.slots, 0, 0, 512, 4096, 0, 0)


class StubPolicy:
    """Its weight is the number of steps it has made, so that every step's adapter is another."""

    dtype_name = "float32"

    def __init__(self) -> None:
        self.steps = 0.0
        self.restored: list[float] = []

    def train_step(self, sequences: Sequence[Any], **_: Any) -> StepStats:
        self.steps += 1.0
        tokens = sum(int(sequence.trained.sum()) for sequence in sequences)
        return StepStats(
            loss=0.0, grad_norm=0.0, ratio_mean=1.0, clip_low_fraction=0.0, clip_high_fraction=0.0, k1=0.0, k3=0.0,
            entropy=0.0, lr=0.0, stepped=True, trained_tokens=tokens, computed_tokens=tokens, packed_fill=1.0,
            seconds={},
        )  # fmt: skip

    def score(self, rows: Sequence[Row], adapter: bytes | None) -> list[Any]:
        weight = 0.0 if adapter is None else float(read_tensors(adapter)["weight"][0])
        return [np.full(int(row.trained.sum()), logprob_of(weight), np.float32) for row in rows]

    def adapter_bytes(self) -> bytes:
        return adapter_of(self.steps)

    def load_adapter_bytes(self, data: bytes) -> None:
        self.steps = float(read_tensors(data)["weight"][0])
        self.restored.append(self.steps)

    def optimizer_bytes(self) -> bytes:
        return json.dumps({"step": self.steps}).encode()

    def load_optimizer_bytes(self, data: bytes) -> None:
        assert json.loads(data)["step"] == self.steps, "weights and optimizer are of one step"
