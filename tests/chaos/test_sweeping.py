"""A learner is killed while it sweeps: what commits name stays, what lost its place to it goes in the end."""

from __future__ import annotations

import pytest

from broker.errors import Fenced
from broker.messages import BlobRef
from learner.checkpoint import Checkpoint
from learner.sweep import contested, place_of
from tests.chaos.processes import PATIENCE
from tests.chaos.scene import Scene
from tests.waiting import until_true

pytestmark = pytest.mark.servers


def blobs_of(commit: Checkpoint) -> list[BlobRef]:
    assert commit.optimizer is not None
    return [commit.weights, commit.optimizer, *(group.blob for group in commit.trained)]


@pytest.mark.parametrize("how", ["killed", "stopped and displaced"])
async def test_a_learner_that_does_not_end_its_sweep_has_removed_nothing_that_counts(how: str, scene: Scene) -> None:
    scene.configure(run={"steps": 16}, storage={"grace_hours": 0.0, "sweep_seconds": 1.0})
    scene.router()
    scene.actor()
    await scene.learner(fault="kill learner.before_commit 2").killed()
    await scene.learner(fault="kill learner.before_commit 2").killed()
    # Both left the state of a step that was made again, hence two objects that no commit will name.

    async def orphans() -> int:
        swept_kinds = ("/groups/", "/adapters/", "/checkpoints/")
        objects = [(key, 0.0) for key in await scene.objects() if any(kind in key for kind in swept_kinds)]
        places = contested(objects, now=1.0, grace_hours=0.0)
        # A group that was issued again, and that no step has used yet, may have two blobs until one does.
        used = {place_of(group.blob.key) for commit in await scene.commits() for group in commit.trained}
        return sum(len(keys) - 1 for place, keys in places.items() if "/groups/" not in place or place in used)

    async def made_again() -> bool:
        return (await scene.head()).step >= 4

    sweeping = scene.learner(fault=f"{'kill' if how == 'killed' else 'stop'} learner.sweeping 1")
    await until_true(made_again, within=PATIENCE, what="the steps are made again")
    await scene.want("pause")
    await (sweeping.killed() if how == "killed" else sweeping.halted())
    named = {blob.key for commit in await scene.commits() for blob in blobs_of(commit)}
    assert named <= await scene.objects(), "what commits name is there"
    learner = scene.learner() if how == "killed" else scene.learner("--take-over")

    async def swept() -> bool:
        return await orphans() == 0

    await until_true(swept, within=PATIENCE, what="the next learner sweeps the rest")
    if how != "killed":
        before = await scene.objects()
        sweeping.proceed()
        assert await sweeping.wait() == Fenced.exit_code
        assert await scene.objects() == before
    await scene.want("run")
    assert await learner.wait() == 0
    await scene.assert_whole()
