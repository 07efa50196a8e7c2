"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_SECONDS = 1.0
"""How long a cancelled task has to end before it is cancelled again."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and return when all have ended, whatever they end with.

    Cancelled more than once if need be: before Python 3.12, `asyncio.wait_for`, with which the NATS client waits for
    everything, forgets a cancellation that comes at the same moment as what it waits for.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
