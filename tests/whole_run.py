"""A whole run in one process: learner, router, actor and replicas on real servers, with engines to choose."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from actors.adapter_cache import AdapterCache
from actors.engines.embedded import EmbeddedEngine
from actors.replica import Replica
from actors.service import Actor
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.messages import Node
from broker.models import resolve
from broker.registry import Registry, Roster
from broker.runspec import RunSpec
from broker.store import Store
from learner.service import Learner
from router.service import RouterService
from tests.waiting import until

REWARD = """
def low_letters(completions, **columns):
    return [sum(letter in "abcdefghijklm" for letter in text) / (len(text) or 1) for text in completions]
"""


@dataclass
class WholeRun:
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
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the configuration says otherwise."""

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
        return msgspec.convert({**plain, **self.sections}, RunSpec)

    async def start(self, *kinds: type[EmbeddedEngine], **options: Any) -> Learner:
        """A router, an actor and a replica of each kind; returns the learner with its `options`, not yet running."""
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
        await until(lambda: len(self.replicas("ready")) == len(kinds), within=200)
        return Learner(
            self.bus, self.registry, self.store, self.spec, files, id=f"learner-{self.name}", roots=[self.directory],
            **options,
        )  # fmt: skip

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


@asynccontextmanager
async def whole_run(
    bus: Bus, registry: Registry, store: Store, directory: Path, model: Path
) -> AsyncIterator[WholeRun]:
    """A fleet whose code and tasks lie in `directory`; whatever it starts ends with it."""
    (directory / "reward.py").write_text(REWARD)
    (directory / "tasks.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {n}"}) for n in range(20)))
    roster = Roster(registry)
    await roster.ready.wait()
    fleet = WholeRun(bus, registry, store, directory, model, roster)
    try:
        yield fleet
    finally:
        await fleet.close()
        await roster.close()
