"""A component stands still for longer than its leases and its presence last, and then goes on as if nothing was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker.errors import Fenced
from tests.chaos.processes import PATIENCE, Component
from tests.chaos.scene import Scene
from tests.waiting import until_true

pytestmark = pytest.mark.servers

LEARNER = ("learner.issued 5", "learner.batch_taken 2", "learner.before_commit 2")
ACTOR = (
    "actor.leased 5", "actor.mid_episode 18", "actor.blob_stored 5", "actor.published 5", "actor.acknowledged 5",
    "replica.fetched 2", "replica.loaded 2",
)  # fmt: skip


async def gone(scene: Scene, component: Component) -> None:
    """Wait until nobody counts a component as present any more."""

    async def absent() -> bool:
        nodes = [await scene.node(key) for key in await scene.registry.nodes.keys(">")]
        return all(node is None or node.pid != component.pid for node in nodes)

    await until_true(absent, within=PATIENCE, what=f"the presence of {component.name} is over")


async def stand_still(scene: Scene, *, learners: str = "", actors: str = "") -> None:
    """A whole run whose learner, or only actor, stands still at a point until its presence is over."""
    scene.router()
    actor = scene.actor(fault=actors)
    learner = scene.learner(fault=learners)
    hung = actor if actors else learner
    await hung.halted()
    assert 0 < (await scene.head()).step < scene.steps, "it stands still in the midst of the run"
    await gone(scene, hung)
    hung.proceed()
    assert await learner.wait() == 0


@pytest.mark.parametrize("faults", [LEARNER, ACTOR[:4], ACTOR[4:]], ids=["learner", "actor", "actor and replica"])
async def test_components_that_stood_still_for_longer_than_their_presence_lasts_go_on(
    faults: tuple[str, ...], scenes: Callable[[], Scene]
) -> None:
    # Several at once, as the time goes into waiting; but transformers loads one model at a time.
    hung = {f"stop {fault}": scenes() for fault in faults}
    await asyncio.gather(
        *(
            stand_still(scene, **{"learners" if "learner." in fault else "actors": fault})
            for fault, scene in hung.items()
        )
    )
    for scene in hung.values():
        await scene.assert_whole()


async def test_a_learner_whose_presence_is_over_is_succeeded_without_being_asked_and_stays_out(scene: Scene) -> None:
    scene.router()
    scene.actor()
    hung = scene.learner(fault="stop learner.before_commit 3")
    await hung.halted()
    refused = scene.learner()
    assert await refused.wait() == 5
    assert "--take-over" in refused.said
    await gone(scene, hung)
    # A watch that begins just then may still be shown the record: whoever is refused comes again, as a person would.
    codes = [await scene.learner().wait()]
    while codes[-1] == 5 and len(codes) < 5:
        codes.append(await scene.learner().wait())
    assert codes[-1] == 0, codes
    before = await scene.record()
    hung.proceed()
    assert await hung.wait() == Fenced.exit_code
    assert await scene.record() == before
    await scene.assert_whole()
