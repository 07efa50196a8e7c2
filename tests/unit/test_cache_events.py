"""KV-cache events: both of their forms, our hashes for them, what was lost, and a real ZMQ publisher."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import numpy as np
import pytest

from actors.engines.base import PublishesCache
from actors.engines.cache_events import CacheFeed, Cleared, Removed, Stored, Tracker, decode_batch
from broker.blocks import HASH, chain
from broker.errors import MalformedMessage
from broker.messages import CacheEvent
from tests.waiting import until

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()  # type: ignore[no-any-return]


def stored(hashes: list[Any], parent: Any, ids: list[int], lora: str | None = None, extra: Any = None) -> list[Any]:
    return ["BlockStored", hashes, parent, ids, 16, None, "GPU", lora, extra]


def batch(*events: list[Any], form: str = "array") -> bytes:
    if form == "array":
        return bytes(msgpack.packb([1.5, list(events), 0]))
    maps = [{"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=False))} for event in events]
    body = {"ts": 1.5, "events": maps, "data_parallel_rank": 0} if form == "map in map" else [1.5, maps, 0]
    return bytes(msgpack.packb(body))


@pytest.mark.parametrize("form", ["array", "map", "map in map"])
def test_a_batch_is_understood_in_every_form_in_which_vllm_writes_it(form: str) -> None:
    ids = tokens(1, 32)
    data = batch(
        stored([11, b"twelve"], 10, ids, "run-v1", [["run-v1"], None]),
        ["BlockRemoved", [7], "GPU"],
        ["AllBlocksCleared"],
        form=form,
    )
    assert decode_batch(data) == [
        Stored([11, b"twelve"], 10, ids, 16, "run-v1", False), Removed([7]), Cleared()
    ]  # fmt: skip


def test_what_is_newer_than_this_reader_is_left_out() -> None:
    newer = [*stored([1], None, tokens(1, 16)), "a", "b", "c", {"d": 1}]
    assert len(decode_batch(msgpack.packb([0.0, [newer, ["BlockPainted", "red"]], 0, "more"]))) == 1
    assert decode_batch(batch(["BlockRemoved", [7], "CPU"])) == []


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([1.0]),
        msgpack.packb([1.0, "events"]),
        msgpack.packb([1.0, [5]]),
        batch(["BlockRemoved", "all"]),
        batch(["BlockRemoved", [None]]),
        batch(stored([1], None, tokens(1, 15))),
        batch(stored([1], None, [-1] * 16)),
        batch(stored([1], None, ["a"] * 16)),
        batch(stored([1], [2], tokens(1, 16))),
        batch(["BlockStored", [1], None, tokens(1, 16), 0, None, "GPU"]),
        batch(["BlockStored", [1], None, tokens(1, 16), "16", None, "GPU"]),
        batch(["BlockStored", [1], None, tokens(1, 16), 16, None, "GPU", 5]),
    ],
)
def test_malformed_events_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_batch(body)


def test_blocks_are_told_in_our_hashes_from_the_prompts_beginning_on() -> None:
    subject = Tracker()
    ids = tokens(1, 64)
    first = subject.take(0, decode_batch(batch(stored([1, 2], None, ids[:32], "v1"))))
    assert first == [CacheEvent("stored", "v1", chain("v1", np.array(ids[:32], np.int32)))]
    second = subject.take(1, decode_batch(batch(stored([3, 4], 2, ids[32:], "v1"))))
    whole = chain("v1", np.array(ids, np.int32))
    assert second == [CacheEvent("stored", "v1", whole)]
    assert subject.take(2, [Removed([4, 99, 3])]) == [
        CacheEvent("removed", blocks=whole[-HASH:] + whole[-2 * HASH : -HASH])
    ]
    assert len(subject) == 2
    assert subject.take(3, [Cleared()]) == [CacheEvent("cleared")]
    assert len(subject) == 0


def test_what_is_not_known_from_the_beginning_is_not_told() -> None:
    subject = Tracker()
    assert subject.take(0, decode_batch(batch(stored([2], 1, tokens(1, 16))))) == []
    salted = stored([3], None, tokens(1, 16), "v1", [["v1", "salt"]])
    assert subject.take(1, decode_batch(batch(salted))) == []
    assert len(subject) == 0


def test_lost_batches_take_back_everything() -> None:
    subject = Tracker()
    one = decode_batch(batch(stored([1], None, tokens(1, 16))))
    assert [event.change for event in subject.take(5, one)] == ["stored"]
    assert [event.change for event in subject.take(6, [])] == []
    assert [event.change for event in subject.take(9, one)] == ["cleared", "stored"]
    assert subject.lost == 2
    assert subject.take(8, one) == [], "older than the last"
    assert [event.change for event in subject.take(0, one)] == ["cleared", "stored"], "the engine was started anew"


async def test_a_publisher_is_followed_over_zmq() -> None:
    zmq = pytest.importorskip("zmq")
    publisher = zmq.Context.instance().socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    feed = CacheFeed(f"tcp://127.0.0.1:{port}")
    assert isinstance(feed, PublishesCache)
    task = asyncio.create_task(feed.run())
    seen: list[CacheEvent] = []
    sequence = 0

    def publish(body: bytes, *more: bytes) -> None:
        nonlocal sequence
        publisher.send_multipart([b"", sequence.to_bytes(8, "big"), body, *more])
        sequence += 1

    def heard() -> bool:
        publish(batch(stored([1], None, tokens(1, 16))))
        seen.extend(feed.cache_events())
        return bool(seen)

    await until(heard, what="the subscription to be there")
    seen.clear()
    publish(b"\xc1")
    publish(b"", b"a frame too many")
    publish(batch(stored([1], None, tokens(1, 16))))
    publish(batch(["BlockRemoved", [1], "GPU"]))
    await until(lambda: seen.extend(feed.cache_events()) or any(event.change == "removed" for event in seen))
    assert [event.change for event in seen][-3:] == ["cleared", "stored", "removed"], "what could not be read was lost"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publisher.close(linger=0)
