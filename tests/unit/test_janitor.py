"""What the janitor does about a store that loses what it took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from nats.js.errors import NotFoundError

from broker import names
from broker.errors import StoreError
from broker.messages import AdapterRef, BlobRef
from broker.store import reference
from learner.janitor import Janitor
from learner.ledger import Ledger
from tests.unit.test_feeder_and_intake import SPEC
from tests.unit.test_learner_parts import head


class StubStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away = False

    async def exists(self, ref: BlobRef) -> bool:
        if self.away:
            raise StoreError("away")
        return ref.key in self.objects

    async def put(self, prefix: str, data: bytes) -> BlobRef:
        ref = reference(prefix, data)
        self.objects[ref.key] = data
        return ref


def adapter(version: int, weights: bytes) -> AdapterRef:
    blob = reference(names.adapter_prefix("r", "i", version), weights)
    name = names.adapter_name("r", version, blob.sha256)
    return AdapterRef(version=version, name=name, key=blob.key, size=blob.size, sha256=blob.sha256)


def janitor(store: StubStore, live: list[AdapterRef], kept: dict[int, bytes]) -> Janitor:
    session: Any = SimpleNamespace(head=head(head=2, active=2, live=live), require=AsyncMock())
    subject: Any = store
    bus: Any = None
    return _janitor(bus, subject, session, Ledger(), kept)


def _janitor(bus: Any, store: Any, session: Any, ledger: Ledger, kept: dict[int, bytes] | None = None) -> Janitor:
    """A janitor whose re-issues go to `bus.again`, and that has nothing in hand but `bus.in_hand`."""

    async def again(group: str, index: int) -> None:
        bus.again.append((group, index))

    return Janitor(
        bus, store, session, ledger, SPEC,
        on_unanswered=lambda *_: None, weights_of=(kept or {}).get, issue_again=again,
        in_hand=lambda group: group in bus.in_hand,
    )  # fmt: skip


async def test_an_adapter_that_the_store_lost_is_stored_again_under_its_key() -> None:
    store = StubStore()
    live = [adapter(1, b"one"), adapter(2, b"two")]
    store.objects[live[0].key] = b"one"
    await janitor(store, live, {1: b"one", 2: b"two"})._put_back()
    assert store.objects == {live[0].key: b"one", live[1].key: b"two"}


async def test_other_bytes_are_never_stored_in_an_adapters_place() -> None:
    store = StubStore()
    await janitor(store, [adapter(2, b"two")], {2: b"not two"})._put_back()
    assert store.objects == {}


async def test_a_store_that_is_away_is_looked_after_another_time(caplog: pytest.LogCaptureFixture) -> None:
    store = StubStore()
    store.away = True
    await janitor(store, [adapter(2, b"two")], {2: b"two"})._put_back()
    assert "not looked after" in caplog.text


class ListingStore(StubStore):
    """Everything in it was written two days before the newest."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.keys = keys

    async def list(self, prefix: str) -> list[tuple[str, float]]:
        newest = max(self.keys)
        return [(key, 2 * 86400.0 if key == newest else 0.0) for key in self.keys if key.startswith(prefix)]

    async def remove(self, key: str) -> None:
        self.keys.remove(key)


async def test_the_steps_between_two_kept_versions_keep_their_checkpoints() -> None:
    prefix = names.run_prefix("r", "i")
    store = ListingStore([f"{prefix}/checkpoints/{step:06d}/state.{'0' * 64}" for step in range(1, 21)])
    subject = janitor(store, [], {})
    storage = msgspec.structs.replace(SPEC.storage, keep_versions=2)
    algorithm = msgspec.structs.replace(SPEC.algorithm, publish_every=4)
    subject._spec = msgspec.structs.replace(SPEC, storage=storage, algorithm=algorithm)
    subject._session.head = head(head=5, active=5, step=20, live=[])  # type: ignore[misc]
    await subject._sweep()
    assert [int(key.split("/")[4]) for key in store.keys] == list(range(13, 21))


class ListingBus:
    """Streams that hold what they are told to."""

    def __init__(self) -> None:
        self.held: dict[str, set[str]] = {}
        self.again: list[tuple[str, int]] = []
        self.in_hand: set[str] = set()
        self.jetstream = self

    async def consumer_info(self, stream: str, consumer: str) -> object:
        raise NotFoundError

    async def subjects_held(self, stream: str) -> set[str]:
        return self.held.get(stream, set())


async def test_what_is_open_and_nowhere_is_issued_again_and_what_is_somewhere_is_not() -> None:
    bus, ledger = ListingBus(), Ledger()
    for group in ("queued", "answered", "held", "lost"):
        ledger.issue(group)
    bus.held = {names.tasks_stream("r"): {"tasks.r.2.queued"}, names.groups_stream("r"): {"groups.r.answered"}}
    bus.in_hand = {"held"}
    subject = _janitor(bus, None, SimpleNamespace(run="r"), ledger)
    await subject._compare()
    assert bus.again == [], "a task may be on its way"
    await subject._compare()
    assert bus.again == [("lost", 3)]
    await subject._compare()
    assert bus.again == [("lost", 3)], "and is given time to get there"
