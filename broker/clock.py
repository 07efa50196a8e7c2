"""The time by which everything in an event loop waits."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Seconds on the running event loop's clock, which only moves forward. A simulation gives its loop another."""
    return asyncio.get_running_loop().time()
