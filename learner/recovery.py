"""Finding the newest commit that is still whole, whatever broker and store have lost of the ones after it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from broker.errors import MalformedMessage, ObjectCorrupt, ObjectMissing, StoreError
from broker.messages import Head, VersionRecord, decode
from broker.registry import Registry
from broker.store import Store
from learner.checkpoint import Checkpoint
from learner.history import history_of, read_copy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intact:
    """A commit whose every object is in the store, read and verified."""

    head: Head
    """The head record as that commit wrote it, as far as it is known: step, version, adapters, state."""
    checkpoint: Checkpoint
    weights: bytes
    optimizer: bytes | None
    lost: tuple[str, ...] = ()
    """What is missing of newer commits, one reason for each."""


def counts(record: VersionRecord, head: Head) -> bool:
    """Whether a record is of a version that was committed in the incarnation of `head`."""
    return record.incarnation == head.incarnation and record.state == "committed"


async def newest_intact(registry: Registry, store: Store, head: Head) -> Intact | None:
    """The newest commit up to `head` whose every object is there. None for a run that has none yet.

    Raises StoreError when there were commits and none is intact.
    """
    lost: list[str] = []
    async for candidate in _candidates(registry, store, head):
        try:
            return await _read(store, candidate, tuple(lost))
        except (ObjectMissing, ObjectCorrupt, MalformedMessage) as error:
            lost.append(str(error))
    if lost:
        raise StoreError(
            f"run {head.run} cannot resume: none of its {len(lost)} commits is intact in the store "
            f"({lost[0]}). Restore the store, or begin anew with --restart"
        )
    return None


async def _read(store: Store, head: Head, lost: tuple[str, ...]) -> Intact:
    """Everything of one commit. Raises ObjectMissing, ObjectCorrupt or MalformedMessage."""
    if head.checkpoint is None or (head.adapter is None) != (head.head == 0):
        raise ObjectMissing(f"where version {head.head} of step {head.step} lies is not known any more")
    checkpoint = decode(await store.get(head.checkpoint), Checkpoint)
    weights = await store.get(checkpoint.weights)
    if head.adapter is not None and head.adapter.key != checkpoint.weights.key:
        await store.get(head.adapter.blob)
    optimizer = await store.get(checkpoint.optimizer) if checkpoint.optimizer else None
    return Intact(head, checkpoint, weights, optimizer, lost)


async def _candidates(registry: Registry, store: Store, head: Head) -> AsyncIterator[Head]:
    """Head records from the newest commit to the oldest: the broker's, the store's copies, the version records."""
    if head.checkpoint is None:
        return
    yield head
    seen = {head.checkpoint.key}
    history = await history_of(store, head.run)
    for copy in history.states(head.incarnation):
        if copy.step >= head.step:
            continue  # not built upon by the head, or newer than what was committed
        try:
            older = await read_copy(store, copy)
        except (ObjectMissing, ObjectCorrupt) as error:
            log.warning("a copy of the head record of run %s is lost: %s", head.run, error)
            continue
        if older.checkpoint is not None and older.checkpoint.key not in seen:
            seen.add(older.checkpoint.key)
            yield older
    records = [record for record in await registry.versions(head.run) if counts(record, head)]
    for record in reversed(records):
        if record.checkpoint is not None and record.checkpoint.key not in seen and record.step < head.step:
            version = record.adapter.version
            yield msgspec.structs.replace(
                head,
                step=record.step,
                head=version,
                active=min(head.active, version),
                adapter=record.adapter,
                live=[other.adapter for other in records if other.adapter.version <= version],
                checkpoint=record.checkpoint,
            )
