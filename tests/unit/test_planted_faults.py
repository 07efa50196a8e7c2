"""Engines that serve something else than they say: each is caught, and no gradient is applied.

Everything is real but the engine's honesty: broker, store, learner, router, actor, replicas, and the embedded engine
on the tiny model, in one process.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.adapter_cache import AdapterCache
from actors.engines.base import Generation, Sampling
from actors.engines.embedded import EmbeddedEngine
from actors.replica import Replica
from actors.service import Actor
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.errors import PolicyMismatch
from broker.messages import Node
from broker.models import resolve
from broker.registry import Registry, Roster
from broker.runspec import RunSpec
from broker.store import Store
from learner.model import Policy
from learner.service import Learner
from router.service import RouterService
from tests.waiting import until

pytestmark = pytest.mark.servers

REWARD = """
def low_letters(completions, **columns):
    return [sum(letter in "abcdefghijklm" for letter in text) / (len(text) or 1) for text in completions]
"""


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


@dataclass
class Fleet:
    """A whole run in this process."""

    bus: Bus
    registry: Registry
    store: Store
    directory: Path
    model: Path
    roster: Roster
    name: str = field(default_factory=lambda: f"run-{secrets.token_hex(4)}")
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    engines: list[EmbeddedEngine] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)

    @property
    def spec(self) -> RunSpec:
        plain = {
            "run": {"name": self.name, "model": str(self.model), "steps": 6},
            "tasks": {"source": "tasks.jsonl"},
            "environment": {"rewards": ["reward.py:low_letters"]},
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"group_size": 4, "groups_per_step": 2, "max_staleness": 1, "truth_samples": 8},
            "optimizer": {"lr": 3e-2},
            "fleet": {"name": self.name},
        }
        return msgspec.convert(plain, RunSpec)

    async def start(self, *kinds: type[EmbeddedEngine]) -> Learner:
        """A router, an actor and a replica of each kind; returns the learner, not yet running."""
        files = resolve(str(self.model))
        self.run(RouterService(self.bus, self.registry, fleet=self.name, id=f"router-{self.name}").run())
        for number, kind in enumerate(kinds):
            engine = kind(self.model, adapter_slots=8, threads=1)
            self.engines.append(engine)
            await engine.start()
            cache = AdapterCache(self.store, self.directory / f"work-{number}")
            id = f"replica-{number}-{self.name}"
            parts: Any = (self.bus, self.registry, cache, engine)
            self.run(Replica(*parts, fleet=self.name, id=id, model=files.fingerprint).run())
        actor = Actor(
            self.bus, self.registry, self.store, ChatTokenizer.from_directory(self.model), fleet=self.name,
            id=f"actor-{self.name}", context=files.context, roots=[self.directory], max_inflight=16,
        )  # fmt: skip
        self.run(actor.run())
        await until(lambda: len(self.replicas("ready")) == len(kinds), within=60)
        return Learner(
            self.bus, self.registry, self.store, self.spec, files, id=f"learner-{self.name}", roots=[self.directory]
        )

    def run(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    def replicas(self, state: str = "") -> list[Node]:
        found = self.roster.present("replica", self.name)
        return [node for node in found if not state or node.state == state]

    async def close(self) -> None:
        await end(*self.tasks)
        for engine in self.engines:
            await engine.close()


@pytest.fixture
async def fleet(bus: Bus, registry: Registry, store: Store, tmp_path: Path, tiny_model: Path) -> AsyncIterator[Fleet]:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {n}"}) for n in range(20)))
    roster = Roster(registry)
    await roster.ready.wait()
    fleet = Fleet(bus, registry, store, tmp_path, tiny_model, roster)
    yield fleet
    await fleet.close()
    await roster.close()


async def test_a_run_on_honest_engines_goes_to_its_end(fleet: Fleet) -> None:
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
    fleet: Fleet, kind: type[EmbeddedEngine], said: str
) -> None:
    learner = await fleet.start(kind)
    running = fleet.run(learner.run())
    await until(lambda: any(said in node.detail for node in fleet.replicas("failed")), within=60)
    await until(lambda: "is out" in learner._trouble(), what="the learner says so")
    assert learner._session.head.step == 0
    assert not running.done()


async def test_a_wrong_replica_beside_a_right_one_serves_nothing_and_the_run_goes_on(fleet: Fleet) -> None:
    learner = await fleet.start(BaseInItsName, HonestEngine)
    assert (await learner.run()).steps == 6
    assert [node.id for node in fleet.replicas("failed")] == [f"replica-0-{fleet.name}"]


@pytest.mark.parametrize("kinds", [[Behind], [HonestEngine, Behind]])
async def test_a_previous_version_served_stops_the_run_before_a_gradient_is_applied(
    fleet: Fleet, kinds: Sequence[type[EmbeddedEngine]]
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
