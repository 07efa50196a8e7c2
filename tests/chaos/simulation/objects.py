"""An S3 server in memory behind what the minio client offers, as far as Farflung uses it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from minio.error import S3Error


class Objects:
    """One bucket. It may be away, full, or forget what it took."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self.held: dict[str, tuple[bytes, float]] = {}
        self.forgotten: dict[str, bytes] = {}
        """What it took, and has lost since."""
        self.away = False
        self.full = False

    def forget(self, key: str) -> None:
        found = self.held.pop(key, None)
        if found is not None:
            self.forgotten[key] = found[0]

    def ever_held(self, key: str) -> bytes | None:
        """What was stored under `key`, whether or not it is still there."""
        return self.held[key][0] if key in self.held else self.forgotten.get(key)

    # ------------------------------------------------------------------------------------------------ minio.Minio

    def put_object(self, bucket: str, key: str, data: io.BytesIO, length: int) -> None:
        self._answer()
        if self.full:
            raise _error("XMinioStorageFull", "the disk is full", key)
        self.held[key] = (data.read(length), self._time())
        self.forgotten.pop(key, None)

    def get_object(self, bucket: str, key: str) -> Any:
        self._answer()
        found = self._found(key)
        return SimpleNamespace(read=lambda: found[0], close=lambda: None, release_conn=lambda: None)

    def stat_object(self, bucket: str, key: str) -> Any:
        self._answer()
        return SimpleNamespace(size=len(self._found(key)[0]))

    def list_objects(self, bucket: str, prefix: str = "", recursive: bool = False) -> Iterator[Any]:
        self._answer()
        for key, (_, written) in sorted(self.held.items()):
            if key.startswith(prefix):
                when = datetime.fromtimestamp(written, UTC)
                yield SimpleNamespace(object_name=key, last_modified=when, is_dir=False)

    def remove_object(self, bucket: str, key: str) -> None:
        self._answer()
        self.held.pop(key, None)

    def bucket_exists(self, bucket: str) -> bool:
        self._answer()
        return True

    def _found(self, key: str) -> tuple[bytes, float]:
        if key not in self.held:
            raise _error("NoSuchKey", "no such key", key)
        return self.held[key]

    def _answer(self) -> None:
        if self.away:
            raise ConnectionError("the store is away")


def _error(code: str, message: str, key: str) -> S3Error:
    nothing: Any = None
    return S3Error(nothing, code, message, key, "", "")
