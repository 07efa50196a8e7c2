"""Engine, policy, tokenizer and environment, reduced to what the protocol can see of them.

A policy's weights *are* the list of the groups it was trained on, step by step, so that whoever looks at a committed
adapter sees what went into it. An engine's logprobs depend on the adapter's bytes, so that the product's own truth
check finds a token that another version sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.engines.base import EngineHealth, Generation, Sampling
from actors.environment import StepResult
from actors.rewards import Score
from actors.workload import Workload
from broker import faults
from broker.errors import AdapterError, AdapterNotLoaded
from broker.messages import AdapterRef, Floats, Head
from broker.runspec import RunSpec
from broker.store import Store
from broker.trajectories import Row
from learner.packing import TokenSequence

TOKENS = 3
EOS = 2

History = list[list[str]]
"""The groups of each optimizer step, in the order they were trained."""


def history_of(weights: bytes) -> History:
    """The steps that made these weights. Raises ValueError when they are none."""
    found: History = json.loads(weights)
    return found


def logprob(digest: str, tokens: npt.NDArray[np.int32]) -> Floats:
    """Logprobs of `tokens` under the adapter with this sha256 (empty: the base model), float32 [n]."""
    base = int(hashlib.sha256(digest.encode()).hexdigest()[:6], 16) / 2**24
    return (-1.0 - base - tokens.astype(np.float32) / 64).astype(np.float32)


@dataclass
class Stats:
    """What the learner reads of a step."""

    loss: float = 0.0
    grad_norm: float = 0.0
    ratio_mean: float = 1.0
    clip_low_fraction: float = 0.0
    clip_high_fraction: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    entropy: float = 0.0
    lr: float = 0.0
    stepped: bool = True
    trained_tokens: int = 0
    computed_tokens: int = 0
    packed_fill: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0.0


class PlayedPolicy:
    """Weights and optimizer are histories; a step appends its groups to both."""

    dtype_name = "float32"

    def __init__(self) -> None:
        self.weights: History = []
        self.optimizer: History = []

    def train_step(self, sequences: Sequence[TokenSequence], *, progress: Callable[[str], None], **_: Any) -> Stats:
        groups = list(dict.fromkeys(sequence.group for sequence in sequences))
        progress("after_backward")
        if groups:
            self.weights = [*self.weights, groups]
            self.optimizer = [*self.optimizer, groups]
        progress("after_optimizer")
        return Stats()

    def adapter_bytes(self) -> bytes:
        return json.dumps(self.weights).encode()

    def optimizer_bytes(self) -> bytes:
        return json.dumps(self.optimizer).encode()

    def load_adapter_bytes(self, data: bytes) -> None:
        self.weights = history_of(data)

    def load_optimizer_bytes(self, data: bytes) -> None:
        self.optimizer = history_of(data)

    def score(self, rows: Sequence[Row], adapter: bytes | None) -> list[Floats]:
        digest = hashlib.sha256(adapter).hexdigest() if adapter is not None else ""
        return [logprob(digest, row.ids[row.trained]) for row in rows]


class PlayedEngine:
    """Serves any adapter it has loaded, after a while."""

    def __init__(self, slots: int, seconds: Callable[[], float]) -> None:
        self.slots = slots
        self._seconds = seconds
        self.loaded: dict[str, str] = {}
        self.failing_loads = 0
        self.load_seconds = 0.0
        self.most_loaded = 0
        self._running: dict[str, asyncio.Event] = {}
        self._adapters: dict[str, str | None] = {}

    async def load_adapter(self, name: str, directory: Path) -> None:
        await asyncio.sleep(self.load_seconds + self._seconds() / 4)
        if self.failing_loads > 0:
            self.failing_loads -= 1
            raise AdapterError("the engine does not like it")
        if name not in self.loaded and len(self.loaded) >= self.slots:
            raise AdapterError(f"no slot is free of {self.slots}")
        self.loaded[name] = directory.name
        self.most_loaded = max(self.most_loaded, len(self.loaded))

    async def unload_adapter(self, name: str) -> None:
        while any(adapter == name for adapter in self._adapters.values()):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.05)
        self.loaded.pop(name, None)

    async def generate(
        self, request_id: str, adapter: str | None, prompt: npt.NDArray[np.int32], sampling: Sampling
    ) -> Generation:
        if adapter is not None and adapter not in self.loaded:
            raise AdapterNotLoaded(f"{adapter} is not loaded")
        digest = self.loaded[adapter] if adapter is not None else ""
        self._adapters[request_id] = adapter
        cancelled = self._running[request_id] = asyncio.Event()
        try:
            async with asyncio.timeout(self._seconds()):
                await cancelled.wait()
        except TimeoutError:
            pass
        finally:
            del self._running[request_id]
            del self._adapters[request_id]
        seed = (sampling.seed or 0) + len(prompt)
        tokens = np.asarray([(seed >> shift) % 60 + 3 for shift in range(TOKENS - 1)] + [EOS], dtype=np.int32)
        finish = "cancelled" if cancelled.is_set() else "stop"
        return Generation(tokens, logprob(digest, tokens), finish, adapter, 0)  # type: ignore[arg-type]

    async def cancel(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    async def health(self) -> EngineHealth:
        return EngineHealth(True, "", tuple(self.loaded), self.slots, len(self._running), 0, 512, 4096, 0, 0)


class PlayedCache:
    """The replica's adapter cache without a disk: a blob's place is its sha256."""

    place = Path("/nowhere")

    def __init__(self, store: Store) -> None:
        self._store = store

    async def fetch(self, ref: AdapterRef) -> Path:
        history_of(await self._store.get(ref.blob))
        faults.reached("replica.fetched")
        return self.place / ref.sha256

    def keep(self, needed: object) -> None:
        return

    clear = sweep_abandoned = touch = lambda self: None


class PlayedTokenizer:
    """Bytes are tokens."""

    eos_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return [byte % 60 + 3 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(int(token) % 26 + 97) for token in ids)


class PlayedEnvironment:
    """One reply; its reward depends on what was sampled. Some episodes take long, some fail."""

    def __init__(self, trouble: Callable[[], Awaitable[None]]) -> None:
        self._trouble = trouble

    async def reset(self, task: dict[str, Any], seed: int) -> str:
        return str(task["prompt"])

    async def step(self, reply: str) -> StepResult:
        await self._trouble()
        return StepResult(done=True, reward=float(sum(map(ord, reply)) % 3))


class PlayedRewards:
    async def score(self, *, completions: Sequence[Any], **_: Any) -> list[Score]:
        return [Score(reward=0.0, parts={}) for _ in completions]


class PlayedWorkloads:
    """Every run can be worked for."""

    def __init__(self, spec: RunSpec, trouble: Callable[[], Awaitable[None]]) -> None:
        self._spec = spec
        self._trouble = trouble
        self.refused: dict[str, str] = {}
        self.code: dict[str, str] = {}

    def of(self, head: Head) -> Workload:
        async def make() -> PlayedEnvironment:
            return PlayedEnvironment(self._trouble)

        factory: Any = _Factory(make, PlayedRewards())
        return Workload(
            run=head.run, incarnation=head.incarnation, spec=self._spec, factory=factory, evaluation=factory
        )


@dataclass(frozen=True)
class _Factory:
    make: Callable[[], Awaitable[PlayedEnvironment]]
    rewards: PlayedRewards
