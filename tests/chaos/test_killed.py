"""A component is killed at every point there is, and started again: nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import pytest

from broker.faults import POINTS
from tests.chaos.scene import Scene

pytestmark = pytest.mark.servers

PASSES = {
    "learner.issue": 5,
    "learner.issued": 5,
    "learner.activating": 2,
    "learner.before_activation": 2,
    "learner.after_activation": 2,
    "actor.leased": 5,
    "actor.mid_episode": 18,
    "actor.blob_stored": 5,
    "actor.published": 5,
    "actor.acknowledged": 5,
    "replica.fetched": 2,
    "replica.loaded": 2,
}
"""The time around at which a point is struck, so that it is in the midst of the run; elsewhere the third.

With four groups of four episodes issued before the first step, an actor's fifth group follows a step.
"""

AT_START = ("learner.claimed", "learner.adopted")
"""Points that a learner passes once, at its start: in mid-run only where it goes on for one that died."""


@pytest.mark.parametrize("point", [point for point in POINTS if point != "learner.sweeping"])
async def test_whoever_is_killed_nothing_is_lost_and_nothing_is_trained_on_twice(point: str, scene: Scene) -> None:
    scene.router()
    passes = 1 if point in AT_START else PASSES.get(point, 3)
    fault = f"kill {point} {passes}"
    if point.startswith("learner."):
        scene.actor()
        if point in AT_START:
            await scene.learner(fault="kill learner.batch_taken 3").killed()
        await scene.learner(fault=fault).killed()
        assert 0 < (await scene.head()).step < scene.steps, "it was killed in the midst of the run"
        learner = scene.learner()
    else:
        # The replica that dies with its actor counts as present for a while, and is waited for no longer than this.
        scene.configure(fleet={"activation_timeout": 3.0})
        learner = scene.learner()
        await scene.actor(fault=fault).killed()
        assert 0 < (await scene.head()).step < scene.steps, "it was killed in the midst of the run"
        scene.actor()
    assert await learner.wait() == 0
    await scene.assert_whole()
