"""A whole fleet in one event loop: real services, a real nats-server and a real S3 server, stub engines and policies.

Every component has a connection of its own, so that one can be killed as a process is: from one moment to the next,
with its presence left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.adapter_cache import AdapterCache
from actors.replica import Replica
from actors.service import Actor
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.messages import Head
from broker.models import resolve
from broker.registry import Heads, Registry, Roster
from broker.runspec import RunSpec
from broker.store import Store, StoreAddress
from deploy.config import check
from deploy.snapshot import Snapshot, snapshot_of
from deploy.view import live
from learner.service import Learner
from learner.summary import Finished
from router.service import RouterService
from tests.command_line import read_steps
from tests.stubs import StubEngine, StubPolicy
from tests.waiting import until

REWARD = """
def score(completions, **columns):
    return [float(len(set(text)) + number) for number, text in enumerate(completions)]
"""


class Component:
    """One service that runs, with its own connection."""

    def __init__(self, id: str, registry: Registry, work: asyncio.Task[Any]) -> None:
        self.id = id
        self.registry = registry
        self.work = work
        self.service: Any = None
        """The replica, where it is one."""

    async def kill(self) -> None:
        """As SIGKILL does: it says goodbye to nobody, and the broker forgets it in its own time."""

        async def nothing(node: str) -> None:
            return None

        self.registry.remove_node = nothing  # type: ignore[method-assign]
        await self.registry.bus.client.close()
        await self.stop()

    async def stop(self) -> None:
        self.work.cancel()
        await asyncio.wait([self.work], timeout=20)
        await self.registry.bus.close()


class Fleet:
    """The components of one test. Runs and fleets have names that no other test uses."""

    def __init__(self, nats: str, store: str, model: Path, directory: Path) -> None:
        self.name = f"f{secrets.token_hex(4)}"
        self.directory = directory
        self._nats, self._store = nats, StoreAddress.parse(store)
        self._model = resolve(str(model))
        self._components: list[Component] = []
        (directory / "reward.py").write_text(REWARD)
        lines = [json.dumps({"prompt": f"say {number}", "number": number}) for number in range(50)]
        (directory / "tasks.jsonl").write_text("\n".join(lines))

    async def open(self) -> None:
        self._bus, self.registry = await self._connect("looker-on")
        self.store = Store(self._store)
        await self.store.open()
        self.heads = Heads(self.registry)
        self.roster = Roster(self.registry)
        await self.heads.ready.wait()
        await self.roster.ready.wait()

    async def close(self) -> None:
        for component in self._components:
            if not component.work.done():
                await component.stop()
        await self.heads.close()
        await self.roster.close()
        self.store.close()
        await self._bus.close()

    async def _connect(self, name: str) -> tuple[Bus, Registry]:
        bus = await Bus.connect(self._nats, name)
        return bus, await Registry.open(bus)

    def _started(self, id: str, registry: Registry, work: Any) -> Component:
        component = Component(id, registry, asyncio.create_task(work, name=id))
        self._components.append(component)
        return component

    # ------------------------------------------------------------------------------------------------- components

    def spec(self, name: str = "", **sections: Mapping[str, object]) -> RunSpec:
        """The configuration of a small run: groups of 2, 2 groups a step, and what `sections` say otherwise."""
        plain: dict[str, dict[str, Any]] = {
            "run": {"name": name or f"run-{self.name}", "model": self._model.name, "steps": 4},
            "tasks": {"source": "tasks.jsonl", "shuffle": False},
            "environment": {"rewards": ["reward.py:score"]},
            "sampling": {"max_new_tokens": 4},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "max_staleness": 1},
            "fleet": {"name": self.name, "activation_timeout": 20.0},
        }
        for section, changes in sections.items():
            plain[section] = {**plain.get(section, {}), **changes}
        return check(plain, "test")

    async def router(self) -> Component:
        bus, registry = await self._connect("router")
        id = f"router-{secrets.token_hex(3)}"
        return self._started(id, registry, RouterService(bus, registry, fleet=self.name, id=id).run())

    async def replica(self, engine: StubEngine | None = None, *, wait: bool = True) -> Component:
        """Start a replica; `wait` until it is ready."""
        bus, registry = await self._connect("replica")
        id = f"replica-{secrets.token_hex(3)}"
        cache = AdapterCache(self.store, self.directory / "work" / id)
        serving = Replica(bus, registry, cache, engine or StubEngine(), fleet=self.name, id=id, model="m")  # type: ignore[arg-type]
        component = self._started(id, registry, serving.run())
        component.service = serving
        if wait:
            await until(lambda: self.node(id) is not None and self.node(id).state == "ready", what=f"{id} is ready")
        return component

    async def actor(self, max_inflight: int = 16) -> Component:
        bus, registry = await self._connect("actor")
        id = f"actor-{secrets.token_hex(3)}"
        worker = Actor(
            bus,
            registry,
            self.store,
            ChatTokenizer.from_directory(self._model.directory),
            fleet=self.name,
            id=id,
            context=self._model.context,
            roots=[self.directory],
            max_inflight=max_inflight,
        )
        return self._started(id, registry, worker.run())

    async def learner(self, spec: RunSpec, policy: StubPolicy | None = None, **options: Any) -> Component:
        bus, registry = await self._connect("learner")
        id = f"learner-{secrets.token_hex(3)}"
        stub = policy or StubPolicy()
        learner = Learner(
            bus,
            registry,
            self.store,
            spec,
            self._model,
            id=id,
            roots=[self.directory],
            directory=self.directory / spec.run.name,
            policy=lambda: stub,  # type: ignore[arg-type,return-value]
            **options,
        )
        return self._started(id, registry, learner.run())

    # ----------------------------------------------------------------------------------------------- what is seen

    def node(self, id: str) -> Any:
        return self.roster.get(id)

    def head(self, spec: RunSpec) -> Head | None:
        return self.heads.heads.get(spec.run.name)

    def active(self, spec: RunSpec) -> int:
        """The run's active version, -1 before there is a run."""
        head = self.head(spec)
        return head.active if head is not None else -1

    def steps(self, spec: RunSpec) -> list[dict[str, Any]]:
        """What the run's learner has logged of its steps."""
        return read_steps(self.directory / spec.run.name)

    def learner_node(self, spec: RunSpec) -> Any:
        return next((node for node in self.roster.present("learner") if node.run == spec.run.name), None)

    def detail(self, spec: RunSpec) -> str:
        """What the run's learner says of its troubles."""
        node = self.learner_node(spec)
        return node.detail if node is not None else ""

    def snapshot(self, spec: RunSpec) -> Snapshot:
        head = self.head(spec)
        assert head is not None
        return snapshot_of(head, self.roster.present())

    def screen(self, spec: RunSpec) -> str:
        """The live view, as `farflung up` and `farflung status` show it, in one line."""
        console = Console(width=250, file=io.StringIO())
        console.print(live(self.snapshot(spec), [], ""))
        return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]

    async def finished(self, learner: Component, within: float = 60.0) -> Finished:
        """Wait for the learner to end, and return its summary."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(learner.work), within)
        assert learner.work.done(), f"not done within {within} s: {learner.id}"
        summary: Finished = learner.work.result()
        return summary
