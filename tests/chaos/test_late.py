"""Two actors finish one group: one blob is trained on, the other is referred to by nobody and swept."""

from __future__ import annotations

import pytest

from learner.sweep import place_of
from tests.chaos.processes import PATIENCE
from tests.chaos.scene import Scene
from tests.waiting import until_true

pytestmark = pytest.mark.servers


async def test_what_comes_from_an_actor_whose_lease_was_over_is_late_never_trained_on_and_swept(scene: Scene) -> None:
    scene.configure(
        run={"steps": 16},
        algorithm={"max_staleness": 16},  # every group is issued at once, and none grows too old
        storage={"grace_hours": 0.0, "sweep_seconds": 1.0},
    )
    scene.router()
    scene.actor("--adapter-slots", 18)
    hung = scene.actor("--no-engine", "--max-inflight", 4, fault="stop actor.blob_stored 1")
    learner = scene.learner()
    await hung.halted()
    await scene.want("pause")
    await until_true(scene.stands_still, within=PATIENCE, what="its task is done by another actor")
    blobs: dict[str, list[str]] = {}
    for key in await scene.objects():
        blobs.setdefault(place_of(key), []).append(key)
    [(place, twice)] = [(place, keys) for place, keys in blobs.items() if "/groups/" in place and len(keys) > 1]
    group = place.rpartition("/")[2]

    async def trained() -> bool:
        return any(group == one.id for commit in await scene.commits() for one in commit.trained)

    await scene.want("run")
    await until_true(trained, within=PATIENCE, what="the other actor's answer is trained on")
    await scene.want("pause")
    await until_true(scene.stands_still, within=PATIENCE, what="the paused run comes to rest")
    assert (await scene.head()).step < scene.steps, "the run is in its midst"
    assert await scene.gauge("late") == 0
    hung.proceed()

    async def late_and_swept() -> bool:
        return await scene.gauge("late") == 1 and not set(twice) <= await scene.objects()

    await until_true(late_and_swept, within=PATIENCE, what="its answer is counted late, its blob is swept")
    await scene.want("run")
    assert await learner.wait() == 0
    commits = await scene.assert_whole()
    [used] = [one.blob.key for commit in commits for one in commit.trained if one.id == group]
    assert set(twice) & await scene.objects() == {used}, "of the two, the one that was trained on is there"
    assert commits[-1].ledger["late"] == 1
