"""A lock between processes of one machine, held while a file is open."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.errors import RunConflict


@contextmanager
def file_lock(path: Path, *, wait: bool = True, busy: str = "") -> Iterator[None]:
    """Hold `path` exclusively. With `wait` false, raises RunConflict(`busy`) when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise RunConflict(busy or f"{path} is held by another process") from None
        yield
