"""vLLM's KV-cache events, understood: what was published becomes what routers are told. Pure but for `listen`.

vLLM publishes batches over ZMQ, as three frames: a topic, a sequence number of eight big-endian bytes, and a msgpack
body `[time, events, rank]`. Each event is either an array that begins with its type's name, or a map with the key
`type`; the body too may be a map. Both are understood, field by field; an event of an unknown type is left out.

vLLM names blocks by hashes of its own. `Tracker` remembers what chain each of them ends, and tells in our hashes
(`broker.blocks`) what is stored, removed, cleared. A block whose beginning was not seen (the listener came late) is not
told. A gap in the sequence numbers means that events were lost: everything told so far is taken back, which costs
hits for a while and never a wrong belief.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from broker.blocks import START, Point, extend, usable_block
from broker.errors import MalformedMessage
from broker.messages import CacheEvent

log = logging.getLogger(__name__)

BlockHash = int | bytes
"""How vLLM names a block."""

_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""The order of the fields in an array; later releases add to its end."""


class Stored(NamedTuple):
    """Blocks were stored: `tokens` fills them, and they follow `parent`, or begin a prompt where that is None."""

    hashes: list[BlockHash]
    parent: BlockHash | None
    tokens: list[int]
    block: int
    adapter: str | None
    salted: bool
    """A cache salt or the like took part in the hashes, so that token ids do not tell the blocks."""


class Removed(NamedTuple):
    """Blocks were evicted."""

    hashes: list[BlockHash]


class Cleared(NamedTuple):
    """All blocks were dropped."""


Event = Stored | Removed | Cleared


def decode_batch(body: bytes) -> list[Event]:
    """The events of a batch, in order. Raises MalformedMessage."""
    try:
        batch = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:
        raise MalformedMessage(f"a batch of KV-cache events is no msgpack: {error}") from error
    events = batch.get("events") if isinstance(batch, dict) else batch[1] if _is_list(batch, 2) else None
    if not isinstance(events, list):
        raise MalformedMessage(f"expected a batch [time, events, ...] of KV-cache events, got {str(batch)[:200]}")
    return [event for raw in events if (event := _decode(raw)) is not None]


def _decode(raw: object) -> Event | None:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        fields = dict(zip(_FIELDS.get(kind, ()) if isinstance(kind, str) else (), raw[1:], strict=False))
    else:
        raise MalformedMessage(f"expected a KV-cache event as an array or a map, got {str(raw)[:200]}")
    if fields.get("medium") not in (None, "GPU"):
        return None  # moved to or from another tier: what the GPU holds does not change by it
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind == "BlockRemoved":
        return Removed(_hashes(fields))
    if kind == "BlockStored":
        return _stored(fields)
    return None


def _stored(fields: dict[str, Any]) -> Stored:
    hashes, tokens, block = _hashes(fields), fields.get("token_ids"), fields.get("block_size")
    parent, adapter = fields.get("parent_block_hash"), fields.get("lora_name")
    if not isinstance(block, int) or usable_block(block) != block:
        raise MalformedMessage(f"a stored block: expected block_size as an even number from 2 on, got {block!r}")
    if not isinstance(tokens, list) or not all(isinstance(token, int) and 0 <= token < 1 << 31 for token in tokens):
        raise MalformedMessage(f"stored blocks: expected token_ids as a list of ids, got {str(tokens)[:100]}")
    if len(tokens) != block * len(hashes):
        raise MalformedMessage(f"expected {block} token ids for each of {len(hashes)} blocks, got {len(tokens)}")
    if not isinstance(parent, int | bytes | None) or not isinstance(adapter, str | None):
        raise MalformedMessage(
            f"a stored block: expected a parent's hash and an adapter's name, got {parent!r}, {adapter!r}"
        )
    extra = fields.get("extra_keys")
    keys = [key for each in extra if isinstance(each, list) for key in each] if isinstance(extra, list) else []
    return Stored(hashes, parent, tokens, block, adapter, any(key != adapter for key in keys))


def _hashes(fields: dict[str, Any]) -> list[BlockHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(each, int | bytes) for each in hashes):
        raise MalformedMessage(f"expected block_hashes as a list of hashes, got {str(hashes)[:100]}")
    return hashes


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) >= length


@dataclass(slots=True)
class _Block:
    """A block that the engine has: our hash, where its chain stands, and the block before it."""

    hash: bytes
    point: Point
    parent: BlockHash | None
    adapter: str | None


class Tracker:
    """What one engine's cache holds, by its own hashes and by ours."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, _Block] = {}
        self._next: int | None = None
        self.lost = 0
        """Batches that did not arrive."""

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, sequence: int, events: Sequence[Event]) -> list[CacheEvent]:
        """What a batch means, in our hashes. Batches that are older than the last are left out."""
        told: list[CacheEvent] = []
        if self._next is not None and sequence < self._next and sequence > 0:
            return told
        if self._next is not None and sequence != self._next:
            self.lost += max(0, sequence - self._next)  # from 0 on again: the engine was started anew
            told += self._clear()
        self._next = sequence + 1
        for event in events:
            told += self._take(event)
        return told

    def _take(self, event: Event) -> Iterator[CacheEvent]:
        if isinstance(event, Cleared):
            yield from self._clear()
        elif isinstance(event, Removed):
            gone = [self._blocks.pop(each).hash for each in event.hashes if each in self._blocks]
            if gone:
                yield CacheEvent("removed", blocks=b"".join(gone))
        elif not event.salted:
            yield from self._store(event)

    def _clear(self) -> Iterator[CacheEvent]:
        self._blocks.clear()
        yield CacheEvent("cleared")

    def _store(self, event: Stored) -> Iterator[CacheEvent]:
        point = START
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                return
            point = parent.point
        tokens = np.array(event.tokens, dtype=np.int32)
        before = event.parent
        for index, each in enumerate(event.hashes):
            part = tokens[index * event.block : (index + 1) * event.block]
            ours, point = extend(event.adapter, point, part, block=event.block)
            self._blocks[each] = _Block(ours, point, before, event.adapter)
            before = each
        if before is not None:
            yield CacheEvent("stored", adapter=event.adapter, blocks=self._chain(before))

    def _chain(self, last: BlockHash) -> bytes:
        """The hashes of the blocks from a prompt's beginning to `last`; empty if some of them are gone."""
        found: list[bytes] = []
        at: BlockHash | None = last
        while at is not None:
            block = self._blocks.get(at)
            if block is None:
                return b""
            found.append(block.hash)
            at = block.parent
        return b"".join(reversed(found))


class CacheFeed:
    """Follows an engine's publisher and collects what routers are to be told: an engine's `cache_events`."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        """`endpoint`: a ZMQ address as vLLM's `--kv-events-config` has it, with a host to connect to."""
        self._endpoint = endpoint
        self._topic = topic
        self._tracker = Tracker()
        self._events: list[CacheEvent] = []

    def cache_events(self) -> list[CacheEvent]:
        """What has changed since the last call, in order."""
        events, self._events = self._events, []
        return [event for event in events if event.change == "cleared" or event.blocks]

    async def run(self) -> None:
        """Follow until cancelled. A batch that cannot be read is logged and counts as lost."""
        await listen(self._endpoint, self._topic, self._on_batch)

    def _on_batch(self, sequence: int, body: bytes) -> None:
        try:
            events = decode_batch(body)
        except MalformedMessage as error:
            log.warning("KV-cache events from %s: %s", self._endpoint, error)
            return  # the next one shows the gap
        self._events += self._tracker.take(sequence, events)


async def listen(endpoint: str, topic: str, on_batch: Callable[[int, bytes], None]) -> None:
    """Call `on_batch` with each batch's sequence number and body, until cancelled. Needs `farflung[events]`.

    ZMQ connects again by itself when the publisher was away.
    """
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        socket.connect(endpoint)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                log.warning("KV-cache events from %s: expected 3 frames, got %d", endpoint, len(frames))
                continue
            on_batch(int.from_bytes(frames[1], "big"), frames[2])
    finally:
        socket.close()
