"""A store and a registry in memory, that can be wiped: the real `Registry` on buckets that are dictionaries."""

from __future__ import annotations

import hashlib
from typing import Any

from broker.errors import ObjectCorrupt, ObjectMissing, RegistryConflict
from broker.messages import BlobRef
from broker.registry import Entry, Registry
from broker.store import reference
from tests.subjects import matches


class MemoryStore:
    """What `Store` does, without a server."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def put(self, prefix: str, data: bytes) -> BlobRef:
        ref = reference(prefix, data)
        self.objects[ref.key] = data
        return ref

    async def read(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectMissing(f"get {key}: no such object")
        return self.objects[key]

    async def get(self, ref: BlobRef) -> bytes:
        data = await self.read(ref.key)
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise ObjectCorrupt(f"{ref.key}: corrupt")
        return data

    async def exists(self, ref: BlobRef) -> bool:
        return len(self.objects.get(ref.key, b"")) == ref.size

    async def list(self, prefix: str) -> list[tuple[str, float]]:
        return [(key, 0.0) for key in sorted(self.objects) if key.startswith(prefix)]

    async def remove(self, key: str) -> None:
        self.objects.pop(key, None)


class MemoryBucket:
    """What `Bucket` does, without a server."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.sequence = 0

    async def get(self, key: str, *, patience: float = 0.0) -> Entry | None:
        return self.entries.get(key)

    async def put(self, key: str, value: bytes) -> None:
        self.sequence += 1
        self.entries[key] = Entry(value, self.sequence)

    async def compare_and_set(self, key: str, value: bytes, revision: int, *, patience: float = 0.0) -> int:
        there = self.entries.get(key)
        if (there.revision if there else 0) != revision:
            raise RegistryConflict(f"{key} was written by somebody else since revision {revision}")
        await self.put(key, value)
        return self.sequence

    async def delete(self, key: str) -> None:
        self.entries.pop(key, None)

    async def keys(self, pattern: str) -> list[str]:
        return sorted(key for key in self.entries if matches(pattern, key))

    def wipe(self) -> None:
        """Lose everything; sequences begin again."""
        self.entries, self.sequence = {}, 0


def memory_registry() -> tuple[Registry, MemoryBucket]:
    """A registry and the bucket that holds its runs."""
    runs: Any = MemoryBucket()
    nodes: Any = MemoryBucket()
    nothing: Any = None
    return Registry(nothing, runs, nodes), runs
