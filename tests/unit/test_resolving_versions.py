"""Which version serves a group: the active one, never an older one than its task counts on, never the base model for
a run that does not begin with it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from actors.service import Actor, Lease
from broker.errors import StoreError
from broker.messages import Head, Task
from tests.unit.test_learner_parts import head, ref


def actor_that_sees(now: Head, *, seconds_a_look: float) -> Actor:
    """An actor to whom the registry shows `now`, and whose clock moves on with each look at it."""
    nothing: Any = None
    bus: Any = SimpleNamespace(client=SimpleNamespace(new_inbox=lambda: "inbox"))
    clock = itertools.count(step=seconds_a_look)
    actor = Actor(
        bus, nothing, nothing, nothing, fleet="f", id="a", context=64, roots=[], max_inflight=8,
        clock=lambda: float(next(clock)),
    )  # fmt: skip
    heads: Any = SimpleNamespace(heads={"r": now})
    actor._heads = heads
    return actor


def lease(active: int) -> Lease:
    nothing: Any = None
    task = Task(run="r", incarnation="i", group="g", index=0, columns={}, group_size=2, seed=0, active=active)
    return Lease(nothing, task, nothing, 0.0)


async def test_a_task_that_counts_on_a_version_that_was_lost_waits_for_no_news() -> None:
    given = lease(active=7)
    subject = actor_that_sees(head(head=5, active=5), seconds_a_look=0.0)
    await subject._resolve_version(given)
    assert (given.version, given.adapter) == (5, ref(5).name)


async def test_the_base_model_serves_no_group_of_a_branched_run_even_when_the_news_does_not_come() -> None:
    given = lease(active=1)
    subject = actor_that_sees(head(head=1, active=0, first=1, live=[ref(1)]), seconds_a_look=60.0)
    with pytest.raises(StoreError, match="begins with, 1, is not active yet"):
        await subject._resolve_version(given)
