"""A learner that hung in the midst of a step and was displaced meanwhile changes nothing when it wakes."""

from __future__ import annotations

import pytest

from broker.errors import Fenced
from broker.faults import POINTS
from tests.chaos.processes import PATIENCE
from tests.chaos.scene import Scene
from tests.waiting import until_true

pytestmark = pytest.mark.servers


AT_START = ("learner.claimed", "learner.adopted")
"""Points that a learner passes once, at its start."""


@pytest.mark.parametrize("began", ["in the midst", "before the first step"])
@pytest.mark.parametrize("point", AT_START)
async def test_a_learner_that_hung_at_its_start_and_was_displaced_changes_nothing(
    point: str, began: str, scene: Scene
) -> None:
    scene.configure(run={"steps": 16})
    scene.router()
    scene.actor()
    if began == "in the midst":
        await scene.learner(fault="kill learner.batch_taken 3").killed()
    await displaced(scene, f"stop {point}")


@pytest.mark.parametrize(
    "point",
    [point for point in POINTS if point.startswith("learner.") and point not in (*AT_START, "learner.sweeping")],
)
async def test_a_learner_that_hung_and_was_displaced_changes_nothing_and_says_why_it_leaves(
    point: str, scene: Scene
) -> None:
    scene.configure(run={"steps": 16})
    scene.router()
    scene.actor()
    await displaced(scene, f"stop {point} 2")


async def displaced(scene: Scene, fault: str) -> None:
    """A learner stands still at a point, another one takes its place and makes steps; then the first one goes on."""
    hung = scene.learner(fault=fault)
    await hung.halted()
    held = await scene.head()
    there, epoch = held.step, held.epoch + 1
    other = scene.learner("--take-over")

    async def went_on() -> bool:
        return (await scene.head()).step >= there + 2

    await until_true(went_on, within=PATIENCE, what="the other learner makes steps")
    await scene.want("pause")
    await until_true(scene.stands_still, within=PATIENCE, what="the paused run comes to rest")
    assert (await scene.head()).step < scene.steps, "the run is in its midst"
    before, objects = await scene.record(), await scene.objects()

    hung.proceed()
    assert await hung.wait() == Fenced.exit_code
    assert f"epoch {epoch}" in hung.said.splitlines()[-1], "it says by whom it was displaced"
    assert await scene.record() == before, "head, versions, tasks and groups are as they were"
    assert objects <= await scene.objects(), "at most it has added what nothing refers to"

    await scene.want("run")
    assert await other.wait() == 0
    await scene.assert_whole()
