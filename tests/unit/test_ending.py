"""Ending tasks that do not hear the first time."""

from __future__ import annotations

import asyncio

import pytest

from broker import ending
from broker.ending import end


async def test_a_task_that_forgot_a_cancellation_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN_SECONDS", 0.01)
    forgotten = 0

    async def forgetful() -> None:
        nonlocal forgotten
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if forgotten == 2:
                    raise
                forgotten += 1

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end(task)
    assert task.cancelled()
    assert forgotten == 2


async def test_how_a_task_ends_is_not_the_enders_concern() -> None:
    async def fails() -> None:
        raise ValueError("x")

    async def returns() -> int:
        return 1

    tasks = [asyncio.create_task(fails()), asyncio.create_task(returns()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    await end(*tasks)
    assert all(task.done() for task in tasks)
