"""A policy that computes with all processes of a node, behind the interface of one.

The first process has the run: its policy tells the others of each call before it makes it, and they make the same. What
is told is msgpack: nothing is unpickled here either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from broker.errors import RunFailed
from broker.messages import Floats, Ids, pack_floats, pack_ids, unpack_floats, unpack_ids
from broker.models import ModelFiles
from broker.runspec import AlgorithmSection, RunSpec
from broker.trajectories import Row
from learner.model import Policy, StepStats
from learner.packing import TokenSequence
from learner.sharding import Shards, processes
from learner.training import new_policy

log = logging.getLogger(__name__)

CURRENT: Literal["current"] = "current"


class PlainSequence(msgspec.Struct, frozen=True):
    """A `TokenSequence` as bytes."""

    token_ids: bytes
    behaviour: bytes
    trained: bytes
    advantage: float
    group: str
    weight: float
    staleness: bytes | None
    episode: str

    @classmethod
    def of(cls, sequence: TokenSequence) -> PlainSequence:
        return cls(
            pack_ids(sequence.token_ids),
            pack_floats(sequence.behaviour),
            sequence.trained.astype(np.uint8).tobytes(),
            sequence.advantage,
            sequence.group,
            sequence.weight,
            None if sequence.staleness is None else pack_ids(sequence.staleness),
            sequence.episode,
        )

    def whole(self) -> TokenSequence:
        return TokenSequence(
            unpack_ids(self.token_ids),
            unpack_floats(self.behaviour),
            np.frombuffer(self.trained, dtype=np.uint8).astype(np.bool_),
            self.advantage,
            self.group,
            self.weight,
            None if self.staleness is None else unpack_ids(self.staleness),
            self.episode,
        )


class Train(msgspec.Struct, frozen=True, tag=True):
    sequences: list[PlainSequence]
    token_budget: int
    algorithm: AlgorithmSection


class Score(msgspec.Struct, frozen=True, tag=True):
    rows: list[Row]
    adapter: bytes | None
    current: bool


class NextLogprobs(msgspec.Struct, frozen=True, tag=True):
    prompts: list[bytes]
    adapter: bytes | None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    data: bytes


class LoadOptimizer(msgspec.Struct, frozen=True, tag=True):
    data: bytes


class End(msgspec.Struct, frozen=True, tag=True):
    """The first process has no more to do."""


Call = Train | Score | NextLogprobs | LoadAdapter | LoadOptimizer | End


class LeadingPolicy(Policy):
    """The first process's policy. Every call that computes or changes weights is made by all."""

    def __init__(self, *arguments: Any, shards: Shards, **options: Any) -> None:
        self._others: Shards | None = None  # they make what a new policy proves of themselves
        super().__init__(*arguments, shards=shards, **options)
        self._others = shards

    def _tell(self, call: Call) -> None:
        if self._others is not None:
            self._others.tell(msgspec.msgpack.encode(call))

    def train_step(
        self,
        sequences: Sequence[TokenSequence],
        *,
        token_budget: int,
        algorithm: AlgorithmSection,
        progress: Callable[[str], None] = lambda label: None,
    ) -> StepStats:
        self._tell(Train([PlainSequence.of(sequence) for sequence in sequences], token_budget, algorithm))
        return super().train_step(sequences, token_budget=token_budget, algorithm=algorithm, progress=progress)

    def score(self, rows: Sequence[Row], adapter: bytes | Literal["current"] | None = CURRENT) -> list[Floats]:
        blob = adapter if isinstance(adapter, bytes) else None
        self._tell(Score(list(rows), blob, adapter == CURRENT))
        return super().score(rows, adapter)

    def next_logprobs(self, prompts: Sequence[Ids], adapter: bytes | None) -> npt.NDArray[np.float32]:
        self._tell(NextLogprobs([pack_ids(prompt) for prompt in prompts], adapter))
        return super().next_logprobs(prompts, adapter)

    def load_adapter_bytes(self, data: bytes) -> None:
        self._tell(LoadAdapter(data))
        super().load_adapter_bytes(data)

    def load_optimizer_bytes(self, data: bytes) -> None:
        self._tell(LoadOptimizer(data))
        super().load_optimizer_bytes(data)

    def close(self) -> None:
        """Let the others go."""
        self._tell(End())


def follow(policy: Policy, shards: Shards) -> None:
    """Make the first process's calls until it ends, or until a step fails: that is for the first process to tell."""
    while True:
        call = msgspec.msgpack.decode(shards.hear(), type=Call)
        try:
            match call:
                case Train():
                    sequences = [sequence.whole() for sequence in call.sequences]
                    policy.train_step(sequences, token_budget=call.token_budget, algorithm=call.algorithm)
                case Score():
                    policy.score(call.rows, CURRENT if call.current else call.adapter)
                case NextLogprobs():
                    policy.next_logprobs([unpack_ids(prompt) for prompt in call.prompts], call.adapter)
                case LoadAdapter():
                    policy.load_adapter_bytes(call.data)
                case LoadOptimizer():
                    policy.load_optimizer_bytes(call.data)
                case End():
                    return
        except RunFailed as error:
            log.error("process %d ends: %s", shards.rank, error)
            return


@dataclass(slots=True)
class PolicyLoader:
    """Makes the policy of a run: alone, or with the node's other processes."""

    spec: RunSpec
    model: ModelFiles
    threads: int | None = None
    shards: Shards | None = None
    leading: Policy | None = None

    @classmethod
    def join(cls, spec: RunSpec, model: ModelFiles, threads: int | None = None) -> PolicyLoader:
        """Meet the node's other processes, if torchrun started any."""
        return cls(spec, model, threads, Shards.join() if processes() > 1 else None)

    @property
    def leads(self) -> bool:
        """Whether this process has the run; the others `follow`."""
        return self.shards is None or self.shards.rank == 0

    def __call__(self) -> Policy:
        if self.shards is None:
            return self._new(Policy)
        if self.shards.rank > 0:
            return self._new(partial(Policy, shards=self.shards))
        self.leading = self._new(partial(LeadingPolicy, shards=self.shards))
        return self.leading

    def _new(self, make: Callable[..., Policy]) -> Policy:
        return new_policy(
            self.spec, self.model.directory, model_name=self.model.public_name, threads=self.threads, make=make
        )

    def follow(self) -> None:
        """What a process that does not lead does, to its end."""
        assert self.shards is not None
        follow(self(), self.shards)
        self.shards.leave()

    def close(self) -> None:
        """Let the other processes go."""
        if isinstance(self.leading, LeadingPolicy) and self.shards is not None:
            self.leading.close()
            self.shards.leave()
