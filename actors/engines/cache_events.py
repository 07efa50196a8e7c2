"""vLLM's KV-cache events, understood: what was published becomes what routers are told. Pure but for `listen`.

vLLM publishes batches over ZMQ, as three frames: a topic, a sequence number of eight big-endian bytes, and a msgpack
body `[time, events, rank]`. Each event is either an array that begins with its type's name, or a map with the key
`type`; the body too may be a map. Both are understood, field by field; an event of an unknown type is left out.

vLLM names blocks by hashes of its own. `Tracker` remembers what chain each of them ends, and tells in our hashes
(`broker.blocks`) what is stored, removed, cleared. Whose prompts a block serves is asked of the engine, by the name of
the adapter and the cache salt that took part in its hash: blocks that no request of ours can meet are not told. Nor is
a block whose beginning was not seen (the listener came late). A gap in the sequence numbers means that events were
lost: everything told so far is taken back, which costs hits for a while and never a wrong belief.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from broker.blocks import START, Point, extend, usable_block
from broker.errors import EngineError, MalformedMessage
from broker.messages import CacheEvent

log = logging.getLogger(__name__)

BlockHash = int | bytes
"""How vLLM names a block."""

Owner = Callable[[str | None, str], str | None]
"""Whose prompts the blocks under an adapter's name (None: no adapter) and a cache salt (empty: none) serve, as our
requests name it. Raises LookupError when no request of ours can meet them."""

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
    salt: str
    """What took part in the first block's hash beside its tokens and the adapter's name; empty: nothing."""


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
    if fields.get("medium") not in (None, "GPU") or fields.get("locality") not in (None, "LOCAL"):
        return None  # moved to or from another tier: what the GPU holds does not change by it
    if fields.get("group_idx") not in (None, 0):
        return None  # the same tokens in layers of another kind
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind == "BlockRemoved":
        return Removed(_hashes(fields))
    if kind == "BlockStored":
        return _stored(fields)
    return None


def _stored(fields: dict[str, Any]) -> Stored | None:
    """None for blocks that their tokens, adapter and salt do not tell."""
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
    if adapter is None and fields.get("lora_id") is not None:
        return None  # an older release, which does not name it
    extra = fields.get("extra_keys")
    keys = [_other_keys(each, adapter) for each in extra] if isinstance(extra, list) else []
    first = keys[0] if keys else []
    salt = first[0] if first else ""
    if any(keys[1:]) or len(first) > 1 or not isinstance(salt, str):
        return None  # pictures and the like
    return Stored(hashes, parent, tokens, block, adapter, salt)


def _other_keys(keys: object, adapter: str | None) -> list[object]:
    """What took part in a block's hash beside the adapter's name, once."""
    others = list(keys) if isinstance(keys, list) else []
    if adapter is not None and adapter in others:
        others.remove(adapter)
    return others


def _hashes(fields: dict[str, Any]) -> list[BlockHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(each, int | bytes) for each in hashes):
        raise MalformedMessage(f"expected block_hashes as a list of hashes, got {str(hashes)[:100]}")
    return hashes


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) >= length


@dataclass(slots=True)
class _Block:
    """A block that the engine has: our hash, where its chain stands, the block before it, whose prompts it serves."""

    hash: bytes
    point: Point
    parent: BlockHash | None
    adapter: str | None
    salt: str
    """That of its chain's first block."""


def unsalted(adapter: str | None, salt: str) -> str | None:
    """An `Owner` where requests name adapters as the server does, and carry no salt."""
    if salt:
        raise LookupError(salt)
    return adapter


class Tracker:
    """What one engine's cache holds, by its own hashes and by ours."""

    def __init__(self, owner: Owner = unsalted) -> None:
        self._owner = owner
        self._block: int | None = None
        self._blocks: dict[BlockHash, _Block] = {}
        self._next: int | None = None
        self._cleared = False
        self._gone: dict[bytes, None] = {}
        """Our hashes of what was removed since the last `tell`, and is not there now."""
        self._grown: dict[BlockHash, None] = {}
        """The last blocks of the chains that were stored since the last `tell`."""
        self.lost = 0
        """Batches that did not arrive."""

    def __len__(self) -> int:
        return len(self._blocks)

    def restart(self, block: int | None = None) -> None:
        """The engine is started anew: it holds nothing, and counts from wherever it begins to be heard.

        `block`: blocks of another size than so many tokens are not told; None: all are.
        """
        self._block = block
        self._next = None
        self._clear()

    def take(self, sequence: int, events: Sequence[Event]) -> None:
        """Take in the batch that was published as number `sequence`."""
        if self._next is not None and sequence != self._next:
            self.lost += max(0, sequence - self._next)  # a lower one: the engine was started anew
            self._clear()
        self._next = sequence + 1
        for event in events:
            if isinstance(event, Cleared):
                self._clear()
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self._store(event)

    def tell(self) -> list[CacheEvent]:
        """What has changed since the last call, in our hashes: first what is gone, then each chain that grew, whole."""
        told = [CacheEvent("cleared")] if self._cleared else []
        if self._gone:
            told.append(CacheEvent("removed", blocks=b"".join(self._gone)))
        for last in self._grown:
            if chain := self._chain(last):
                told.append(CacheEvent("stored", adapter=self._blocks[last].adapter, blocks=chain))
        self._cleared = False
        self._gone.clear()
        self._grown.clear()
        return told

    def _clear(self) -> None:
        self._cleared = True
        self._blocks.clear()
        self._gone.clear()
        self._grown.clear()

    def _remove(self, event: Removed) -> None:
        for each in event.hashes:
            block = self._blocks.pop(each, None)
            if block is None:
                continue
            self._gone[block.hash] = None
            if each in self._grown:
                del self._grown[each]
                if block.parent in self._blocks:
                    self._grown[block.parent] = None

    def _store(self, event: Stored) -> None:
        """vLLM keeps equal blocks that were computed at the same time, and stores and removes each; but it may also
        tell a block that a prompt met, in the same words. So copies are not counted: they are gone with the first.
        """
        before, point, salt = event.parent, START, event.salt
        if before is not None:
            parent = self._blocks.get(before)
            if parent is None or event.salt:
                return
            point, salt = parent.point, parent.salt
        if not event.hashes or self._block not in (None, event.block):
            return
        try:
            adapter = self._owner(event.adapter, salt)
        except LookupError:
            return
        tokens = np.array(event.tokens, dtype=np.int32)
        for index, each in enumerate(event.hashes):
            part = tokens[index * event.block : (index + 1) * event.block]
            ours, point = extend(adapter, point, part, block=event.block)
            if each not in self._blocks:
                self._blocks[each] = _Block(ours, point, before, adapter, salt)
                self._gone.pop(ours, None)
                if before is not None:
                    self._grown.pop(before, None)
                self._grown[each] = None
            before = each

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

    def __init__(self, endpoint: str, topic: str = "", *, owner: Owner = unsalted) -> None:
        """`endpoint`: a ZMQ address as vLLM's `--kv-events-config` has it, with a host to connect to."""
        self.endpoint = endpoint
        self._topic = topic
        self._tracker = Tracker(owner)

    def cache_events(self) -> list[CacheEvent]:
        """What has changed since the last call, in order."""
        return self._tracker.tell()

    def restart(self, block: int) -> None:
        """The engine is started anew, with blocks of so many tokens: all that was told is taken back."""
        self._tracker.restart(block)

    async def run(self) -> None:
        """Follow until cancelled. A batch that cannot be read is logged and counts as lost. Raises EngineError."""
        await listen(self.endpoint, self._topic, self._on_batch)

    def _on_batch(self, sequence: int, body: bytes) -> None:
        try:
            events = decode_batch(body)
        except MalformedMessage as error:
            log.warning("KV-cache events from %s: %s", self.endpoint, error)
            return  # the next one shows the gap
        self._tracker.take(sequence, events)


async def listen(endpoint: str, topic: str, on_batch: Callable[[int, bytes], None]) -> None:
    """Call `on_batch` with each batch's sequence number and body, until cancelled. Needs `farflung[events]`.

    ZMQ connects again by itself when the publisher was away. Raises EngineError for an address that is none.
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
    except zmq.ZMQError as error:
        raise EngineError(f"KV-cache events from {endpoint} cannot be followed: {error}") from error
    finally:
        socket.close()
