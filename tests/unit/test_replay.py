"""The replay: what was committed is made again bit for bit, and what was not made of its groups is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from broker.errors import ConfigError, ObjectMissing, ReplayMismatch, RunConflict
from broker.messages import BlobRef, Head
from broker.models import ModelFiles, resolve
from broker.runspec import RunSpec
from broker.store import reference
from broker.trajectories import Episode, Group, Row
from deploy.config import check
from learner.checkpoint import Arithmetic, Checkpoint, TrainedGroup
from learner.replay import StepReplayed, history_problem, recorded_steps, replay, require_identical
from learner.training import arithmetic, new_policy, train
from tests.unit.test_learner_parts import head as some_head


class StubStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, prefix: str, data: bytes) -> BlobRef:
        ref = reference(prefix, data)
        self.objects[ref.key] = data
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        if ref.key not in self.objects:
            raise ObjectMissing(f"get {ref.key}: no such object")
        return self.objects[ref.key]


def spec_of(model: Path, **optimizer: Any) -> RunSpec:
    return check(
        {"run": {"name": "r", "model": str(model)}, "tasks": {"source": "t.jsonl"},
         "environment": {"rewards": ["r.py:f"]}, "optimizer": {"lr": 1e-2, **optimizer}, "lora": {"rank": 4}},
        "x",
    )  # fmt: skip


def group(index: int, signal: bool = True) -> Group:
    random = np.random.default_rng(index)
    prompt = random.integers(3, 259, 7)
    episodes = []
    for number in range(4):
        ids = np.concatenate([prompt, random.integers(3, 259, 5 + number)])
        mask = np.arange(len(ids)) >= len(prompt)
        row = Row.of(ids, np.where(mask, random.normal(-5, 1, len(ids)), 0), mask, np.where(mask, 0, -1))
        reward = float(number % 2) if signal else 1.0
        episodes.append(Episode(index=number, rows=[row], reward=reward, parts={}, turns=[], truncated=False,
                                replicas=["a"]))  # fmt: skip
    return Group(run="r", incarnation="i", group=f"g{index}", index=index, version=0, adapter=None, episodes=episodes)


class History:
    """A run as a learner leaves it in the store, its steps made of two groups each."""

    def __init__(self, model: ModelFiles) -> None:
        self.model = model
        self.store = StubStore()
        self.spec = spec_of(model.directory)
        self.policy = new_policy(self.spec, model.directory, model_name="named-elsewhere", threads=1)
        self.checkpoints: list[tuple[BlobRef, Checkpoint]] = []

    def resume(self, spec: RunSpec) -> None:
        """Another process goes on from the last commit, with `spec`."""
        _, last = self.checkpoints[-1]
        self.spec = spec
        self.policy = new_policy(spec, self.model.directory, model_name="named-elsewhere", threads=1)
        self.policy.load_adapter_bytes(self.store.objects[last.weights.key])
        assert last.optimizer is not None
        self.policy.load_optimizer_bytes(self.store.objects[last.optimizer.key])

    def start(self, start: Checkpoint) -> None:
        """The run was branched: it begins with the state after step 0."""
        self.checkpoints = []
        self.commit(start)
        self.policy = new_policy(self.spec, self.model.directory, model_name="named-elsewhere", threads=1)
        self.policy.load_adapter_bytes(self.store.objects[start.weights.key])
        if start.optimizer is not None:
            self.policy.load_optimizer_bytes(self.store.objects[start.optimizer.key])

    def step(self, *groups: Group) -> None:
        before = self.checkpoints[-1][1] if self.checkpoints else None
        train(self.policy, groups, self.spec, before.version if before else 0)
        number = before.step + 1 if before else 1
        self.commit(
            Checkpoint(
                run="r",
                incarnation="i",
                step=number,
                version=number,
                weights=self.store.put(f"adapters/{number}", self.policy.adapter_bytes()),
                optimizer=self.store.put(f"optimizer/{number}", self.policy.optimizer_bytes()),
                ledger={},
                rewards=[],
                trained=[
                    TrainedGroup(one.group, self.store.put(f"groups/{one.group}", one.encode())) for one in groups
                ],
                previous=self.checkpoints[-1][0] if self.checkpoints else None,
                spec=msgspec.to_builtins(self.spec),
                arithmetic=arithmetic(),
                seconds=0.0,
            )
        )

    def commit(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append((self.store.put("state", checkpoint.encode()), checkpoint))

    @property
    def head(self) -> Head:
        last = self.checkpoints[-1][0] if self.checkpoints else None
        return some_head(model=self.model.fingerprint, checkpoint=last)

    async def replay(self) -> list[StepReplayed]:
        return await replay(self.store, self.head, self.model)  # type: ignore[arg-type]


@pytest.fixture
def model(tiny_model: Path) -> ModelFiles:
    return resolve(str(tiny_model))


async def test_a_run_that_was_resumed_and_reconfigured_is_made_again_bit_for_bit(model: ModelFiles) -> None:
    history = History(model)
    history.step(group(0), group(1))
    history.step(group(2, signal=False), group(3, signal=False))
    history.resume(history.spec)
    history.step(group(4), group(5))
    history.resume(spec_of(model.directory, lr=3e-3, warmup_steps=9))
    history.step(group(6), group(7, signal=False))
    steps = await history.replay()
    assert [(step.step, step.difference) for step in steps] == [(1, ""), (2, ""), (3, ""), (4, "")]
    assert [step.adapter for step in steps] == [checkpoint.weights.sha256 for _, checkpoint in history.checkpoints]
    assert [step.groups for step in steps] == [["g0", "g1"], ["g2", "g3"], ["g4", "g5"], ["g6", "g7"]]
    require_identical("r", steps)


@pytest.mark.parametrize("fresh_optimizer", [False, True])
async def test_a_branched_run_is_made_again_from_its_origin_s_version(model: ModelFiles, fresh_optimizer: bool) -> None:
    origin = History(model)
    origin.step(group(0), group(1))
    _, last = origin.checkpoints[-1]
    history = History(model)
    history.store = origin.store
    start = replace(last, step=0, trained=[], optimizer=None if fresh_optimizer else last.optimizer)
    history.start(start)
    history.step(group(2), group(3))
    history.step(group(4), group(5))
    steps = await history.replay()
    assert [(step.step, step.difference) for step in steps] == [(1, ""), (2, "")]
    history.start(start)
    with pytest.raises(ConfigError, match="no step yet"):
        await history.replay()


async def test_a_step_that_was_not_made_of_its_groups_is_noticed_and_no_other(model: ModelFiles) -> None:
    history = History(model)
    history.step(group(0), group(1))
    train(history.policy, [group(9)], history.spec, 1)  # what no commit tells of
    history.step(group(2), group(3))
    history.step(group(4), group(5))
    steps = await history.replay()
    assert [step.identical for step in steps] == [True, False, True]
    with pytest.raises(ReplayMismatch, match=r"1 of 3 steps .* step 2 \(adapter: \d+ of \d+ tensors, by up to"):
        require_identical("r", steps)


async def test_the_order_of_the_groups_is_part_of_the_record(model: ModelFiles) -> None:
    history = History(model)
    history.step(*(group(index) for index in range(6)))
    _, there = history.checkpoints.pop()
    history.commit(replace(there, trained=there.trained[::-1]))
    [step] = await history.replay()
    assert not step.identical


async def test_an_optimizer_that_differs_alone_is_noticed(model: ModelFiles) -> None:
    history = History(model)
    history.step(group(0), group(1))
    _, there = history.checkpoints.pop()
    fresh = new_policy(history.spec, model.directory, model_name="x", threads=1)
    history.commit(replace(there, optimizer=history.store.put("optimizer/1", fresh.optimizer_bytes())))
    [step] = await history.replay()
    assert "optimizer: " in step.difference
    assert "adapter" not in step.difference


async def test_other_arithmetic_is_named_where_a_step_differs(model: ModelFiles) -> None:
    history = History(model)
    history.step(group(0), group(1))
    _, there = history.checkpoints.pop()
    elsewhere = Arithmetic(torch="9.9", device="cpu", threads=1)
    history.commit(replace(there, arithmetic=elsewhere, trained=there.trained[::-1][:1]))
    [step] = await history.replay()
    assert "computed then by torch 9.9 on cpu, 1 threads, now by" in step.difference


@pytest.mark.parametrize("lost", ["state", "groups/g0", "adapters/1"])
async def test_a_run_of_which_something_was_swept_cannot_be_replayed_and_says_why(lost: str, model: ModelFiles) -> None:
    history = History(model)
    history.step(group(0), group(1))
    history.step(group(2), group(3))
    ref, first = history.checkpoints[0]
    key = {"state": ref, "groups/g0": first.trained[0].blob, "adapters/1": first.weights}[lost].key
    del history.store.objects[key]
    with pytest.raises(ObjectMissing, match=r"cannot be replayed: .* gone.*storage\.keep_"):
        await history.replay()


async def test_a_run_without_a_step_and_another_model_are_refused(model: ModelFiles) -> None:
    history = History(model)
    with pytest.raises(ConfigError, match="no step yet"):
        await recorded_steps(history.store, history.head)  # type: ignore[arg-type]
    with pytest.raises(RunConflict, match="--model"):
        await replay(history.store, some_head(model="another"), model)  # type: ignore[arg-type]


def test_a_group_that_is_trained_on_twice_and_a_missing_step_are_found() -> None:
    blob = BlobRef(key="k", size=1, sha256="0" * 64)

    def made(step: int, *groups: str) -> Checkpoint:
        trained = [TrainedGroup(name, blob) for name in groups]
        return Checkpoint(run="r", incarnation="i", step=step, version=step, weights=blob, optimizer=blob, ledger={},
                          rewards=[], trained=trained, seconds=0.0)  # fmt: skip

    assert history_problem([made(1, "a", "b"), made(2, "c")]) is None
    assert "group b is in step 1 and again in step 2" in (history_problem([made(1, "a", "b"), made(2, "b")]) or "")
    assert "steps [1, 3]" in (history_problem([made(1, "a"), made(3, "b")]) or "")
