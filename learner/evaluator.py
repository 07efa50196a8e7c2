"""The evaluator: has a version attempted by the actors of a fleet on tasks that it is not trained on.

It pins the version (replicas keep it loaded while the node that says so is present), waits until one serves it, asks
actors task by task, and computes the figures. It runs no code of the user's and loads no model, so it may live in the
learner's process, as it does for `[evaluation]`, or in a command anywhere. What it knows is in its memory alone: when
it dies, pin and work lapse with its presence.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg

from broker import names
from broker.bus import Bus
from broker.errors import EvaluationFailed
from broker.messages import AdapterRef, EvaluationAnswer, EvaluationTask, Head, decode
from broker.registry import Roster
from broker.runspec import EvaluationSection, RunSpec
from learner.evaluation import Evaluation, TaskScore, figures_of
from learner.feeder import task_seed
from learner.rota import Assignment, Rota
from learner.tasks import TaskSource
from observability import tracing

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often it is looked who is there and what is to be asked again."""

RESEND_SECONDS = 5.0
"""A task without an answer is asked for again after this long: request or answer may be lost."""

REFUSED_SECONDS = 15.0
"""Replicas that all refuse the version for this long will not come round."""

OVERDUE_SECONDS = 60.0
"""What a task may take beyond its group's time: its wait for slots, its scoring, its way."""

REASONS = 5
"""Reasons of failed tasks that a result names."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be evaluated, on what, and how. `count`: how many tasks of `tasks`, from the first on."""

    run: str
    incarnation: str
    version: int
    adapter: AdapterRef | None
    step: int
    tasks: TaskSource
    count: int
    section: EvaluationSection
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    task_seconds: float
    """The longest time that a task's samples may take."""
    patience: float
    """Seconds for which it is waited for somebody to serve the version, or to take tasks."""

    @classmethod
    def of(
        cls, head: Head, spec: RunSpec, section: EvaluationSection, tasks: TaskSource, *,
        version: int, adapter: AdapterRef | None, step: int,
    ) -> Plan:  # fmt: skip
        """The plan for a version of `head`'s run under its configuration. Raises EvaluationFailed without tasks."""
        limits = [limit for limit in (tasks.length, section.limit or None) if limit is not None]
        if not limits:
            raise EvaluationFailed(f"the task source {section.source} has no end; say how many of its tasks to take")
        return cls(
            run=head.run,
            incarnation=head.incarnation,
            version=version,
            adapter=adapter,
            step=step,
            tasks=tasks,
            count=min(limits),
            section=section,
            temperature=1.0 if section.temperature is None else section.temperature,
            top_p=1.0 if section.top_p is None else section.top_p,
            max_new_tokens=section.max_new_tokens or 1,
            seed=spec.run.seed,
            task_seconds=spec.environment.group_timeout + spec.environment.episode_timeout,
            patience=spec.fleet.activation_timeout,
        )

    @property
    def name(self) -> str:
        return f"{self.run}@{self.version}"


class Evaluator:
    """Evaluates on one fleet in the name of one node, which must tell of `pins` in its presence."""

    def __init__(
        self,
        bus: Bus,
        roster: Roster,
        *,
        node: str,
        fleet: str,
        announce: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`announce` puts the node's presence, pins included. `wall`: seconds since 1970."""
        self._bus = bus
        self._roster = roster
        self._node = node
        self._fleet = fleet
        self._announce = announce
        self._clock = clock
        self._wall = wall
        self._plan: Plan | None = None
        self._done = 0

    @property
    def pins(self) -> list[AdapterRef]:
        """The version under evaluation, as far as it needs a slot."""
        return [self._plan.adapter] if self._plan is not None and self._plan.adapter is not None else []

    def progress(self) -> dict[str, float]:
        """What is under way, as readings: the version, tasks that have a score, tasks in all. Empty: nothing."""
        if self._plan is None:
            return {}
        return {
            "evaluating": float(self._plan.version),
            "evaluating_done": float(self._done),
            "evaluating_tasks": float(self._plan.count),
        }

    async def evaluate(self, plan: Plan) -> Evaluation:
        """Evaluate. Raises EvaluationFailed when there is no result."""
        self._plan, self._done = plan, 0
        began = self._clock()
        try:
            with tracing.span("evaluation", parent={}, run=plan.run, version=plan.version) as span:
                await self._announce()
                await self._wait_until_served(plan)
                scores, failures = await _Round(self, plan).run()
                if not scores:
                    reasons = "; ".join(list(failures.values())[:REASONS])
                    raise EvaluationFailed(
                        f"evaluation of {plan.name}: all of its {plan.count} tasks failed: {reasons}"
                    )
                figures = figures_of([scores[index] for index in sorted(scores)], success=plan.section.success)
                span.set_attribute("farflung.reward", figures["reward"])
        finally:
            self._plan = None
        return _result(plan, figures, len(scores), failures, self._clock() - began, self._wall())

    async def _wait_until_served(self, plan: Plan) -> None:
        """Until a replica serves the version. Raises EvaluationFailed when none is going to."""
        name = plan.adapter.name if plan.adapter is not None else None
        began = refused_since = self._clock()
        while True:
            replicas = self._roster.present("replica", self._fleet)
            ready = [node for node in replicas if node.state == "ready"]
            if any(name is None or name in node.confirmed for node in ready):
                return
            reasons = {
                node.id: node.detail if node.state == "failed" else node.refused.get(name or "", "")
                for node in replicas
            }
            now = self._clock()
            if not reasons or not all(reasons.values()):
                refused_since = now
            said = "; ".join(f"{id}: {reason}" for id, reason in reasons.items() if reason)
            if now - refused_since > REFUSED_SECONDS:
                raise EvaluationFailed(
                    f"evaluation of {plan.name}: no replica of fleet {self._fleet} serves it ({said})"
                )
            if now - began > plan.patience:
                why = f" ({said})" if said else ""
                raise EvaluationFailed(
                    f"evaluation of {plan.name}: no replica of fleet {self._fleet} served it within "
                    f"{plan.patience:.0f} s, {len(replicas)} present{why}; `farflung status` shows them"
                )
            await asyncio.sleep(LOOK_SECONDS)


class _Round:
    """The tasks of one evaluation, from the first question to the last answer."""

    def __init__(self, evaluator: Evaluator, plan: Plan) -> None:
        self._of = evaluator
        self._plan = plan
        section = plan.section
        self._rota = Rota(plan.count, section.samples, seconds=plan.task_seconds + OVERDUE_SECONDS)
        self._scores: dict[int, TaskScore] = {}
        self._id = f"{plan.run}-{plan.incarnation}-eval-{plan.version:06d}-{secrets.token_hex(4)}"
        self._inbox = evaluator._bus.client.new_inbox()
        self._asked: dict[str, tuple[Assignment, float]] = {}
        """By `index.attempt`: who was asked, and when last."""
        self._changed = asyncio.Event()

    async def run(self) -> tuple[dict[int, TaskScore], dict[int, str]]:
        """The scores, and why there are none, by task. Raises EvaluationFailed when nobody takes tasks."""
        of, rota = self._of, self._rota
        subscription = await of._bus.subscribe(f"{self._inbox}.*.*", self._on_answer)
        moved, ended = of._clock(), 0
        try:
            while not rota.finished:
                self._changed.clear()
                actors = {node.id: node.capacity for node in of._roster.present("actor", of._fleet)}
                now = of._clock()
                for assignment in rota.assign(actors, now):
                    self._asked[f"{assignment.index}.{assignment.attempt}"] = (assignment, 0.0)
                working = any(now - assignment.since > RESEND_SECONDS for assignment in rota.out.values())
                if working or len(rota.done) + len(rota.failed) > ended:
                    moved, ended = now, len(rota.done) + len(rota.failed)
                elif now - moved > self._plan.patience:
                    raise EvaluationFailed(self._nobody(actors))
                await self._ask(now)
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            try:
                await subscription.unsubscribe()  # type: ignore[attr-defined]
            except (nats.errors.Error, ValueError) as error:
                log.info("inbox of an evaluation not closed: %s", error)
        return self._scores, rota.failed

    def _nobody(self, actors: Mapping[str, int]) -> str:
        refusals = "; ".join(f"{actor}: {reason}" for actor, reason in self._rota.refusals.items() if actor in actors)
        there = refusals or "none is present"
        return (
            f"evaluation of {self._plan.name}: no actor of fleet {self._of._fleet} took a task for "
            f"{self._plan.patience:.0f} s ({there})"
        )

    async def _ask(self, now: float) -> None:
        """Ask for what is out, for the first time or again; let go of what is not."""
        for token, (assignment, last) in list(self._asked.items()):
            if self._rota.out.get(assignment.index) is not assignment:
                del self._asked[token]
            elif not last or now - last > RESEND_SECONDS:
                self._asked[token] = (assignment, now)
                try:
                    await self._of._bus.send(
                        names.actor_evaluate(assignment.actor),
                        self._task(assignment, token),
                        reply=f"{self._inbox}.{token}",
                        headers=tracing.headers(),
                    )
                except nats.errors.Error as error:
                    log.info("task %s of evaluation %s not sent: %s", token, self._id, error)

    def _task(self, assignment: Assignment, token: str) -> EvaluationTask:
        plan, index = self._plan, assignment.index
        return EvaluationTask(
            id=f"{self._id}-{token.replace('.', '-')}",
            evaluator=self._of._node,
            run=plan.run,
            incarnation=plan.incarnation,
            index=index,
            columns=plan.tasks.row(index),
            samples=plan.section.samples,
            seed=task_seed(plan.seed, index),
            version=plan.version,
            adapter=plan.adapter.name if plan.adapter is not None else None,
            temperature=plan.temperature,
            top_p=plan.top_p,
            max_new_tokens=plan.max_new_tokens,
        )

    async def _on_answer(self, message: Msg) -> None:
        index = int(message.subject.split(".")[-2])
        asked = self._asked.get(".".join(message.subject.split(".")[-2:]))
        out = self._rota.out.get(index)
        current = asked is not None and out is asked[0]
        now = self._of._clock()
        if (message.headers or {}).get("Status") == "503":
            if current:
                self._rota.refuse(index, "it does not listen", now)
            return
        answer = decode(message.data, EvaluationAnswer)
        if answer.rewards and len(answer.rewards) == len(answer.lengths) == self._plan.section.samples:
            # Samples are samples, whoever took them: one that was given up comes in time, too.
            if self._rota.complete(index):
                self._scores[index] = TaskScore(answer.rewards, answer.lengths, answer.truncated)
                self._of._done = len(self._scores)
        elif current and answer.refused:
            self._rota.refuse(index, answer.refused, now)
        elif current:
            log.warning("task %d of evaluation %s failed on %s: %s", index, self._id, answer.actor, answer.failure)
            self._rota.fail(index, answer.failure or f"{answer.actor} answered with {len(answer.rewards)} rewards")
        self._changed.set()


def _result(
    plan: Plan, figures: dict[str, float], tasks: int, failures: Mapping[int, str], seconds: float, time: float
) -> Evaluation:
    section = plan.section
    return Evaluation(
        run=plan.run,
        incarnation=plan.incarnation,
        version=plan.version,
        adapter=plan.adapter.name if plan.adapter is not None else None,
        step=plan.step,
        source=section.source,
        samples=section.samples,
        tasks=tasks,
        failed_tasks=len(failures),
        failures=[f"task {index}: {reason}"[:500] for index, reason in sorted(failures.items())[:REASONS]],
        success=section.success,
        temperature=plan.temperature,
        top_p=plan.top_p,
        max_new_tokens=plan.max_new_tokens,
        figures=figures,
        seconds=seconds,
        time=time,
    )
