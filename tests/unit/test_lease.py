"""A lease: how long the broker lets an actor be silent, and how often the actor speaks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from actors.service import Actor
from broker.bus import actors_consumer
from tests.waiting import until


class Delivery:
    signs_of_life = 0

    async def in_progress(self) -> None:
        self.signs_of_life += 1


async def test_an_actor_gives_signs_of_life_well_within_the_lease_that_its_run_asks_for() -> None:
    seconds = 0.3
    spec = SimpleNamespace(fleet=SimpleNamespace(lease_seconds=seconds))
    lease: Any = SimpleNamespace(delivery=Delivery(), workload=SimpleNamespace(spec=spec))
    actor: Any = None
    loop = asyncio.get_running_loop()
    began = loop.time()
    keeping = asyncio.create_task(Actor._keep(actor, lease))
    await until(lambda: lease.delivery.signs_of_life == 4, what="signs of life")
    keeping.cancel()
    assert loop.time() - began > seconds, "no more often than is needed"
    assert actors_consumer(seconds).ack_wait == seconds
