"""The adapters a replica has on its disk: content-addressed, verified, removed when nothing needs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from broker import faults
from broker.adapters import write_adapter_directory
from broker.messages import AdapterRef, BlobRef
from broker.store import Store

log = logging.getLogger(__name__)

ABANDONED_SECONDS = 24 * 3600.0
"""A work directory that was not touched for so long belongs to an actor that was killed."""


class AdapterCache:
    """PEFT directories under `{work}/adapters`, each named by its blob's sha256."""

    def __init__(self, store: Store, work: Path) -> None:
        self._store = store
        self._work = work
        self.place = work / "adapters"

    async def fetch(self, ref: AdapterRef) -> Path:
        """The adapter as a PEFT directory, from the disk or from the store, verified.

        Raises ObjectMissing, ObjectCorrupt or StoreError, AdapterError for a blob that is no adapter, and OSError when
        the disk cannot take it.
        """
        directory = self.place / ref.sha256
        if directory.exists():
            return directory
        data = await self._store.get(ref.blob)
        scratch = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            await asyncio.to_thread(write_adapter_directory, data, scratch)
            scratch.rename(directory)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        faults.reached("replica.fetched")
        return directory

    async def read(self, blob: BlobRef) -> bytes:
        """Another object that goes with an adapter, verified and not kept. Raises like `fetch`."""
        return await self._store.get(blob)

    def keep(self, needed: Collection[str]) -> None:
        """Remove what is none of `needed` (sha256 of blobs)."""
        for directory in self.place.glob("*"):
            if directory.name.removesuffix(".partial") not in needed:
                shutil.rmtree(directory, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def sweep_abandoned(self) -> None:
        """Remove what killed replicas of this host left beside this one's work directory."""
        for adapters in self._work.parent.glob("*/adapters"):
            with contextlib.suppress(OSError):
                if adapters.parent == self._work or time.time() - adapters.parent.stat().st_mtime < ABANDONED_SECONDS:
                    continue
                log.info("removing %s, abandoned", adapters.parent)
                shutil.rmtree(adapters)
                adapters.parent.rmdir()

    def touch(self) -> None:
        """Show the replicas of this host that start later that this work directory is in use."""
        with contextlib.suppress(OSError):
            self._work.mkdir(parents=True, exist_ok=True)
            self._work.touch()
