"""A learner that hung in the midst of a step and was displaced meanwhile changes nothing when it wakes."""

from __future__ import annotations

import pytest

from broker.errors import Fenced
from tests.chaos.processes import PATIENCE
from tests.chaos.scene import Scene
from tests.waiting import until_true

pytestmark = pytest.mark.servers


@pytest.mark.parametrize(
    "point",
    [
        "learner.batch_taken", "learner.adapter_uploaded", "learner.before_commit", "learner.after_commit",
        "learner.before_acknowledgements", "learner.before_activation",
    ],
)  # fmt: skip
async def test_a_learner_that_hung_and_was_displaced_changes_nothing_and_says_why_it_leaves(
    point: str, scene: Scene
) -> None:
    scene.configure(run={"steps": 16})
    scene.router()
    scene.actor()
    hung = scene.learner(fault=f"stop {point} 2")
    await hung.halted()
    there = (await scene.head()).step
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
    assert "epoch 2" in hung.said.splitlines()[-1], "it says by whom it was displaced"
    assert await scene.record() == before, "head, versions, tasks and groups are as they were"
    assert objects <= await scene.objects(), "at most it has added what nothing refers to"

    await scene.want("run")
    assert await other.wait() == 0
    await scene.assert_whole()
