"""The commits of a run, one leading back to the other. What lies in the store and is not among them never happened."""

from __future__ import annotations

from collections.abc import AsyncIterator

from broker.messages import BlobRef, decode
from broker.store import Store
from learner.checkpoint import Checkpoint


async def lineage(store: Store, newest: BlobRef | None) -> AsyncIterator[tuple[BlobRef, Checkpoint]]:
    """Every commit from `newest` back to the incarnation's first.

    Raises ObjectMissing where one was swept, ObjectCorrupt or StoreError where one cannot be read.
    """
    while newest is not None:
        checkpoint = decode(await store.get(newest), Checkpoint)
        yield newest, checkpoint
        newest = checkpoint.previous
