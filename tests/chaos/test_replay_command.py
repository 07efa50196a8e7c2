"""`farflung runs replay` on a run that nobody disturbed, and on one whose record was forged or swept."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from broker.errors import ReplayMismatch, StoreError
from broker.names import checkpoint_prefix
from tests.chaos.scene import Scene

pytestmark = pytest.mark.servers


async def test_a_run_is_replayed_and_a_forged_or_swept_record_is_noticed(scene: Scene) -> None:
    scene.router()
    scene.actor()
    assert await scene.learner().wait() == 0
    commits = await scene.assert_whole()

    replay = scene.start("runs", "replay", scene.run)
    assert await replay.wait() == 0
    assert replay.said.count("bit-identical") == scene.steps

    head = await scene.head()
    forged = replace(commits[-1], weights=commits[-2].weights)
    prefix = f"{checkpoint_prefix(scene.run, head.incarnation, scene.steps)}/state"
    there = await scene.registry.head(scene.run)
    assert there is not None
    ref = await scene.store.put(prefix, forged.encode())
    await scene.registry.set_head(replace(head, checkpoint=ref), there[1])
    replay = scene.start("runs", "replay", scene.run, "--json")
    assert await replay.wait() == ReplayMismatch.exit_code
    lines = replay.said.splitlines()
    said = json.loads(next(line for line in lines if line.startswith("{")))
    assert [step["identical"] for step in said["steps"]] == [*[True] * (scene.steps - 1), False]
    assert not said["identical"]
    assert f"step {scene.steps} (adapter: " in lines[-1]
    assert "optimizer" not in lines[-1], "the optimizer is what it was"

    await scene.store.remove(commits[1].trained[0].blob.key)
    replay = scene.start("runs", "replay", scene.run, "--model", scene.model)
    assert await replay.wait() == StoreError.exit_code
    assert "storage.keep_groups_hours" in replay.said
