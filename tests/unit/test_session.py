"""The session: one writer of the head, and live versions that always hold what is active and what is newest."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from broker.errors import Fenced, RegistryConflict
from broker.messages import BlobRef, Head, VersionRecord, decode
from learner.checkpoint import Checkpoint, TrainedGroup
from learner.claim import Claim
from learner.session import Session
from tests.memory import MemoryStore
from tests.unit.test_learner_parts import head, held, record, ref


class StubRegistry:
    """A head record whose writes take a turn of the event loop each, so that two can overlap."""

    def __init__(self, now: Head) -> None:
        self.now = now
        self.revision = 1
        self.written: list[Head] = []

    async def set_head(self, new: Head, revision: int, *, patience: float) -> int:
        await asyncio.sleep(0)
        if revision != self.revision:
            raise RegistryConflict("somebody else wrote")
        self.now, self.revision = new, self.revision + 1
        self.written.append(new)
        return self.revision

    async def head(self, run: str) -> tuple[Head, int]:
        return self.now, self.revision

    async def put_version(self, record: Any, revision: int, *, patience: float) -> int:
        return revision + 1


def checkpoint(step: int, version: int) -> Checkpoint:
    blob = BlobRef(key="k", size=1, sha256="0" * 64)
    return Checkpoint(
        run="r", incarnation="i", step=step, version=version, weights=blob, optimizer=blob, ledger={}, rewards=[],
        trained=[], seconds=0.0,
    )  # fmt: skip


def session(**fields: Any) -> tuple[Session, StubRegistry]:
    start = head(head=7, active=6, step=7, max_staleness=2, live=[ref(version) for version in (5, 6, 7)], **fields)
    registry = StubRegistry(start)
    return Session(registry, MemoryStore(), Claim(start, 1, created=False)), registry  # type: ignore[arg-type]


@pytest.mark.parametrize("activate_first", [True, False])
async def test_commit_and_activation_at_once_leave_both_the_active_and_the_newest_version_live(
    activate_first: bool,
) -> None:
    subject, registry = session()
    blob = BlobRef(key="k", size=1, sha256="0" * 64)

    def commit() -> Any:
        return subject.commit(checkpoint(8, 8), blob, ref(8), reward=0.0, summary={}, trace={})

    works = [subject.activate(7), commit()] if activate_first else [commit(), subject.activate(7)]
    await asyncio.gather(*works)
    assert (registry.now.head, registry.now.active) == (8, 7)
    assert [item.version for item in registry.now.live] == [6, 7, 8]
    for written in registry.written:
        assert {written.active, written.head} <= {item.version for item in written.live}


@pytest.mark.parametrize("dead_after", ["the offer", "the record"])
async def test_a_learner_that_goes_on_completes_the_commit_of_one_that_died_in_it(dead_after: str) -> None:
    adapter = ref(7)
    subject, registry = session(adapter=adapter)
    there = record(7, trace={"traceparent": "t"}, state="offered" if dead_after == "the offer" else "committed")
    written: list[VersionRecord] = []

    async def version(run: str, number: int) -> VersionRecord:
        return there

    async def put_version(new: VersionRecord, revision: int, *, patience: float) -> int:
        written.append(new)
        return revision + 1

    registry.version, registry.put_version = version, put_version  # type: ignore[attr-defined, assignment]
    last = replace(checkpoint(7, 7), weights=adapter.blob, rewards=[0.1, 0.5])
    where = BlobRef(key="state", size=1, sha256="0" * 64)
    await subject.complete_commit(last, where)
    if dead_after == "the record":
        assert not written
        return
    [new] = written
    assert (new.state, new.step, new.checkpoint, new.reward, new.epoch) == ("committed", 7, where, 0.5, 2)
    assert new.trace == there.trace


async def test_a_step_that_published_no_version_completes_no_record() -> None:
    subject, _ = session(adapter=ref(7))
    await subject.complete_commit(checkpoint(8, 7), BlobRef(key="state", size=1, sha256="0" * 64))


async def test_a_write_that_was_made_though_its_caller_was_cancelled_does_not_fence_the_next() -> None:
    subject, registry = session()
    plain = registry.set_head

    async def made_and_cancelled(new: Head, revision: int, *, patience: float) -> int:
        await plain(new, revision, patience=patience)
        raise asyncio.CancelledError

    registry.set_head = made_and_cancelled  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await subject.activate(7)
    registry.set_head = plain  # type: ignore[method-assign]
    await subject.write(state="failed", detail="why")
    assert (registry.now.state, registry.now.detail, registry.now.active) == ("failed", "why", 7)
    registry.now = msgspec.structs.replace(registry.now, epoch=registry.now.epoch + 1)
    registry.revision += 1
    with pytest.raises(Fenced):
        await subject.write(detail="no longer ours")


async def test_a_session_whose_run_moved_on_is_fenced_and_says_by_whom() -> None:
    subject, registry = session()
    registry.now = head(epoch=9, learner="other")
    registry.revision = 5
    with pytest.raises(Fenced, match="epoch 9, held by other"):
        await subject.activate(7)
    assert "epoch 9" in (await subject.fenced() or "")


async def test_the_same_epoch_of_another_incarnation_fences_too() -> None:
    subject, registry = session()
    assert await subject.fenced() is None
    registry.now = head(incarnation="new")
    assert await subject.fenced()


def test_a_checkpoint_names_the_very_bytes_of_its_groups_and_the_checkpoint_before_it() -> None:
    batch = [held(2), held(1)]
    trained = [TrainedGroup(item.id, item.ready.blob) for item in batch]
    before = BlobRef(key="before", size=3, sha256="2" * 64)
    there = decode(replace(checkpoint(8, 8), trained=trained, previous=before).encode(), Checkpoint)
    assert [(group.id, group.blob) for group in there.trained] == [
        ("g2", BlobRef(key="k", size=1, sha256="0" * 64)),
        ("g1", BlobRef(key="k", size=1, sha256="0" * 64)),
    ], "in the order they were packed"
    assert there.previous == before


async def test_a_version_that_was_superseded_before_it_was_active_is_not_live() -> None:
    start = head(head=8, active=5, step=8, max_staleness=3, live=[ref(version) for version in (4, 5, 6, 7, 8)])
    subject = Session(StubRegistry(start), MemoryStore(), Claim(start, 1, created=False))  # type: ignore[arg-type]
    await subject.activate(8)
    assert [one.version for one in subject.head.live] == [5, 8]
