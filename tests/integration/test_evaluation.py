"""Evaluations beside training: exactly the version that is asked for, whatever goes on, and nothing left behind."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from rich.console import Console

from actors.engines.base import Generation, Sampling
from broker.errors import ConfigError, EvaluationFailed
from broker.messages import AdapterRef, Node
from broker.runspec import RunSpec
from deploy import evaluating
from deploy.queries import Services
from learner import evaluator as module
from learner.evaluation import Evaluation
from learner.evaluations import newest_result, results_of
from tests.fleet import Fleet
from tests.stubs import StubEngine
from tests.waiting import until

pytestmark = pytest.mark.servers

HELD_OUT = 6
SAMPLES = 4


class NotingEngine(StubEngine):
    """Notes which adapter answered each request of an evaluation; a closed gate holds those up before the engine looks
    for their adapter.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = asyncio.Event()
        self.gate.set()
        self.held = 0
        self.evaluated: list[tuple[str, str | None]] = []

    async def generate(self, request_id: str, adapter: str | None, prompt: Any, sampling: Sampling) -> Generation:
        if "-eval-" in request_id:
            self.held += 1
            await self.gate.wait()
            self.held -= 1
        generation = await super().generate(request_id, adapter, prompt, sampling)
        if "-eval-" in request_id:
            self.evaluated.append((request_id, generation.adapter))
        return generation

    def answered(self, version: int) -> set[str | None]:
        """The adapters that answered an evaluation of `version`."""
        return {adapter for id, adapter in self.evaluated if f"-eval-{version:06d}-" in id}


def run_of(fleet: Fleet, steps: int = 5000, /, **sections: Any) -> RunSpec:
    """A run that evaluates every third version on HELD_OUT tasks, SAMPLES times each."""
    lines = [json.dumps({"prompt": f"hold {number}", "number": 0}) for number in range(HELD_OUT)]
    (fleet.directory / "held-out.jsonl").write_text("\n".join(lines))
    evaluation = {"source": "held-out.jsonl", "every": 3, "samples": SAMPLES, "success": 2.0}
    return fleet.spec(**{"run": {"steps": steps}, "evaluation": evaluation, **sections})


def engine_of(spec: RunSpec, fleet: Fleet) -> NotingEngine:
    """An engine with not one slot more than the run needs."""
    return NotingEngine(slots=spec.adapter_slots)


def logged(fleet: Fleet, spec: RunSpec) -> list[dict[str, Any]]:
    """The lines of evals.jsonl."""
    path = fleet.directory / spec.run.name / "evals.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


async def stored(fleet: Fleet, spec: RunSpec) -> list[Evaluation]:
    head = fleet.head(spec)
    assert head is not None
    return await results_of(fleet.registry, fleet.store, head)


def services(fleet: Fleet) -> tuple[Services, io.StringIO]:
    said = io.StringIO()
    return Services(fleet._bus, fleet.registry, fleet.store, Console(file=said, width=250)), said


def by_hand(fleet: Fleet, target: str, **chosen: Any) -> tuple[asyncio.Task[None], io.StringIO]:
    """`farflung eval` on the held-out tasks."""
    asked, said = services(fleet)
    tasks = str(fleet.directory / "held-out.jsonl")
    return asyncio.create_task(evaluating.evaluate(asked, target, tasks, chosen, False)), said


async def test_every_evaluated_token_is_of_the_exact_version_while_training_goes_on(fleet: Fleet) -> None:
    spec = run_of(fleet)
    engine = engine_of(spec, fleet)
    await fleet.router()
    await fleet.replica(engine)
    await fleet.actor()
    await fleet.learner(spec)
    await until(lambda: len(logged(fleet, spec)) >= 2, within=60, what="two versions are evaluated")
    engine.gate.clear()
    await until(lambda: engine.held >= SAMPLES, within=60, what="an evaluation is under way")
    node = fleet.learner_node(spec)
    await until(lambda: fleet.learner_node(spec).pins, within=10, what="the learner tells of it")
    [pin] = fleet.learner_node(spec).pins
    before, trained = len(logged(fleet, spec)), len(fleet.steps(spec))
    await until(lambda: len(fleet.steps(spec)) >= trained + 12, within=120, what="training goes on for 12 steps")
    head = fleet.head(spec)
    assert head is not None
    assert pin.version not in {ref.version for ref in head.live}, "the run itself does not need it any more"
    assert pin.name in engine.weights, "and yet it stays loaded"
    assert len(logged(fleet, spec)) == before, "nothing is reported of half an evaluation"
    engine.gate.set()
    await until(lambda: len(logged(fleet, spec)) > before, within=60, what="it is evaluated")
    record = logged(fleet, spec)[before]
    assert (record["version"], record["adapter"]) == (pin.version, pin.name)
    assert (record["tasks"], record["failed_tasks"], record["samples"]) == (HELD_OUT, 0, SAMPLES)
    assert engine.answered(pin.version) == {pin.name}
    assert len({id for id, _ in engine.evaluated if f"-eval-{pin.version:06d}-" in id}) == HELD_OUT * SAMPLES
    await until(lambda: pin.name not in engine.weights, within=30, what="the version is unloaded")
    adapters = {ref["version"]: ref["adapter"] for ref in logged(fleet, spec)}
    assert adapters[0] is None, "the base model is evaluated, too"
    for version, adapter in adapters.items():
        assert engine.answered(version) == {adapter}
        assert version % 3 == 0
    assert engine.strangers == [], "no version was asked for that was not loaded"
    assert node.state == "ready"
    assert "evaluation of version" in fleet.screen(spec)


async def test_a_run_ends_with_the_evaluation_of_its_last_version_and_none_of_it_is_in_the_ledger(fleet: Fleet) -> None:
    spec = run_of(fleet, 4)
    engine = engine_of(spec, fleet)
    await fleet.router()
    await fleet.replica(engine)
    await fleet.actor()
    summary = await fleet.finished(await fleet.learner(spec))
    assert summary.steps == 4
    results = await stored(fleet, spec)
    assert results[0].version == 0
    assert results[-1].version == 4
    assert [result.flat() for result in results] == logged(fleet, spec)
    assert results[-1].step == 4
    assert results[-1].figures["pass_at_1"] <= results[-1].figures["pass_at_2"] <= results[-1].figures["pass_at_4"]
    groups = summary.groups
    closed = sum(groups[name] for name in ("trained", "dropped", "skipped", "failed", "expired"))
    assert (groups["issued"], groups["late"]) == (closed, 0)
    trained = sum(step["episodes"] for step in fleet.steps(spec))
    assert trained == 4 * 2 * 2, "no episode of an evaluation is in a step"
    head = fleet.head(spec)
    assert head is not None
    [newest] = [await newest_result(fleet.store, head)]
    assert newest == results[-1]


async def test_an_evaluation_whose_learner_dies_is_begun_anew_and_reported_whole(fleet: Fleet) -> None:
    spec = run_of(fleet)
    engine = engine_of(spec, fleet)
    engine.gate.clear()
    await fleet.router()
    await fleet.replica(engine)
    await fleet.actor()
    learner = await fleet.learner(spec)
    await until(lambda: engine.held >= SAMPLES, within=60, what="an evaluation is under way")
    await learner.kill()
    assert await stored(fleet, spec) == []
    again = await fleet.learner(spec, take_over=True)
    engine.gate.set()
    await until(lambda: len(logged(fleet, spec)) >= 2 or again.work.done(), within=90, what="evaluations go on")
    assert not again.work.done()
    for record in logged(fleet, spec):
        assert (record["tasks"], record["failed_tasks"]) == (HELD_OUT, 0)
        assert engine.answered(record["version"]) == {record["adapter"]}


async def test_a_killed_actor_costs_an_evaluation_none_of_its_tasks(fleet: Fleet) -> None:
    spec = run_of(fleet)
    engine = engine_of(spec, fleet)
    engine.gate.clear()
    await fleet.router()
    await fleet.replica(engine)
    doomed = await fleet.actor()
    await fleet.learner(spec)
    await until(lambda: engine.held >= SAMPLES, within=60, what="an evaluation is under way")
    await fleet.actor()
    await doomed.kill()
    engine.gate.set()
    await until(lambda: len(logged(fleet, spec)) >= 1, within=90, what="the base model is evaluated")
    record = logged(fleet, spec)[0]
    assert (record["version"], record["tasks"], record["failed_tasks"]) == (0, HELD_OUT, 0)


async def test_a_version_of_a_run_that_is_over_is_evaluated_by_hand_and_nothing_stays_behind(fleet: Fleet) -> None:
    spec = run_of(fleet, 4, evaluation={})
    engine = NotingEngine(slots=4)
    await fleet.router()
    await fleet.replica(engine)
    await fleet.actor()
    await fleet.finished(await fleet.learner(spec))
    records = {record.adapter.version: record.adapter for record in await fleet.registry.versions(spec.run.name)}
    assert records[1].name not in engine.weights
    objects = await fleet.store.list(f"runs/{spec.run.name}/")
    keys = await fleet.registry.runs.keys(">")
    held = set(engine.weights)
    for version in (1, 0):
        command, said = by_hand(fleet, f"{spec.run.name}@{version}", samples=SAMPLES)
        await command
        name = records[version].name if version else None
        assert engine.answered(version) == {name}
        assert f"version {version} ({name or 'base model'}): reward" in said.getvalue()
        assert f"({HELD_OUT} tasks)" in said.getvalue()
        assert "pass@4" in said.getvalue()
    await until(lambda: set(engine.weights) == held, within=20, what="the replica holds what it held before")
    assert await fleet.store.list(f"runs/{spec.run.name}/") == objects
    assert await fleet.registry.runs.keys(">") == keys
    await until(lambda: fleet.roster.present("evaluator") == [], within=20, what="the command's presence is gone")
    with pytest.raises(ConfigError, match="no version 9; versions there are: 0 to 4"):
        await by_hand(fleet, f"{spec.run.name}@9")[0]


async def test_the_pin_of_an_evaluator_that_died_lapses(fleet: Fleet) -> None:
    spec = run_of(fleet, 3, evaluation={})
    engine = NotingEngine(slots=4)
    await fleet.router()
    await fleet.replica(engine)
    await fleet.actor()
    await fleet.finished(await fleet.learner(spec))
    [pin] = [record.adapter for record in await fleet.registry.versions(spec.run.name) if record.adapter.version == 1]
    assert pin.name not in engine.weights
    await fleet.registry.put_node(evaluator_of(fleet, spec, pin))
    await until(lambda: pin.name in engine.weights, within=20, what="it is loaded")
    await until(lambda: pin.name not in engine.weights, within=60, what="it is unloaded though nobody said goodbye")


def evaluator_of(fleet: Fleet, spec: RunSpec, pin: AdapterRef) -> Node:
    return Node(
        id="evaluator-dead", node="evaluator", fleet=fleet.name, host="h", pid=1, state="ready", run=spec.run.name,
        pins=[pin],
    )  # fmt: skip


async def test_a_version_that_no_replica_has_a_slot_for_is_refused_with_the_remedy(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFUSED_SECONDS", 1.0)
    spec = run_of(fleet, evaluation={}, algorithm={"group_size": 2, "groups_per_step": 2, "max_staleness": 3})
    engine = NotingEngine(slots=5)
    await fleet.router()
    await fleet.replica(engine)
    await fleet.actor()
    learner = await fleet.learner(spec)
    await until(lambda: fleet.active(spec) >= 9, within=60, what="version 9 is active")
    await learner.kill()  # what its run keeps loaded stands still from here on
    head = fleet.head(spec)
    assert head is not None
    live = {ref.name for ref in head.live}
    engine.slots = len(live)
    with pytest.raises(EvaluationFailed, match=r"serves it .*no slot: \d adapters are wanted.*--adapter-slots"):
        await by_hand(fleet, f"{spec.run.name}@1")[0]
    await until(lambda: live <= engine.weights.keys(), within=20, what="the run has the slots that it needs")


async def test_actors_that_cannot_run_its_tasks_say_why(fleet: Fleet) -> None:
    spec = run_of(fleet, 2, evaluation={}, fleet={"name": fleet.name, "activation_timeout": 5.0})
    await fleet.router()
    await fleet.replica(NotingEngine())
    await fleet.actor(max_inflight=8)
    await fleet.finished(await fleet.learner(spec))
    command, _ = by_hand(fleet, f"{spec.run.name}@latest", samples=9)
    with pytest.raises(EvaluationFailed, match=r"no actor .* took a task .*runs 8 episodes at once, 9 samples"):
        await command
