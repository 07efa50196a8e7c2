"""The registry of runs, versions and nodes: two KV buckets, compare-and-set, and watches that cannot go deaf.

After a broker restart a KV watch was seen silent for 16 s. So every watch compares, every two seconds, the bucket's
last sequence with the last it has seen, and starts over when it is behind. And the mark that ends what is there at the
beginning was seen to come before all of it (twice in 1,000 watches of a busy machine: the server's word that nothing
is pending overtakes what it has just sent). So that mark counts only for a bucket known to be empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from broker import names
from broker.bus import WRONG_LAST_SEQUENCE, Bus, ConsumerGone
from broker.clock import now
from broker.ending import end
from broker.errors import ConnectionFailed, MalformedMessage, RegistryConflict
from broker.messages import AdapterRef, Control, Head, Message, Node, VersionRecord, decode

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

REREAD_SECONDS = 2.0
PRESENCE_SECONDS = 5.0
"""A node says at least this often that it is there."""
PRESENCE_TTL = 15.0
"""When a node that said nothing is gone."""


class BucketState(NamedTuple):
    """What is in a bucket."""

    made: str
    """Which bucket this is: one that was lost and made anew is another."""
    last: int
    """The sequence of its last write."""
    entries: int
    """How many keys it has, deleted ones included that leave a mark."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the revision that a compare-and-set must name."""

    value: bytes
    revision: int


class Bucket:
    """One KV bucket."""

    def __init__(self, bus: Bus, kv: KeyValue, name: str) -> None:
        self._bus = bus
        self._kv = kv
        self.name = name

    async def get(self, key: str, *, patience: float = 30.0) -> Entry | None:
        """The newest value, None when there is none. Raises ConnectionFailed when no answer comes for `patience` s."""
        deadline = now() + patience
        while True:
            try:
                entry = await self._kv.get(key)
            except nats.js.errors.KeyNotFoundError:
                return None
            except (nats.errors.Error, TimeoutError) as error:
                if now() > deadline:
                    raise ConnectionFailed(f"NATS at {self._bus.url} did not answer for {self.name}/{key}") from error
                await asyncio.sleep(0.2)
                continue
            return Entry(entry.value, int(entry.revision or 0)) if entry.value else None

    async def put(self, key: str, value: bytes) -> None:
        """Write, whatever was there. Quietly gives up while the broker is away: the next put will do."""
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await self._kv.put(key, value)

    async def compare_and_set(self, key: str, value: bytes, revision: int, *, patience: float = 60.0) -> int:
        """Write if the key is still at `revision` (0: absent); returns the new revision.

        An answer that got lost is looked up: when the key holds exactly `value`, the write was ours. Raises
        RegistryConflict when somebody else wrote, ConnectionFailed when the broker stays away for `patience` seconds.
        """
        deadline = now() + patience
        while True:
            try:
                # `create` knows that a key which was deleted is absent; a plain update from 0 does not.
                write = self._kv.update(key, value, last=revision) if revision else self._kv.create(key, value)
                return int(await write)
            except nats.js.errors.KeyWrongLastSequenceError:
                pass
            except nats.js.errors.APIError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE and now() > deadline:
                    raise ConnectionFailed(f"NATS cannot store {self.name}/{key}: {error.description}") from error
            except (nats.errors.Error, TimeoutError) as error:
                if now() > deadline:
                    raise ConnectionFailed(f"NATS at {self._bus.url} did not store {self.name}/{key}") from error
                await asyncio.sleep(0.2)
            there = await self.get(key, patience=patience)
            if there is not None and there.value == value:
                return there.revision
            if (there.revision if there else 0) != revision:
                raise RegistryConflict(f"{self.name}/{key} was written by somebody else since revision {revision}")
            if now() > deadline:
                raise ConnectionFailed(f"NATS at {self._bus.url} refuses to store {self.name}/{key}")
            await asyncio.sleep(0.05)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove a key, with `revision` only while it is at that. Like `put`, quietly gives up while the broker is
        away.
        """
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await self._kv.delete(key, last=revision)

    async def keys(self, pattern: str) -> list[str]:
        """The keys that match a NATS subject pattern, sorted; one that was deleted may be among them.

        Not by nats-py's `keys`, which is a watch, and believes its first mark. Raises ConnectionFailed.
        """
        prefix = f"$KV.{self.name}."
        try:
            held = await self._bus.subjects_held(f"KV_{self.name}", prefix + pattern)
        except ConsumerGone:
            return []
        return sorted(subject.removeprefix(prefix) for subject in held)

    async def state(self) -> BucketState:
        info = (await self._kv.status()).stream_info
        return BucketState(str(info.created), int(info.state.last_seq), int(info.state.messages))

    async def watch(self) -> KeyValue.KeyWatcher:
        return await self._kv.watchall()


class Watch:
    """Keeps the newest value of every key of a bucket, and tells whoever asked about each change.

    `on_change(key, value)` is called in the event loop, value None for a deleted key, first once for every key that
    is there. `ready` is set when the first reading is complete.
    """

    def __init__(self, bucket: Bucket, on_change: Callable[[str, bytes | None], None]) -> None:
        self._bucket = bucket
        self._on_change = on_change
        self.ready = asyncio.Event()
        self._seen = 0
        self._made: str | None = None
        """Which bucket is followed; None: none yet, or none any more."""
        self._keys: set[str] = set()
        """The keys that were told of and not taken back."""
        self._task = asyncio.create_task(self._follow(), name=f"watch-{bucket.name}")

    async def close(self) -> None:
        await end(self._task)

    async def _follow(self) -> None:
        while True:
            watcher = None
            try:
                before = await self._bucket.state()
                if before.made != self._made:
                    self._begin(before.made)
                watcher = await self._bucket.watch()
                await self._read(watcher, before)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.info("watch of %s starts over: %s", self._bucket.name, error)
                await asyncio.sleep(0.5)
            finally:
                if watcher is not None:
                    with contextlib.suppress(nats.errors.Error, ValueError):
                        await watcher.stop()

    def _begin(self, made: str) -> None:
        """A bucket that was not there before: nothing of another one holds any more."""
        self._made, self._seen = made, 0
        for key in list(self._keys):
            self._tell(key, None)

    def _tell(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._keys.discard(key)
        else:
            self._keys.add(key)
        self._on_change(key, value)

    async def _read(self, watcher: KeyValue.KeyWatcher, before: BucketState) -> None:
        """Follow `watcher` until it is found to be behind the bucket. `before`: the bucket when it began."""
        checked = now()
        whole = heard = news = False

        def is_whole(last: int) -> None:
            """What was written until `last` and was not delivered has expired."""
            nonlocal whole
            whole = True
            self._seen = max(self._seen, last)
            self.ready.set()

        while True:
            try:
                entry = await watcher.updates(timeout=REREAD_SECONDS)
            except (TimeoutError, nats.errors.TimeoutError):
                pass
            else:
                if entry is None:
                    if heard or not before.entries:
                        is_whole(before.last)
                else:
                    heard = news = True
                    self._take(entry)
                    if entry.delta == 0:
                        is_whole(before.last)
            if now() - checked > REREAD_SECONDS:
                checked = now()
                state = await self._bucket.state()
                if state.made != self._made or state.last < self._seen:
                    self._made = None  # the bucket was lost and begins again
                    return
                if not whole and not state.entries:
                    is_whole(state.last)
                behind = state.last > self._seen if whole else not news
                news = False
                if behind:
                    await asyncio.sleep(0.2)
                    if watcher._updates.empty():
                        return

    def _take(self, entry: KeyValue.Entry) -> None:
        if (entry.revision or 0) > self._seen:
            self._seen = int(entry.revision or 0)
            deleted = entry.operation in ("DEL", "PURGE") or not entry.value
            self._tell(entry.key, None if deleted else entry.value)


class Registry:
    """Runs, versions and nodes, typed."""

    def __init__(self, bus: Bus, runs: Bucket, nodes: Bucket) -> None:
        self.bus = bus
        self.runs = runs
        self.nodes = nodes

    @classmethod
    async def open(cls, bus: Bus, *, replicas: int = 1) -> Registry:
        """Create the buckets, or use those there are. Raises ConnectionFailed."""
        try:
            runs = await bus.jetstream.create_key_value(
                KeyValueConfig(bucket=names.RUNS_BUCKET, history=1, storage=StorageType.FILE, replicas=replicas)
            )
            nodes = await bus.jetstream.create_key_value(
                KeyValueConfig(
                    bucket=names.NODES_BUCKET,
                    history=1,
                    ttl=PRESENCE_TTL,
                    storage=StorageType.FILE,
                    replicas=replicas,
                )
            )
        except (nats.errors.Error, TimeoutError) as error:
            raise ConnectionFailed(
                f"NATS at {bus.url} cannot hold the registry: {error}. Expected a server with JetStream"
            ) from error
        return cls(bus, Bucket(bus, runs, names.RUNS_BUCKET), Bucket(bus, nodes, names.NODES_BUCKET))

    async def head(self, run: str) -> tuple[Head, int] | None:
        """The head record and its revision, None when there is no such run."""
        entry = await self.runs.get(names.head_key(run))
        return (decode(entry.value, Head), entry.revision) if entry else None

    async def heads(self) -> list[Head]:
        """Every run's head record, by name."""
        found = []
        for key in await self.runs.keys("*"):
            if entry := await self.runs.get(key):
                found.append(decode(entry.value, Head))
        return found

    async def set_head(self, head: Head, revision: int, *, patience: float = 60.0) -> int:
        """Compare-and-set the head record. Raises RegistryConflict."""
        return await self.runs.compare_and_set(names.head_key(head.run), head.encode(), revision, patience=patience)

    async def versions(self, run: str) -> list[VersionRecord]:
        """Every version record of a run, oldest first."""
        found = []
        for key in await self.runs.keys(names.version_keys(run)):
            if entry := await self.runs.get(key):
                found.append(decode(entry.value, VersionRecord))
        return found

    async def version(self, run: str, version: int) -> VersionRecord | None:
        """One version's record, None when there is none."""
        entry = await self.runs.get(names.version_key(run, version))
        return decode(entry.value, VersionRecord) if entry else None

    async def put_version(self, record: VersionRecord, revision: int = 0, *, patience: float = 60.0) -> int:
        """Write a version record, unless a later epoch has written it; returns the record's revision.

        `revision`: the newest that the caller knows of, 0 for none. One who is right needs one round trip. Raises
        RegistryConflict when another epoch has written it.
        """
        key = names.version_key(record.run, record.adapter.version)
        while True:
            try:
                return await self.runs.compare_and_set(key, record.encode(), revision, patience=patience)
            except RegistryConflict:
                entry = await self.runs.get(key, patience=patience)
            if entry is not None:
                there = decode(entry.value, VersionRecord)
                later = there.epoch > record.epoch
                if later or (there.epoch == record.epoch and there.incarnation != record.incarnation):
                    raise RegistryConflict(f"{key} was written by another epoch, {there.epoch} of {there.incarnation}")
            revision = entry.revision if entry else 0

    async def control(self, run: str) -> Control | None:
        entry = await self.runs.get(names.control_key(run))
        return decode(entry.value, Control) if entry else None

    async def put_control(self, control: Control) -> None:
        await self.runs.put(names.control_key(control.run), control.encode())

    async def forget_versions(self, run: str, *, but: str) -> None:
        """Remove the version records of every incarnation of a run `but` one, as they are now."""
        for key in await self.runs.keys(names.version_keys(run)):
            entry = await self.runs.get(key)
            if entry and decode(entry.value, VersionRecord).incarnation != but:
                await self.runs.delete(key, entry.revision)

    async def forget(self, run: str) -> None:
        """Remove every record of a run, the head last: whoever dies meanwhile can do it again."""
        for key in [*await self.runs.keys(f"{run}.>"), names.head_key(run)]:
            if await self.runs.get(key) is not None:
                await self.runs.delete(key)

    async def put_node(self, node: Node) -> None:
        await self.nodes.put(node.id, node.encode())

    async def remove_node(self, node: str) -> None:
        await self.nodes.delete(node)


class Roster:
    """Who is there: the nodes bucket, followed. A node that is silent for PRESENCE_TTL is gone."""

    def __init__(
        self,
        registry: Registry,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes: dict[str, tuple[Node, float]] = {}
        self._clock = clock
        self._changed = on_change
        self._watch = Watch(registry.nodes, self._apply)
        self.ready = self._watch.ready

    def _apply(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._nodes.pop(key, None)
        else:
            try:
                node = decode(value, Node)
            except MalformedMessage as error:
                log.warning("node %s is malformed: %s", key, error)
                return
            now = self._clock()
            if key not in self._nodes:  # nobody says that a node has expired
                self._nodes = {id: known for id, known in self._nodes.items() if now - known[1] < PRESENCE_TTL}
            self._nodes[key] = (node, now)
        self._changed()

    def present(self, kind: str = "", fleet: str = "") -> list[Node]:
        """The nodes that are there, by id; of one kind and one fleet if named."""
        now = self._clock()
        return sorted(
            (
                node
                for node, seen in self._nodes.values()
                if now - seen < PRESENCE_TTL and (not kind or node.node == kind) and (not fleet or node.fleet == fleet)
            ),
            key=lambda node: node.id,
        )

    def pinned(self, fleet: str) -> list[AdapterRef]:
        """The versions of `fleet` that are under evaluation: those that learners evaluate come first."""
        nodes = sorted(self.present(fleet=fleet), key=lambda node: node.node != "learner")
        return list({ref.name: ref for node in nodes for ref in node.pins}.values())

    def get(self, node: str) -> Node | None:
        found = self._nodes.get(node)
        return found[0] if found and self._clock() - found[1] < PRESENCE_TTL else None

    async def close(self) -> None:
        await self._watch.close()


class Heads:
    """Every run's head, version and control records, followed."""

    def __init__(self, registry: Registry, *, on_change: Callable[[str], None] = lambda run: None) -> None:
        self.heads: dict[str, Head] = {}
        self.versions: dict[str, dict[int, VersionRecord]] = {}
        self.controls: dict[str, Control] = {}
        self._changed = on_change
        self._watch = Watch(registry.runs, self._apply)
        self.ready = self._watch.ready

    def _apply(self, key: str, value: bytes | None) -> None:
        run, _, rest = key.partition(".")
        try:
            if not rest:
                _set(self.heads, run, decode(value, Head) if value else None)
            elif rest == "control":
                _set(self.controls, run, decode(value, Control) if value else None)
            elif rest.startswith("v."):
                _set(self.versions.setdefault(run, {}), int(rest[2:]), decode(value, VersionRecord) if value else None)
        except (MalformedMessage, ValueError) as error:
            log.warning("record %s is malformed: %s", key, error)
            return
        self._changed(run)

    async def close(self) -> None:
        await self._watch.close()


K = TypeVar("K")
V = TypeVar("V")


def _set(table: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
