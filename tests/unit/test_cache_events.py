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
from broker.errors import EngineError, MalformedMessage
from broker.messages import CacheEvent
from tests.waiting import until

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()  # type: ignore[no-any-return]


def stored(hashes: list[Any], parent: Any, ids: list[Any], lora: str | None = None, extra: Any = None) -> list[Any]:
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
        Stored([11, b"twelve"], 10, ids, 16, "run-v1", ""), Removed([7]), Cleared()
    ]  # fmt: skip


def test_what_is_newer_than_this_reader_is_left_out() -> None:
    newer = [*stored([1], None, tokens(1, 16)), 0, "full_attention", None, {"d": 1}]
    assert len(decode_batch(msgpack.packb([0.0, [newer, ["BlockPainted", "red"]], 0, "more"]))) == 1
    assert decode_batch(batch(["BlockRemoved", [7], "CPU"])) == []


def test_blocks_that_tokens_adapter_and_salt_do_not_tell_are_left_out() -> None:
    ids = tokens(1, 32)
    unnamed = ["BlockStored", [1, 2], None, ids, 16, 1, "GPU"]  # of an older release
    pictures = [
        stored([1, 2], None, ids, "v1", keys) for keys in ([["v1", ["picture", 3]], None], [["v1"], ["v1", "p"]])
    ]
    windows = [*stored([1, 2], None, ids), 1, "sliding_window"]
    assert decode_batch(batch(unnamed, *pictures, windows)) == []
    assert decode_batch(batch(["BlockRemoved", [1], "GPU", 1])) == []


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


def told(subject: Tracker, sequence: int, *events: Any) -> list[CacheEvent]:
    subject.take(sequence, decode_batch(batch(*events)))
    return subject.tell()


def ours(ids: list[int], adapter: str | None = None) -> bytes:
    return chain(adapter, np.array(ids, np.int32))


def test_blocks_are_told_in_our_hashes_from_the_prompts_beginning_on() -> None:
    subject = Tracker()
    ids = tokens(1, 64)
    assert told(subject, 0, stored([1, 2], None, ids[:32], "v1")) == [CacheEvent("stored", "v1", ours(ids[:32], "v1"))]
    whole = ours(ids, "v1")
    assert told(subject, 1, stored([3, 4], 2, ids[32:], "v1")) == [CacheEvent("stored", "v1", whole)]
    gone = CacheEvent("removed", blocks=whole[-HASH:] + whole[-2 * HASH : -HASH])
    assert told(subject, 2, ["BlockRemoved", [4, 99, 3], "GPU"]) == [gone]
    assert len(subject) == 2
    assert told(subject, 3, ["AllBlocksCleared"]) == [CacheEvent("cleared")]
    assert len(subject) == 0


def test_what_happened_between_two_reports_is_told_as_what_came_of_it() -> None:
    subject = Tracker()
    ids, other = tokens(1, 64), tokens(2, 32)
    subject.take(
        0, decode_batch(batch(stored([1], None, ids[:16]), stored([2], 1, ids[16:32]), stored([3], 2, ids[32:48])))
    )
    subject.take(1, decode_batch(batch(["BlockRemoved", [3], "GPU"], stored([9], 1, other[:16]))))
    gone = ours(ids[:48])[-HASH:]
    assert subject.tell() == [
        CacheEvent("removed", blocks=gone),
        CacheEvent("stored", blocks=ours(ids[:32])),
        CacheEvent("stored", blocks=ours(ids[:16] + other[:16])),
    ]
    again = told(subject, 2, ["BlockRemoved", [2], "GPU"], stored([2, 3], 1, ids[16:48]))
    assert again == [CacheEvent("stored", blocks=ours(ids[:48]))], "removed and stored again: it is there"
    assert subject.tell() == []


def test_what_a_prompt_met_is_told_again_only_where_it_was_not_known() -> None:
    subject = Tracker()
    ids = tokens(1, 48)
    told(subject, 0, stored([1, 2], None, ids[:32]))
    assert told(subject, 1, stored([1, 2], None, ids[:32])) == []
    assert told(subject, 2, stored([1, 2, 3], None, ids)) == [CacheEvent("stored", blocks=ours(ids))]
    told(subject, 3, ["BlockRemoved", [3], "GPU"])
    assert told(subject, 4, stored([1, 2, 3], None, ids)) == [CacheEvent("stored", blocks=ours(ids))], (
        "there was another"
    )


def test_what_is_not_known_from_the_beginning_is_not_told() -> None:
    subject = Tracker()
    assert told(subject, 0, stored([2], 1, tokens(1, 16))) == []
    assert told(subject, 1, stored([3], None, tokens(1, 16), "v1", [["v1", "salt"]])) == []
    assert len(subject) == 0


def test_adapters_are_told_apart_by_name_and_salt_along_the_whole_chain() -> None:
    owners = {("v1", "salt of v1"): "v1", ("v2", "salt of v2"): "v2", ("zero", ""): None}

    def owner(name: str | None, salt: str) -> str | None:
        return owners[name or "", salt]

    subject = Tracker(owner)
    ids = tokens(1, 32)
    events = [
        stored([1], None, ids[:16], "v1", [["v1", "salt of v1"]]),
        stored([2], None, ids[:16], "v2", [["v2", "salt of v2"]]),
        stored([3], None, ids[:16], "zero", [["zero"]]),
        stored([4], None, ids[:16], "v1", [["v1", "salt of other bytes under the name"]]),
        stored([5], None, ids[:16], None, [None]),
    ]
    later = [stored([parent + 10], parent, ids[16:], name, [[name]] if name else None)
             for parent, name in ((1, "v1"), (2, "v2"), (3, "zero"), (4, "v1"), (5, None))]  # fmt: skip
    assert told(subject, 0, *events, *later) == [
        CacheEvent("stored", "v1", ours(ids, "v1")),
        CacheEvent("stored", "v2", ours(ids, "v2")),
        CacheEvent("stored", None, ours(ids)),
    ]
    del owners["v1", "salt of v1"]  # unloaded, and loaded anew from elsewhere
    owners["v1", "another salt"] = "v1"
    assert told(subject, 1, stored([21], 11, tokens(2, 16), "v1", [["v1"]])) == []


def test_blocks_of_another_size_than_the_engine_says_are_not_told() -> None:
    subject = Tracker()
    subject.restart(32)
    assert told(subject, 0, stored([1], None, tokens(1, 16))) == [CacheEvent("cleared")]


def test_lost_batches_take_back_everything() -> None:
    subject = Tracker()
    one = stored([1], None, tokens(1, 16))
    assert [event.change for event in told(subject, 5, one)] == ["stored"]
    assert told(subject, 6) == []
    assert [event.change for event in told(subject, 9, one)] == ["cleared", "stored"]
    assert subject.lost == 2
    assert [event.change for event in told(subject, 3, one)] == ["cleared", "stored"], "the engine was started anew"
    subject.restart()
    assert [event.change for event in told(subject, 4, one)] == ["cleared", "stored"]


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
    publish(b"\xc1")
    publish(b"", b"a frame too many")
    publish(batch(stored([1], None, tokens(1, 16))))
    await until(lambda: seen.extend(feed.cache_events()) or CacheEvent("cleared") in seen, what="the gap to be seen")
    assert seen[-2:] == [CacheEvent("cleared"), CacheEvent("stored", blocks=ours(tokens(1, 16)))]
    publish(batch(["BlockRemoved", [1], "GPU"]))
    await until(lambda: seen.extend(feed.cache_events()) or seen[-1].change == "removed")
    feed.restart(16)
    assert feed.cache_events() == [CacheEvent("cleared")]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publisher.close(linger=0)


async def test_an_address_that_is_none_is_said() -> None:
    pytest.importorskip("zmq")
    with pytest.raises(EngineError, match="nowhere"):
        await CacheFeed("nowhere").run()
