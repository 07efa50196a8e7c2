"""Evaluations' tasks on an actor: episodes that are scored and reported, never stored and never trained on.

They have slots of their own beside those of training, `EVALUATION_SHARE` of `max_inflight`, first come first served:
neither waits for the other. Nothing of an evaluation is kept but its answers, and those no longer than their
evaluator is there: whoever asks again under an id that is known gets the same work's answer, and a task whose actor
died is asked of another one.

Invariant: every token of a sample that is reported was served by the adapter that the task names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import nats.errors
from nats.aio.msg import Msg

from actors.episode import Generate, GroupOutcome, run_group
from actors.generation import Generator, generate_for
from actors.workload import Workloads
from broker import names
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.errors import GenerationError
from broker.messages import (
    EVALUATION_SHARE,
    EvaluationAnswer,
    EvaluationTask,
    GenerateReply,
    Task,
    decode,
)
from broker.registry import PRESENCE_TTL, Heads, Roster
from broker.runspec import RunSpec
from observability import metrics, tracing

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often evaluators are looked for whose work would be for nobody."""

ANSWER_SECONDS = 120.0
"""How long an answer is kept for being asked again: many times an evaluator's patience."""


@dataclass
class _Work:
    task: EvaluationTask
    reply: str
    since: float
    """When it was begun, or answered."""
    answer: EvaluationAnswer | None = None
    running: asyncio.Task[None] | None = None


class Slots:
    """How many samples may be under way at once: `most`, or one task's, first come first served."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, samples: int) -> None:
        """Wait for `samples` slots. A task that is larger than all of them has its turn alone."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(samples)
            raise

    def give(self, samples: int) -> None:
        """Give them back."""
        self.taken -= samples
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            samples, turn = self._waiting[0]
            if not turn.cancelled():
                if self.taken and self.taken + samples > self.most:
                    return
                self.taken += samples
                turn.set_result(None)
            self._waiting.popleft()


class Evaluations:
    """What one actor does for evaluations."""

    def __init__(
        self,
        bus: Bus,
        generator: Generator,
        tokenizer: ChatTokenizer,
        heads: Heads,
        roster: Roster,
        workloads: Workloads,
        *,
        actor: str,
        context: int,
        max_inflight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._generator = generator
        self._tokenizer = tokenizer
        self._heads = heads
        self._roster = roster
        self._workloads = workloads
        self._actor = actor
        self._context = context
        self._max_inflight = max_inflight
        self._clock = clock
        self._slots = Slots(max_inflight // EVALUATION_SHARE)
        self._works: dict[str, _Work] = {}

    @property
    def samples(self) -> int:
        """Samples under way."""
        return self._slots.taken

    async def run(self) -> None:
        """Take tasks until cancelled."""
        await self._bus.subscribe(names.actor_evaluate(self._actor), self._on_task)
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self._forget()
        finally:
            await end(*(work.running for work in self._works.values() if work.running is not None))

    def _forget(self) -> None:
        """Let go of old answers, and of evaluators that are gone; one that has just come may not have been seen yet."""
        for id, work in list(self._works.items()):
            age = self._clock() - work.since
            if work.answer is not None and age > ANSWER_SECONDS:
                del self._works[id]
            elif work.running is not None and age > PRESENCE_TTL and self._roster.get(work.task.evaluator) is None:
                del self._works[id]
                work.running.cancel()

    async def _on_task(self, message: Msg) -> None:
        task = decode(message.data, EvaluationTask)
        known = self._works.get(task.id)
        if known is not None:
            known.reply = message.reply
            await self._tell(known)
            return
        work = self._works[task.id] = _Work(task, message.reply, self._clock())
        work.running = asyncio.create_task(self._work(work), name=task.id)

    async def _tell(self, work: _Work) -> None:
        """Send an answer that there is. One that is lost is asked for again."""
        if work.answer is None:
            return
        try:
            await self._bus.send(work.reply, work.answer)
        except nats.errors.Error as error:
            log.info("answer to %s not sent: %s", work.task.id, error)

    async def _work(self, work: _Work) -> None:
        task = work.task
        try:
            work.answer = await self._answer(task)
        except Exception as error:
            log.exception("task %s of an evaluation failed unexpectedly", task.id)
            work.answer = self._answered(task, failure=f"{type(error).__name__}: {error}")
        work.running, work.since = None, self._clock()
        if work.answer.refused:
            self._works.pop(task.id, None)  # the reason may pass
        await self._tell(work)

    def _answered(self, task: EvaluationTask, *, refused: str = "", failure: str = "") -> EvaluationAnswer:
        return EvaluationAnswer(id=task.id, actor=self._actor, refused=refused, failure=failure)

    async def _answer(self, task: EvaluationTask) -> EvaluationAnswer:
        head = self._heads.heads.get(task.run)
        if head is None or head.incarnation != task.incarnation:
            return self._answered(task, refused=f"run {task.run}, incarnation {task.incarnation}, is not known here")
        workload = self._workloads.of(head)
        if workload is None:
            return self._answered(task, refused=self._workloads.refused.get(task.run, "its code is not here"))
        if task.samples > self._max_inflight:
            most = f"runs {self._max_inflight} episodes at once, {task.samples} samples a task are asked for"
            return self._answered(task, refused=f"{most}; start it with --max-inflight {task.samples}, or ask for less")
        await self._slots.take(task.samples)
        try:
            with tracing.span("evaluate", parent={}, run=task.run, version=task.version, task=task.index):
                outcome = await run_group(
                    task=_as_group(task),
                    factory=workload.evaluation,
                    tokenizer=self._tokenizer,
                    spec=_spec_for(task, workload.spec),
                    generate=self._generate_for(task),
                    context=self._context,
                    clock=self._clock,
                )
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return self._answered(task, failure="generation: it was cancelled")
        finally:
            self._slots.give(task.samples)
        return self._scored(task, outcome)

    def _scored(self, task: EvaluationTask, outcome: GroupOutcome) -> EvaluationAnswer:
        metrics.count("farflung.episodes", len(outcome.episodes), outcome="evaluated")
        if outcome.failures:
            category, reason = outcome.main_failure()
            failure = f"{category}: {len(outcome.failures)} of {task.samples} samples failed: {reason}"
            return self._answered(task, failure=failure[:2000])
        return EvaluationAnswer(
            id=task.id,
            actor=self._actor,
            rewards=[episode.reward for episode in outcome.episodes],
            lengths=outcome.lengths,
            truncated=sum(episode.truncated for episode in outcome.episodes),
        )

    def _generate_for(self, task: EvaluationTask) -> Generate:
        """The `generate` of a task's episodes: under its version and no other."""

        def check(episode: int, reply: GenerateReply) -> None:
            if (reply.adapter, reply.version) != (task.adapter, task.version):
                raise GenerationError(
                    f"version {reply.version} ({reply.adapter}) answered on {reply.replica} where version "
                    f"{task.version} ({task.adapter}) was asked",
                    retryable=False,
                )

        return generate_for(
            self._generator,
            self._tokenizer,
            _as_group(task),
            version=task.version,
            adapter=task.adapter,
            temperature=task.temperature,
            top_p=task.top_p,
            on_reply=check,
        )


def _as_group(task: EvaluationTask) -> Task:
    return Task(
        run=task.run,
        incarnation=task.incarnation,
        group=task.id,
        index=task.index,
        columns=task.columns,
        group_size=task.samples,
        seed=task.seed,
    )


def _spec_for(task: EvaluationTask, spec: RunSpec) -> RunSpec:
    """The run's configuration with the evaluation's longest reply."""
    return msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=task.max_new_tokens),
        algorithm=msgspec.structs.replace(spec.algorithm, overlong_buffer=0),
    )
