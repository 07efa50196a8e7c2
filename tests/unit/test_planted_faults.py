"""Engines that serve something else than they say: each is caught, and no gradient is applied.

Everything is real but the engine's honesty: broker, store, learner, router, actor, replicas, and the embedded engine
on the tiny model, in one process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.engines.base import Generation, Sampling
from actors.engines.embedded import EmbeddedEngine
from broker.bus import Bus
from broker.errors import PolicyMismatch
from broker.registry import Registry
from broker.store import Store
from broker.trajectories import Group
from tests.waiting import until
from tests.whole_run import WholeRun, whole_run

pytestmark = pytest.mark.servers


class HonestEngine(EmbeddedEngine):
    """Serves what it says."""


class BaseInItsName(EmbeddedEngine):
    """Serves the base model in every adapter's name."""

    async def generate(self, request_id: str, adapter: str | None, prompt: Any, sampling: Sampling) -> Generation:
        result = await super().generate(request_id, None, prompt, sampling)
        return named(result, adapter)


class Behind(EmbeddedEngine):
    """Honest while it is probed; then each adapter is served by the one loaded before it, the first by the base."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before: dict[str, str | None] = {}

    async def load_adapter(self, name: str, directory: Path) -> None:
        await super().load_adapter(name, directory)
        if "-probe-" not in name:
            self.before[name] = next(reversed(self.before), None)

    async def unload_adapter(self, name: str) -> None:
        if "-probe-" in name:
            await super().unload_adapter(name)

    async def generate(self, request_id: str, adapter: str | None, prompt: Any, sampling: Sampling) -> Generation:
        result = await super().generate(request_id, self.before.get(adapter or "", adapter), prompt, sampling)
        return named(result, adapter)


class Misreads(EmbeddedEngine):
    """Loads adapters with a configuration that says something else."""

    changes: dict[str, Any] = {}

    async def load_adapter(self, name: str, directory: Path) -> None:
        other = directory.with_name(f"{directory.name}-misread")
        shutil.copytree(directory, other, dirs_exist_ok=True)
        path = other / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | self.changes))
        await super().load_adapter(name, other)


class MisreadsAlpha(Misreads):
    changes = {"lora_alpha": 32}


class MisreadsRank(Misreads):
    """Divides by another rank than the adapter's, as when it were padded to the engine's largest."""

    changes = {"use_rslora": True}


def named(result: Generation, adapter: str | None) -> Generation:
    return Generation(result.token_ids, result.logprobs, result.finish, adapter, result.cached_tokens)


@pytest.fixture
async def fleet(
    bus: Bus, registry: Registry, store: Store, tmp_path: Path, tiny_model: Path
) -> AsyncIterator[WholeRun]:
    async with whole_run(bus, registry, store, tmp_path, tiny_model) as fleet:
        yield fleet


async def test_a_run_on_honest_engines_goes_to_its_end(fleet: WholeRun) -> None:
    learner = await fleet.start(HonestEngine, HonestEngine)
    assert (await learner.run()).steps == 6


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (BaseInItsName, "serves the base model in an adapter's name"),
        (MisreadsAlpha, "a rank or alpha that it misreads"),
        (MisreadsRank, "a rank or alpha that it misreads"),
    ],
)
async def test_an_engine_that_does_not_apply_adapters_as_they_are_is_not_admitted(
    fleet: WholeRun, kind: type[EmbeddedEngine], said: str
) -> None:
    learner = await fleet.start(kind)
    running = fleet.run(learner.run())
    await until(lambda: any(said in node.detail for node in fleet.replicas("failed")), within=200)
    await until(lambda: "is out" in learner._trouble(), what="the learner says so")
    assert learner._session.head.step == 0
    assert not running.done()


async def test_a_wrong_replica_beside_a_right_one_serves_nothing_and_the_run_goes_on(fleet: WholeRun) -> None:
    learner = await fleet.start(BaseInItsName, HonestEngine)
    assert (await learner.run()).steps == 6
    wrong, right = (f"replica-{number}-{fleet.name}" for number in (0, 1))
    assert [node.id for node in fleet.replicas("failed")] == [wrong], "and it stays out when the run is over"
    groups = [key for key, _ in await fleet.store.list(f"runs/{fleet.name}/") if "/groups/" in key]
    served = {
        replica
        for key in groups
        for episode in Group.from_blob(await fleet.store.read(key)).episodes
        for replica in episode.replicas
    }
    assert served == {right}


@pytest.mark.parametrize("kinds", [[Behind], [HonestEngine, Behind]])
async def test_a_previous_version_served_stops_the_run_before_a_gradient_is_applied(
    fleet: WholeRun, kinds: Sequence[type[EmbeddedEngine]]
) -> None:
    learner = await fleet.start(*kinds)
    applied: list[int] = []
    optimize: Callable[..., Any] = learner._optimize

    def counted(batch: Any) -> Any:
        applied.append(learner._session.head.step + 1)
        return optimize(batch)

    learner._optimize = counted  # type: ignore[method-assign]
    with pytest.raises(PolicyMismatch) as stopped:
        await learner.run()
    wrong = f"replica-{len(kinds) - 1}-{fleet.name}"
    assert f"on replica {wrong}" in str(stopped.value)
    assert f"replica-0-{fleet.name}:" not in str(stopped.value) or wrong.startswith("replica-0")
    found = await fleet.registry.head(fleet.name)
    assert found is not None
    head = found[0]
    assert (head.state, "is not the recorded one" in head.detail) == ("failed", True)
    assert applied == list(range(1, head.step + 1)), "nothing was trained on but what was committed"
    assert head.step < 6
