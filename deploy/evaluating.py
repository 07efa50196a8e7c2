"""`farflung eval`: one version evaluated by hand, by whatever fleet is up. Leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from broker.ending import end
from broker.errors import ConfigError, TaskSourceError
from broker.messages import AdapterRef, Head, Node
from broker.registry import PRESENCE_SECONDS, Roster
from broker.runspec import RunSpec
from deploy.queries import Services, head_of, records_of
from deploy.running import node_id
from deploy.view import duration
from learner.branch import Origin
from learner.evaluation import CONFIDENCE, Evaluation, sentence
from learner.evaluator import Evaluator, Plan
from learner.tasks import load_tasks

PRESENCE_PAUSE = PRESENCE_SECONDS / 5
"""How often the command says that it is there: often, so that the screen follows."""


async def evaluate(services: Services, version: str, tasks: str, chosen: Mapping[str, Any], as_json: bool) -> None:
    """Evaluate RUN@VERSION on `tasks` and print the result. `chosen`: what is other than the run's configuration says,
    by key of [evaluation].

    Raises RunConflict or ConfigError for what there is not, EvaluationFailed when the fleet gives no result.
    """
    origin = Origin.parse(version, "eval")
    head = await head_of(services, origin.run)
    spec = _configured(head, tasks, chosen)
    number, adapter, step = await _version(services, head, origin.version)
    source = load_tasks(
        spec.evaluation_tasks, [Path.cwd()], needs_prompt=not spec.environment.environment, where="TASKS, as "
    )
    if source.length is None and not spec.evaluation.limit:
        raise TaskSourceError(f"{tasks} has no end; say with --limit how many of its tasks to take")
    plan = Plan.of(head, spec, spec.evaluation, source, version=number, adapter=adapter, step=step)
    if not as_json:
        said = f"{plan.count} tasks x {spec.evaluation.samples} samples"
        services.console.print(f"evaluating {plan.name} on {tasks}: {said}, fleet {head.fleet}", markup=False)
    result = await _evaluate(services, head.fleet, plan)
    if as_json:
        click.echo(json.dumps(result.flat()))
    else:
        _print(services, result)


def _configured(head: Head, tasks: str, chosen: Mapping[str, Any]) -> RunSpec:
    """The run's configuration with another evaluation in it."""
    try:
        spec = msgspec.convert(head.spec, RunSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the configuration of run {head.run} is not of this release: {error}") from error
    given = {name: value for name, value in chosen.items() if value is not None}
    arguments = spec.evaluation.arguments if tasks == spec.evaluation.source else {}
    section = msgspec.structs.replace(spec.evaluation, **{"source": tasks, "arguments": arguments, "limit": 0, **given})
    return msgspec.structs.replace(spec, evaluation=section)


async def _version(services: Services, head: Head, wanted: int | None) -> tuple[int, AdapterRef | None, int]:
    """A version's number, adapter and step. Raises ConfigError, with the versions there are."""
    known: dict[int, tuple[AdapterRef | None, int]] = {0: (None, 0)}
    known |= {record.adapter.version: (record.adapter, record.step) for record in await records_of(services, head)}
    if head.adapter is not None:
        known[head.head] = (head.adapter, head.step)
    number = head.head if wanted is None else wanted
    if number not in known:
        raise ConfigError(f"run {head.run} has no version {number}; versions there are: 0 to {max(known)}")
    adapter, step = known[number]
    if adapter is not None and not await services.store.exists(adapter.blob):
        raise ConfigError(f"the store has no adapter of version {number} of run {head.run} any more: {adapter.key}")
    return number, adapter, step


async def _evaluate(services: Services, fleet: str, plan: Plan) -> Evaluation:
    """Evaluate, with a presence that names the version while it lasts."""
    id = node_id("evaluator")
    roster = Roster(services.registry)

    async def put() -> None:
        await services.registry.put_node(
            Node(
                id=id,
                node="evaluator",
                fleet=fleet,
                host=socket.gethostname(),
                pid=os.getpid(),
                state="ready",
                run=plan.run,
                pins=evaluator.pins,
                gauges=evaluator.progress(),
            )
        )

    async def announce() -> None:
        while True:
            await put()
            await asyncio.sleep(PRESENCE_PAUSE)

    evaluator = Evaluator(services.bus, roster, node=id, fleet=fleet, announce=put)
    await roster.ready.wait()
    announcing = asyncio.create_task(announce())
    try:
        return await evaluator.evaluate(plan)
    finally:
        await end(announcing)
        await roster.close()
        await services.registry.remove_node(id)


def _print(services: Services, result: Evaluation) -> None:
    console = services.console
    served = result.adapter or "base model"
    console.print(f"version {result.version} ({served}): {sentence(result.numbers())}", markup=False)
    console.print(
        f"  {result.samples} samples a task, temperature {result.temperature:g}, top_p {result.top_p:g}; success from "
        f"reward {result.success:g}; intervals: {CONFIDENCE:.0%}, normal, over tasks",
        markup=False,
    )
    console.print(
        f"  {result.figures['length']:.1f} tokens a sample, {result.figures['truncated']:.0%} cut; "
        f"{duration(result.seconds)}",
        markup=False,
    )
    for reason in result.failures:
        console.print(f"  failed: {reason}", markup=False)
