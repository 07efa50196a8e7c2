"""Small things about the machine and private files that several commands need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from broker.errors import ServerError
from broker.locks import file_lock


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, in one step: a reader sees the old content or the new.

    Raises ServerError when the disk does not take it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise ServerError(
            f"{path} cannot be written: {error.strerror}; make room on its disk, or choose another --dir"
        ) from error


@contextmanager
def hold(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock file `path` during the block.

    Raises RunConflict(`busy`) when another process holds it, and ServerError when it cannot be made.
    """
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(path, wait=False, busy=busy))
        except OSError as error:
            raise ServerError(
                f"{path} cannot be written: {error.strerror}; make room on its disk, or choose another --dir"
            ) from error
        yield


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
