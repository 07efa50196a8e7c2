"""The store against a real S3 server."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError, ConnectionFailed, ObjectCorrupt, ObjectMissing
from broker.messages import BlobRef
from broker.store import Store, StoreAddress
from deploy.servers import Server, free_port

pytestmark = pytest.mark.servers


async def test_what_was_put_comes_back_under_a_key_that_ends_in_its_hash(store: Store) -> None:
    ref = await store.put("runs/a/i/groups/g", b"hello" * 1000)
    assert ref.key.endswith(ref.sha256)
    assert await store.get(ref) == b"hello" * 1000
    assert await store.exists(ref)
    assert [key for key, _ in await store.list("runs/a/i/")] == [ref.key]
    await store.remove(ref.key)
    await store.remove(ref.key)
    assert not await store.exists(ref)


async def test_a_missing_object_is_told_from_a_broken_store(store: Store) -> None:
    with pytest.raises(ObjectMissing):
        await store.get(BlobRef(key="runs/none/" + "0" * 64, size=1, sha256="0" * 64))


async def test_other_bytes_than_recorded_are_refused(store: Store) -> None:
    ref = await store.put("runs/b", b"right")
    with pytest.raises(ObjectCorrupt):
        await store.get(BlobRef(key=ref.key, size=ref.size, sha256="0" * 64))


async def test_wrong_keys_are_refused_at_open(store_server: Server) -> None:
    url = f"http://somebody:wrong@127.0.0.1:{store_server.launch.port}/farflung"
    with pytest.raises(ConnectionFailed, match="check the access key"):
        await Store(StoreAddress.parse(url)).open(timeout=2)


async def test_an_unreachable_store_is_named() -> None:
    port = free_port()
    with pytest.raises(ConnectionFailed, match=f"http://127.0.0.1:{port}/farflung cannot be reached"):
        await Store(StoreAddress.parse(f"http://a:b@127.0.0.1:{port}/farflung")).open(timeout=1)


def test_a_store_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected http"):
        StoreAddress.parse("minio:9000")
