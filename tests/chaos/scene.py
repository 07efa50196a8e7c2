"""A small run whose components a test starts, kills and starts again, and what must be true of it in the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from broker import names
from broker.messages import Control, Head, Node, VersionRecord, decode
from broker.models import resolve
from broker.registry import Registry
from broker.store import Store
from learner.checkpoint import Checkpoint
from learner.ledger import OUTCOMES
from learner.replay import recorded_steps, replay
from tests.chaos.processes import Component
from tests.command_line import Home, environment, read_steps

STEPS = 5
GROUPS = 2
"""Groups of a step."""

REWARD = (
    "def low_letters(completions, **columns):\n"
    "    return [sum(letter in 'abcdefghijklm' for letter in text) / (len(text) or 1) for text in completions]\n"
)
TASKS = "".join(f'{{"prompt": "say {number}"}}\n' for number in range(20))

LEASE_SECONDS = 2.0


class Scene:
    """One run on a fleet of its own, on servers that others use too."""

    def __init__(
        self, directory: Path, run: str, model: Path, nats: str, s3: str, registry: Registry, store: Store
    ) -> None:
        self.run = run
        self.model = model
        self.registry = registry
        self.store = store
        self._home = Home(directory)
        self._home.write("reward.py", REWARD)
        self._home.write("tasks.jsonl", TASKS)
        self._environment = {**environment(directory), "FARFLUNG_NATS": nats, "FARFLUNG_S3": s3}
        self._started: list[Component] = []
        self.configure()

    def configure(self, **sections: Mapping[str, object]) -> None:
        """Write the run's configuration: a handful of small steps, and what `sections` say otherwise."""
        plain: dict[str, dict[str, object]] = {
            "run": {"steps": STEPS},
            "algorithm": {"group_size": 4, "groups_per_step": GROUPS, "max_staleness": 1},
            "fleet": {"name": self.run, "lease_seconds": LEASE_SECONDS},
        }
        for section, changes in sections.items():
            plain[section] = {**plain.get(section, {}), **changes}
        self.steps = int(str(plain["run"]["steps"]))
        self._config = self._home.write_run(self.run, self.model, **plain)

    # --------------------------------------------------------------------------------------------------- components

    def start(self, *arguments: object, fault: str = "") -> Component:
        """Start a component, which meets `fault` if one is named."""
        component = Component(
            [str(argument) for argument in arguments],
            self._environment,
            self._home.directory,
            self._home.directory / f"component-{len(self._started)}.log",
            fault=fault,
        )
        self._started.append(component)
        return component

    def learner(self, *options: object, fault: str = "") -> Component:
        return self.start(
            "learner", self._config, "--threads", 1, "--dir", self._home.directory, *options, fault=fault
        )  # fmt: skip

    def actor(self, *options: object, fault: str = "") -> Component:
        return self.start(
            "actor", "--model", self.model, "--fleet", self.run, "--code", self._home.directory, "--threads", 1,
            "--max-inflight", 8, *options, fault=fault,
        )  # fmt: skip

    def router(self) -> Component:
        return self.start("router", "--fleet", self.run)

    def close(self) -> None:
        """End whatever still runs."""
        for component in self._started:
            component.kill()

    def said(self) -> str:
        """The end of what every component said, for a test that fails."""
        return "\n".join(f"--- {component.name}\n{component.said[-2000:]}" for component in self._started)

    # --------------------------------------------------------------------------------------------------- the record

    async def head(self) -> Head:
        found = await self.registry.head(self.run)
        assert found is not None
        return found[0]

    async def commits(self) -> list[Checkpoint]:
        """Every commit so far, oldest first, as the head leads back to them."""
        head = await self.head()
        return await recorded_steps(self.store, head) if head.step else []

    async def versions(self) -> list[VersionRecord]:
        """Every version record, oldest first."""
        return await self.registry.versions(self.run)

    async def node(self, id: str) -> Node | None:
        """A component's presence, None once it is gone."""
        entry = await self.registry.nodes.get(id)
        return decode(entry.value, Node) if entry else None

    async def learners_node(self) -> Node | None:
        """The presence of the learner that holds the run."""
        return await self.node((await self.head()).learner)

    async def gauge(self, name: str) -> float:
        """What the learner that holds the run last said of itself."""
        node = await self.learners_node()
        return node.gauges.get(name, -1.0) if node else -1.0

    async def want(self, wanted: Literal["run", "pause"]) -> None:
        """What `farflung runs pause` and `resume` do."""
        await self.registry.put_control(Control(run=self.run, wanted=wanted))

    async def stands_still(self) -> bool:
        """Whether a paused run has come to rest: every open group is in the learner's hands, none is in a step."""
        head, node = await self.head(), await self.learners_node()
        held = await self.registry.bus.subjects_held(names.tasks_stream(self.run))
        return (
            node is not None
            and node.detail == "paused by request"
            and node.gauges["step"] == head.step
            and node.gauges["buffered"] == node.gauges["open"]
            and head.active == head.head
            and not held
        )

    async def record(self) -> dict[str, object]:
        """Everything that a learner could change: the run's records with their revisions, and what its streams hold."""
        found: dict[str, object] = {}
        for key in await self.registry.runs.keys(">"):
            if key == self.run or key.startswith(f"{self.run}."):
                found[key] = await self.registry.runs.get(key)
        for stream in (names.tasks_stream(self.run), names.groups_stream(self.run)):
            info = await self.registry.bus.jetstream.stream_info(stream, subjects_filter=">")
            found[stream] = (info.state.messages, info.state.first_seq, info.state.last_seq, info.state.subjects)
        return found

    async def objects(self) -> set[str]:
        """The keys of the run's objects in the store; each ends in the sha256 of what lies there."""
        return {key for key, _ in await self.store.list(f"runs/{self.run}/")}

    def logged_steps(self) -> list[int]:
        return [int(record["step"]) for record in read_steps(self._home.directory)]

    async def assert_whole(self) -> list[Checkpoint]:
        """The run is finished, nothing was lost or trained on twice, and its weights are those of its groups."""
        head = await self.head()
        assert (head.state, head.step, head.head) == ("finished", self.steps, self.steps)
        commits = await self.commits()
        assert [commit.step for commit in commits] == list(range(1, self.steps + 1))
        assert self.logged_steps() == list(range(1, self.steps + 1))
        trained: set[str] = set()
        for commit in commits:
            groups = [group.id for group in commit.trained]
            assert len(groups) == len(set(groups)) == GROUPS
            assert not trained & set(groups), f"step {commit.step} trains a group again"
            trained |= set(groups)
            self._assert_balanced(commit, trained)
        assert not commits[-1].ledger["open"], "the last step leaves nothing open"
        records = [(record.adapter.blob, record.state, record.step) for record in await self.versions()]
        expected = [(commit.weights, "committed", commit.step) for commit in commits]
        assert records == expected, f"{records} != {expected}"
        replayed = await replay(self.store, head, resolve(str(self.model)))
        assert [step.difference for step in replayed] == [""] * self.steps
        return commits

    def _assert_balanced(self, commit: Checkpoint, trained: set[str]) -> None:
        """Every id issued until `commit` is open, or was closed once: in a step, or as lost to training."""
        ledger: dict[str, Any] = commit.ledger
        prefix = f"{commit.run}-{commit.incarnation}-"
        issued = {f"{prefix}{index:08d}" for index in range(ledger["cursor"])}
        still_open, closed = set(ledger["open"]), ledger["closed"]
        assert still_open <= issued
        assert trained <= issued - still_open
        assert closed["trained"] + closed["skipped"] == len(trained)
        others = sum(closed[outcome] for outcome in OUTCOMES if outcome not in ("trained", "skipped"))
        assert len(issued) == len(still_open) + len(trained) + others
