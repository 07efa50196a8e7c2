"""Versions published every third step: staleness counts versions, the last step publishes, a resume loses none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from safetensors.numpy import load

from tests.fleet import Fleet
from tests.stubs import StubPolicy
from tests.waiting import until

pytestmark = pytest.mark.servers

STEPS = 8


def every_third(fleet: Fleet, max_staleness: int) -> Any:
    algorithm = {"group_size": 2, "groups_per_step": 2, "max_staleness": max_staleness, "publish_every": 3}
    return fleet.spec(run={"steps": STEPS}, algorithm=algorithm)


async def published_weights(fleet: Fleet, run: str) -> list[float]:
    """The weight of each version's adapter, in the order of versions: the step that made it."""
    records = await fleet.registry.versions(run)
    assert [record.adapter.version for record in records] == list(range(1, len(records) + 1))
    return [float(load(await fleet.store.get(record.adapter.blob))["weight"][0]) for record in records]


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_every_third_step_publishes_and_the_last_one_too(fleet: Fleet, max_staleness: int) -> None:
    await fleet.router()
    await fleet.replica()
    await fleet.actor()
    spec = every_third(fleet, max_staleness)
    summary = await fleet.finished(await fleet.learner(spec))
    steps = fleet.steps(spec)
    assert [step["head"] for step in steps] == [0, 0, 1, 1, 1, 2, 2, 3]
    assert await published_weights(fleet, spec.run.name) == [3.0, 6.0, 8.0]
    assert max(step["staleness_max"] for step in steps) <= max_staleness
    if max_staleness:
        assert max(step["staleness_max"] for step in steps) == 1, "what is one version old is used"
    assert (summary.steps, summary.head) == (STEPS, 3)
    await until(lambda: fleet.active(spec) == 3, within=20, what="the last version is active")
    assert summary.groups["issued"] == 2 * STEPS, "nothing was dropped: the window counts versions, not steps"


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_resume_between_two_versions_goes_on_from_the_step_and_not_from_the_version(
    fleet: Fleet, max_staleness: int
) -> None:
    held = threading.Event()

    class Held(StubPolicy):
        """Stands still in step 6, the one that would publish."""

        def train_step(self, sequences: Any, **options: Any) -> Any:
            if self.steps == 5:
                held.wait(60)
            return super().train_step(sequences, **options)

    await fleet.router()
    await fleet.replica()
    await fleet.actor()
    spec = every_third(fleet, max_staleness)
    first = await fleet.learner(spec, Held())
    await until(lambda: len(fleet.steps(spec)) == 5, within=30, what="step 5")
    await first.stop()
    held.set()
    head = fleet.head(spec)
    assert head is not None
    assert (head.step, head.head) == (5, 1)
    policy = StubPolicy()
    second = await fleet.learner(spec, policy)
    summary = await fleet.finished(second)
    assert policy.restored == [5.0], "the weights of a step that published nothing"
    steps = fleet.steps(spec)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["head"] for step in steps] == [0, 0, 1, 1, 1, 2, 2, 3]
    assert await published_weights(fleet, spec.run.name) == [3.0, 6.0, 8.0]
    assert max(step["staleness_max"] for step in steps) <= max_staleness
    groups = summary.groups
    assert groups["trained"] + groups["skipped"] == 2 * STEPS
    assert groups["issued"] == sum(groups[name] for name in ("trained", "skipped", "dropped", "failed", "expired"))
