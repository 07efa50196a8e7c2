"""Waiting for a condition, with a deadline, in place of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], *, within: float = 10.0, what: str = "") -> None:
    """Return as soon as `condition` holds; fail when it does not within `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what or condition}")
        await asyncio.sleep(0.01)


async def until_true(condition: Callable[[], Awaitable[object]], *, within: float = 10.0, what: str = "") -> None:
    """Like `until`, for a condition that has to ask somebody."""
    deadline = time.monotonic() + within
    while not await condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {what or condition}")
        await asyncio.sleep(0.05)
