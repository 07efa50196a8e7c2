"""The learner: owns a run; issues tasks, trains, commits, activates.

Invariants: a group that was announced is trained on at most once and never lost; what a commit says happened, and
nothing else did. The order within a step is what makes it so: uploads, one compare-and-set of the head, then the
acknowledgements of the groups it closed. Before the compare-and-set the step is repeated from redelivered groups;
after it the redelivered groups are not open any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from broker import faults, names
from broker.bus import (
    Bus,
    ConsumerGone,
    Puller,
    actors_consumer,
    dead_config,
    groups_config,
    learner_consumer,
    tasks_config,
)
from broker.chat import ChatTokenizer
from broker.code import source_hash
from broker.ending import end
from broker.errors import (
    BrokerLost,
    Fenced,
    MalformedMessage,
    ObjectCorrupt,
    ObjectMissing,
    RegistryConflict,
    RunFailed,
    TaskSourceError,
)
from broker.messages import AdapterRef, BlobRef, Control, Node
from broker.models import ModelFiles
from broker.probe import Probe
from broker.registry import PRESENCE_SECONDS, Heads, Registry, Roster
from broker.runspec import RunSpec
from broker.store import Store
from learner.activator import Activator
from learner.admission import check_ranks, check_slots
from learner.batch import BatchFigures, figures_of, outcomes_of, teaches
from learner.branch import Branch, Origin, fetch_branch
from learner.buffer import Buffer, Held
from learner.checkpoint import Checkpoint, TrainedGroup
from learner.claim import Claim, claim, finished
from learner.credit import CreditRule
from learner.evaluations import EVALUATION_LOG, Evaluations
from learner.evaluator import Evaluator
from learner.feeder import Feeder
from learner.imported import read_adapter
from learner.intake import Intake
from learner.janitor import Janitor
from learner.ledger import Ledger, Outcome
from learner.lineage import lineage
from learner.priority import PRIORITIES
from learner.probe import probe_of, store_probe
from learner.readings import StepLog, step_figures
from learner.session import Session
from learner.summary import TARGET_STEPS, Finished, summarize, summary_of
from learner.tails import Tails
from learner.tasks import TaskSource, check_lengths, load_tasks
from learner.trackers import Trackers
from learner.training import arithmetic, new_policy, train
from learner.truth import TruthReport
from learner.verification import Verifier
from observability import metrics, tracing
from observability.shares import Share

if TYPE_CHECKING:
    from learner.model import Policy, StepStats

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECKED_TASKS = 64
"""Tasks whose prompts are measured at start, so that a run that cannot work is refused at once."""


class Learner:
    """One epoch of one run."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        store: Store,
        spec: RunSpec,
        model: ModelFiles,
        *,
        id: str,
        roots: Sequence[Path] = (),
        directory: Path | None = None,
        threads: int | None = None,
        restart: bool = False,
        take_over: bool = False,
        origin: Origin | None = None,
        adapter: Path | None = None,
        fresh_optimizer: bool = False,
        clock: Callable[[], float] = time.monotonic,
        policy: Callable[[], Policy] | None = None,
        prober: Callable[[Policy, RunSpec], tuple[bytes, Probe]] | None = None,
    ) -> None:
        """`policy` and `prober` take the place of the real ones; a policy of another kind is probed only by its own."""
        self._bus = bus
        self._registry = registry
        self._store = store
        self.spec = spec
        self._model = model
        self.id = id
        self._roots = roots
        self._steps = StepLog(directory)
        self._evaluation_log = StepLog(directory, EVALUATION_LOG)
        self._directory = directory
        self._threads = threads
        self._restart = restart
        self._take_over = take_over
        self._origin = origin
        self._adapter = adapter
        self._fresh_optimizer = fresh_optimizer
        self._clock = clock
        self._make_policy = policy or self._load_policy
        self._make_probe = prober or (probe_of if policy is None else None)
        algorithm = spec.algorithm
        self._rule = CreditRule(
            algorithm.groups_per_step, algorithm.max_staleness, algorithm.publish_every, algorithm.mean_staleness
        )
        self._ledger = Ledger()
        self._buffer = Buffer(PRIORITIES[algorithm.priority])
        self._tails = Tails()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._credit_changed = asyncio.Event()
        self._groups_changed = asyncio.Event()
        self._waiting_share = Share(memory=60.0)
        self._rewards: list[float] = []
        self._replaced: list[Held] = []
        """Groups without signal that others replace in the next step; they count in its figures."""
        self._verifier = Verifier(store, algorithm)
        self._step_seconds: list[float] = []
        self._paused = False
        self._stopping = False
        self._began = clock()
        self._earlier_seconds = 0.0
        self._last: dict[str, float] = {}
        self._detail = "starting"
        self._trackers: Trackers
        self._session: Session
        self._policy: Policy
        self._feeder: Feeder
        self._intake: Intake
        self._activator: Activator
        self._janitor: Janitor
        self._evaluations: Evaluations
        self._roster: Roster
        self._heads: Heads

    # ------------------------------------------------------------------------------------------------------- the run

    async def run(self) -> Finished:
        """Train until the run is finished or told to stop. Returns how it stands then.

        Raises RunConflict (held by another, or not to be continued), Fenced (displaced), RunFailed, PolicyMismatch,
        ConfigError and its kin.
        """
        self._roster = Roster(self._registry, on_change=self._on_node, clock=self._clock)
        self._heads = Heads(self._registry, on_change=self._on_record)
        try:
            await self._roster.ready.wait()
            await self._heads.ready.wait()
            found = await self._registry.head(self.spec.run.name)
            goes_on = not self._restart and self._origin is None and self._adapter is None
            if found is not None and goes_on and finished(found[0], self.spec):
                return await summary_of(self._registry, self._store, found[0].run)
            claimed = await self._claim()
            self._session = Session(self._registry, self._store, claimed)
            try:
                await self._prepare(claimed)
                return await self._train_to_the_end()
            except (ConsumerGone, RegistryConflict) as error:
                raise await self._cause_of(error) from error
            except Fenced:
                raise
            except RunFailed as error:
                with contextlib.suppress(Fenced):
                    await self._session.write(state="failed", learner="", detail=str(error)[:2000])
                raise
            except BaseException:
                await self._leave()
                raise
        finally:
            await self._roster.close()
            await self._heads.close()
            await self._registry.remove_node(self.id)
            self._steps.close()
            self._evaluation_log.close()
            if hasattr(self, "_trackers"):
                self._trackers.close()
            self._compute.shutdown(wait=False, cancel_futures=True)

    async def _claim(self) -> Claim:
        """Check everything that can be refused, then own the run."""
        environment = self.spec.environment
        self._trackers = await self._in_thread(
            lambda: Trackers(
                self.spec.observability.trackers,
                self.spec.run.name,
                self._directory or Path(),
                msgspec.to_builtins(self.spec),
            )
        )
        self._source = load_tasks(self.spec.tasks, self._roots, needs_prompt=not environment.environment)
        self._held_out = self._load_held_out()
        if not environment.environment:
            tokenizer = ChatTokenizer.from_directory(self._model.directory)
            for source in (self._source, self._held_out):
                if source is not None:
                    await asyncio.to_thread(
                        check_lengths,
                        source,
                        tokenizer,
                        self._model.context,
                        CHECKED_TASKS,
                        prompt_column=self.spec.tasks.prompt_column,
                        system_prompt=environment.system_prompt,
                    )
        code = {name: source_hash(name, self._roots) for name in self.spec.user_code}
        replicas = self._roster.present("replica", self.spec.fleet_name)
        check_slots(self.spec, self._heads.heads.values(), replicas)
        check_ranks(self.spec, replicas)
        branch = None
        if self._origin is not None:
            branch = await fetch_branch(
                self._registry,
                self._store,
                self._origin,
                self.spec,
                fingerprint=self._model.fingerprint,
                fresh_optimizer=self._fresh_optimizer,
            )
        elif self._adapter is not None:
            weights = await asyncio.to_thread(read_adapter, self._adapter, self.spec.lora, self._model)
            branch = Branch(f"adapter {self._adapter.name}", weights, None)
        return await claim(
            self._registry,
            self._store,
            self.spec,
            node=self.id,
            fingerprint=self._model.fingerprint,
            code=code,
            nodes=self._roster.present,
            restart=self._restart,
            take_over=self._take_over,
            branch=branch,
        )

    def _load_held_out(self) -> TaskSource | None:
        """The tasks of evaluations, None when there are to be none. Raises TaskSourceError and its kin."""
        section = self.spec.evaluation
        if not section.source:
            return None
        needs_prompt = not self.spec.environment.environment
        source = load_tasks(self.spec.evaluation_tasks, self._roots, needs_prompt=needs_prompt, where="evaluation.")
        if source.length is None and not section.limit:
            raise TaskSourceError(
                f"evaluation.source: {section.source} has no end; set evaluation.limit to the number of tasks to take"
            )
        return source

    async def _prepare(self, claimed: Claim) -> None:
        """Streams, state, policy, and the tasks and groups that the broker still holds."""
        faults.reached("learner.claimed")
        head, run = claimed.head, self.spec.run.name
        self._detail = "loading the model"
        announcing = asyncio.create_task(self._announce_starting())
        try:
            await self._session.remember_claim()
            await self._bus.ensure_stream(dead_config())
            await self._session.require()
            control = self._heads.controls.get(run)
            if control is not None and control.wanted in ("stop", "delete"):
                # That was for the learner before this one. Starting one says that the run is to go on.
                await self._registry.put_control(Control(run=run, wanted="run"))
            puller = await self._take_streams(claimed)
            self._policy = await self._in_thread(self._make_policy)
            await self._restore()
            await self._publish_probe()
        finally:
            await end(announcing)
        head = self._session.head
        self._feeder = Feeder(self._bus, self._source, self.spec, self._ledger, head, retake=self._take_tasks)
        await self._session.require()
        await self._adopt(run)
        faults.reached("learner.adopted")
        self._intake = Intake(
            self._bus,
            self._store,
            puller,
            self._session,
            self._ledger,
            self._buffer,
            self._feeder,
            self._rule,
            tails=self._tails,
            on_change=self._on_group,
        )
        self._activator = Activator(
            self._session,
            self._roster,
            fleet=self.spec.fleet_name,
            timeout=self.spec.fleet.activation_timeout,
            min_replicas=self.spec.fleet.min_replicas,
            on_active=self._credit_changed.set,
            clock=self._clock,
        )
        self._evaluations = Evaluations(
            Evaluator(
                self._bus,
                self._roster,
                node=self.id,
                fleet=self.spec.fleet_name,
                announce=lambda: self._registry.put_node(self._node()),
                clock=self._clock,
            ),
            self._registry,
            self._store,
            self.spec,
            self._held_out,
            head=lambda: self._session.head,
            put=self._session.put,
            log=self._evaluation_log,
            trackers=self._trackers,
            on_end=self._groups_changed.set,
        )
        self._janitor = Janitor(
            self._bus,
            self._store,
            self._session,
            self._ledger,
            self.spec,
            on_unanswered=self._on_unanswered,
            weights_of=self._verifier.weights_of,
            issue_again=lambda group, index: self._feeder.issue_again(group, index, self._session.head.active),
            in_hand=lambda group: self._intake.holds(group) or group in self._feeder.publishing,
            evaluated=lambda: [*self._evaluations.needed, *self._roster.pinned(self.spec.fleet_name)],
            clock=self._clock,
        )
        self._began = self._clock()
        self._credit_changed.set()
        log.info(
            "run %s, incarnation %s, epoch %d: step %d, version %d",
            run, head.incarnation, head.epoch, head.step, head.head,
        )  # fmt: skip

    async def _announce_starting(self) -> None:
        """Be present while the model loads, so that a second learner is refused meanwhile."""
        while True:
            await self._registry.put_node(self._node())
            await asyncio.sleep(PRESENCE_SECONDS / 2)

    async def _take_streams(self, claimed: Claim) -> Puller:
        """Turn the run's streams over to this epoch, and begin to listen to its answers. Raises Fenced.

        A learner that stood still before it got here, and was displaced meanwhile, must harm nobody when it wakes,
        wherever in here that is: it looks before each change whether the run is still its own, and none of its changes
        takes anything from a later epoch but the subject of the tasks, which that one's feeder takes back.
        """
        head, run = claimed.head, self.spec.run.name
        await self._take_tasks()
        # Actors that have the consumer already do not look at its settings again.
        leases = actors_consumer(self.spec.fleet.lease_seconds)
        await (await self._bus.puller(names.tasks_stream(run), leases)).close()
        await self._bus.ensure_stream(groups_config(run, max(self._rule.window, 1)))
        await self._bus.delete_consumers(
            names.groups_stream(run), lambda consumer: names.consumer_epoch(consumer) < head.epoch
        )
        if claimed.created:
            await self._session.require()
            await self._forget_predecessor(run)
            self._steps.begin()
        return await self._bus.puller(names.groups_stream(run), learner_consumer(run, head.incarnation, head.epoch))

    async def _take_tasks(self) -> None:
        """Let the stream of tasks take this epoch's, if the run is this epoch's. Raises Fenced."""
        await self._session.require()
        await self._bus.ensure_stream(tasks_config(self.spec.run.name, self._session.head.epoch))

    async def _forget_predecessor(self, run: str) -> None:
        """A reused name never meets its predecessor's state: its messages and version records go, one by one, so that
        nothing goes that came after this was looked for.
        """
        own = names.group_stem(run, self._session.head.incarnation)
        for stream in (names.tasks_stream(run), names.groups_stream(run)):
            for subject in await self._bus.subjects_held(stream):
                if not names.group_at(subject).startswith(own):
                    await self._bus.purge(stream, subject)
        await self._registry.forget_versions(run, but=self._session.head.incarnation)

    def _load_policy(self) -> Policy:
        return new_policy(self.spec, self._model.directory, model_name=self._model.public_name, threads=self._threads)

    async def _publish_probe(self) -> None:
        """Tell the replicas what they must reproduce before they serve this run."""
        if self._make_probe is None:
            return
        make = self._make_probe
        adapter, probe = await self._in_thread(lambda: make(self._policy, self.spec))
        ref = await store_probe(self._session.put, self._session.head, adapter, probe)
        if self._session.head.probe != ref:
            await self._session.write(probe=ref)

    async def _restore(self) -> None:
        """Go on from the newest intact commit."""
        intact = await self._session.newest_intact()
        if intact is None:
            return
        await self._session.resume_from(intact)
        checkpoint, weights, optimizer = intact.checkpoint, intact.weights, intact.optimizer
        head = self._session.head
        if head.adapter is not None and head.adapter.blob == checkpoint.weights:
            self._verifier.remember(head.head, weights, self._session.adapters)
        await self._in_thread(lambda: self._policy.load_adapter_bytes(weights))
        if optimizer is not None:
            await self._in_thread(lambda: self._policy.load_optimizer_bytes(optimizer))
        self._ledger = Ledger.from_state(checkpoint.ledger)
        self._tails = Tails.from_state(checkpoint.tails)
        self._rewards = list(checkpoint.rewards)
        self._earlier_seconds = checkpoint.seconds
        await self._complete_log(self._session.head.checkpoint, checkpoint.step)

    async def _complete_log(self, newest: BlobRef | None, step: int) -> None:
        """Log what an earlier learner committed and did not live to log, as far back as commits are kept."""
        logged, missing = self._steps.keep_until(step), list[Mapping[str, float]]()
        with contextlib.suppress(ObjectMissing, ObjectCorrupt, MalformedMessage):
            async for _, checkpoint in lineage(self._store, newest):
                if checkpoint.step <= logged:
                    break
                missing.insert(0, checkpoint.record)
        for record in missing:
            self._steps.append(record)

    async def _adopt(self, run: str) -> None:
        """Bring ledger and broker together: what the broker holds is open, and what is open the broker holds."""
        held = await self._bus.subjects_held(names.tasks_stream(run))
        held |= await self._bus.subjects_held(names.groups_stream(run))
        again = await self._feeder.adopt(set(map(names.group_at, held)), self._session.head.active)
        if again:
            log.warning("run %s: %d open groups were nowhere on the broker and are issued again", run, again)

    async def _train_to_the_end(self) -> Finished:
        others = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("feed", self._feed()),
                ("receive", self._intake.run()),
                ("activate", self._activator.run()),
                ("announce", self._announce()),
                ("look after", self._janitor.run()),
                ("evaluate", self._evaluations.run()),
            )
        ]
        training = asyncio.create_task(self._train(), name="train")
        metrics.observe(self._gauges, run=self.spec.run.name)
        try:
            await asyncio.wait([training, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in [training, *others]:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise error
            return training.result()
        finally:
            await end(training, *others)

    async def _cause_of(self, error: ConsumerGone | RegistryConflict) -> Fenced:
        """What a consumer that is gone, or a lost compare-and-set, means: another epoch, or a broker that forgot."""
        try:
            await self._session.require()
        except Fenced as over:
            return over
        return BrokerLost(
            f"{error}, and no other learner is the cause: the broker has lost it. Start the learner again: it goes on "
            "from the last commit"
        )

    async def _leave(self) -> None:
        """Going away on purpose: the next learner need not wait for this one's presence to fade."""
        with contextlib.suppress(Fenced, OSError, TimeoutError):
            async with asyncio.timeout(5):
                await self._session.write(learner="")

    # ---------------------------------------------------------------------------------------------------- the stages

    async def _feed(self) -> None:
        while True:
            await _news(self._credit_changed)
            while not self._paused and self._credit() > 0:
                await self._feeder.issue_next(self._session.head.active)

    def _credit(self) -> int:
        """Groups that may be issued now: by the window, and by what the remaining steps can use.

        None before the version that the run begins with is served: no other may sample for it.
        """
        head = self._session.head
        if head.active < head.first:
            return 0
        window = self._rule.credit(
            head=head.head,
            active=head.active,
            open_groups=self._ledger.open_groups,
            waiting_staleness=self._buffer.mean_staleness(head.head),
        )
        left = (self.spec.run.steps - head.step) * self._rule.groups_per_step - self._ledger.open_groups
        return min(window, left)

    async def _train(self) -> Finished:
        while not self._done() and not self._stopping:
            waited = self._clock()
            self._waiting_share.set(1.0, waited)
            batch = await self._next_batch()
            self._waiting_share.set(0.0, self._clock())
            if batch is None:
                continue
            await self._step(batch, wait=self._clock() - waited)
        if self._done():
            await self._wait_for_activation()
            await self._evaluate_last()
            await self._session.write(state="finished", learner="", detail="")
        else:
            await self._session.write(state="stopped", learner="", detail="stopped by request")
        return self._summary()

    def _done(self) -> bool:
        return self._session.head.step >= self.spec.run.steps or self._reached_target(self._rewards)

    def _reached_target(self, rewards: Sequence[float]) -> bool:
        target = self.spec.run.target_reward
        recent = rewards[-TARGET_STEPS:]
        return target is not None and len(recent) == TARGET_STEPS and sum(recent) / TARGET_STEPS >= target

    async def _wait_for_activation(self) -> None:
        """The last version is worth serving too; give the fleet a moment to take it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(30.0, self.spec.fleet.activation_timeout)):
                while self._session.head.active < self._session.head.head:
                    await self._credit_changed.wait()
                    self._credit_changed.clear()

    async def _evaluate_last(self) -> None:
        """The last version is evaluated whatever its number; the run is finished when that is done."""
        head = self._session.head
        self._evaluations.published(head.head, head.adapter, head.step, last=True)
        while not self._evaluations.idle and not self._stopping:
            await _news(self._groups_changed)

    async def _next_batch(self) -> list[Held] | None:
        """The next step's groups, once there are enough; None when the run is to stop."""
        while not self._stopping:
            await self._drop_stale()
            limit = 2 * self._rule.groups_per_step
            if self._intake.failed_in_a_row >= limit:
                raise RunFailed(
                    f"run {self.spec.run.name}: {limit} groups failed in a row, the last one with: "
                    f"{self._intake.last_failure}. Mend that and start again; the run goes on from its last commit"
                )
            await self._replace_flat()
            if not self._paused:
                batch = self._buffer.take(self._rule.groups_per_step)
                if batch is not None:
                    return batch
            await _news(self._groups_changed)
        return None

    async def _drop_stale(self) -> None:
        for held in self._buffer.take_stale(self._rule, self._session.head.head):
            self._intake.close(held.id, "dropped", held.ready.lengths, held.ready.seconds.get("group"))
            self._credit_changed.set()
            await held.delivery.ack()
            self._intake.let_go([held.id])

    async def _replace_flat(self) -> None:
        """Dynamic sampling: close groups that teach nothing, within the step's bound, so that others are issued."""
        bound = int(self.spec.algorithm.dynamic_sampling * self._rule.groups_per_step)
        # Others arrive while these are acknowledged: look again, so that none is left when the step is taken.
        while flat := self._buffer.take_flat(lambda group: teaches(group, self.spec), bound - len(self._replaced)):
            for held in flat:
                self._replaced.append(held)
                self._intake.close(held.id, "skipped", held.ready.lengths, held.ready.seconds.get("group"))
                self._credit_changed.set()
                await held.delivery.ack()
                self._intake.let_go([held.id])

    # -------------------------------------------------------------------------------------------------------- a step

    async def _step(self, batch: Sequence[Held], wait: float) -> None:
        faults.reached("learner.batch_taken")
        head = self._session.head
        began = self._clock()
        links = [held.headers for held in batch]
        with tracing.span("step", parent={}, links=links, run=head.run, step=head.step + 1) as span:
            figures = figures_of([*batch, *self._replaced], head.head)
            weights = await self._verifier.weights_for(batch, self._session.adapters)
            name = f"run {head.run}, step {head.step + 1}"
            report = await self._in_thread(lambda: self._verifier.check(self._policy, batch, weights, name))
            with tracing.span("train", run=head.run, step=head.step + 1):
                stats = await self._in_thread(lambda: self._optimize(batch))
            trained = self._clock()
            seconds = {"wait": wait, "train": trained - began}
            published, record = await self._commit(batch, figures, stats, report, seconds)
            span.set_attribute("farflung.reward", figures.reward)
            span.set_attribute("farflung.version", self._session.head.head)
        self._replaced.clear()
        if published:
            self._activator.wake.set()
            made = self._session.head
            self._evaluations.published(made.head, made.adapter, made.step)
        self._credit_changed.set()
        seconds["commit"] = self._clock() - trained
        self._note_step(batch, figures, stats, seconds, record)

    def _optimize(self, batch: Sequence[Held]) -> StepStats:
        groups = [held.group for held in batch]
        head = self._session.head.head
        return train(self._policy, groups, self.spec, head, progress=lambda point: faults.reached(f"learner.{point}"))

    async def _commit(
        self,
        batch: Sequence[Held],
        figures: BatchFigures,
        stats: StepStats,
        report: TruthReport,
        seconds: Mapping[str, float],
    ) -> tuple[bool, dict[str, float]]:
        """Uploads, the compare-and-set, the acknowledgements. Tells whether a version was published, and how the step
        is logged; `seconds` are those before the commit."""
        began, head = self._clock(), self._session.head
        step = head.step + 1
        rewards = [*self._rewards, figures.reward]
        last = step == self.spec.run.steps or self._reached_target(rewards)
        publish = last or step % self.spec.algorithm.publish_every == 0
        version = head.head + 1 if publish else head.head
        trace = tracing.headers()
        weights = await self._in_thread(self._policy.adapter_bytes)
        with tracing.span("publish", run=head.run, step=step, version=version):
            offering = asyncio.create_task(self._store_weights(version if publish else None, step, weights, trace))
            optimizer = await self._in_thread(self._policy.optimizer_bytes)
            optimizer_ref = await self._session.store_blob(step, "optimizer", optimizer)
            faults.reached("learner.optimizer_uploaded")
            weights_ref, adapter = await offering
            outcomes = outcomes_of(batch, self.spec)
            closed = [
                (outcome, held.ready.lengths, held.ready.seconds.get("group"))
                for held, (_, outcome) in zip(batch, outcomes, strict=True)
            ]
            ledger, tails = self._ledger.to_state(outcomes), self._tails.to_state(closed)
            readings = step_figures(figures, stats, report, {**seconds, "commit": self._clock() - began})
            record = {
                "step": step,
                "head": version,
                "active": head.active,
                "seconds_left": self._seconds_left(step),
                **readings,
                **Ledger.from_state(ledger).counts(),
                **Tails.from_state(tails).figures(),
                "time": time.time(),
            }
            checkpoint = Checkpoint(
                run=head.run,
                incarnation=head.incarnation,
                step=step,
                version=version,
                weights=weights_ref,
                optimizer=optimizer_ref,
                ledger=ledger,
                tails=tails,
                rewards=rewards,
                trained=[TrainedGroup(held.id, held.ready.blob) for held in batch],
                previous=head.checkpoint,
                spec=head.spec,
                arithmetic=await self._in_thread(arithmetic),
                record=record,
                seconds=self._seconds(),
            )
            ref = await self._session.store_blob(step, "state", checkpoint.encode())
            faults.reached("learner.state_uploaded")
            if publish:
                self._activator.traces[version] = trace
            await self._session.commit(
                checkpoint,
                ref,
                adapter,
                reward=figures.reward,
                summary={"reward": figures.reward, "staleness": figures.staleness_mean},
                trace=trace,
            )
        self._rewards, self._last = rewards, readings
        if adapter is not None:
            self._verifier.remember(version, weights, self._session.adapters)
        for group, outcome in outcomes:
            self._ledger.close(group, outcome)
            metrics.count("farflung.groups", 1, run=head.run, outcome=outcome)
            self._feeder.end(group, outcome)
        for closing in closed:
            self._tails.add(*closing)
        faults.reached("learner.before_acknowledgements")
        await asyncio.gather(*(held.delivery.ack() for held in batch))
        faults.reached("learner.acknowledged")
        self._intake.let_go(held.id for held in batch)
        return adapter is not None, record

    async def _store_weights(
        self, version: int | None, step: int, weights: bytes, trace: Mapping[str, str]
    ) -> tuple[BlobRef, AdapterRef | None]:
        """Offer the weights as a version while the rest uploads; without a version they are only stored."""
        if version is None:
            return await self._session.store_blob(step, "weights", weights), None
        adapter = await self._session.offer(version, step, weights, trace)
        return adapter.blob, adapter

    # ------------------------------------------------------------------------------------------------- looking after

    def _on_node(self) -> None:
        if hasattr(self, "_activator"):
            self._activator.wake.set()

    def _on_unanswered(self, group: str, outcome: Outcome, reason: str, seconds: float | None) -> None:
        if outcome == "failed":
            self._intake.note_failure("task", reason)
        self._intake.close(group, outcome, [], seconds)
        self._on_group()

    def _on_group(self) -> None:
        self._groups_changed.set()
        self._credit_changed.set()

    def _on_record(self, run: str) -> None:
        """A person asked for something."""
        control = self._heads.controls.get(run)
        if run != self.spec.run.name or control is None:
            return
        self._paused = control.wanted == "pause"
        self._stopping = control.wanted in ("stop", "delete")
        self._credit_changed.set()
        self._groups_changed.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    # ------------------------------------------------------------------------------------------------------ readings

    def _seconds(self) -> float:
        return self._earlier_seconds + self._clock() - self._began

    def _note_step(
        self,
        batch: Sequence[Held],
        figures: BatchFigures,
        stats: StepStats,
        seconds: Mapping[str, float],
        record: Mapping[str, float],
    ) -> None:
        """Tell of a committed step. `record` is what its commit says of it; what only showed since is added."""
        head = self._session.head
        self._step_seconds = [*self._step_seconds[-9:], sum(seconds.values())]
        for part, value in seconds.items():
            metrics.record("farflung.step.seconds", value, run=head.run, part=part)
        for held in batch:
            metrics.record("farflung.group.age", head.head - held.version, run=head.run)
        self._last["seconds_commit"] = seconds["commit"]
        since = {"active": head.active, "seconds_left": self._seconds_left(head.step), **self._last}
        log.info(
            "step %d: reward %.3f, staleness %.2f, loss %.4f, ratio %.4f, k3 %.2g; "
            "wait %.1f s, train %.1f s, commit %.2f s",
            head.step, figures.reward, figures.staleness_mean, stats.loss, stats.ratio_mean, stats.k3,
            seconds["wait"], seconds["train"], seconds["commit"],
        )  # fmt: skip
        self._steps.append({**record, **since})
        self._trackers.log(head.step, self._last)

    def _seconds_left(self, step: int) -> float:
        """What the steps after `step` take at the pace of the last ten."""
        pace = sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else 0.0
        return pace * (self.spec.run.steps - step)

    def _gauges(self) -> dict[str, float]:
        head = self._session.head
        return {
            "farflung.queue.occupancy": len(self._buffer) / self._rule.window,
            "farflung.rollout.wait": self._waiting_share.read(self._clock()),
            "farflung.run.step": float(head.step),
            "farflung.run.head": float(head.head),
            "farflung.run.active": float(head.active),
            "farflung.run.credit": float(max(0, self._credit())),
            "farflung.run.open": float(self._ledger.open_groups),
            **({"farflung.run.reward": self._last["reward"]} if self._last else {}),
            **({"farflung.run.staleness": self._last["staleness"]} if self._last else {}),
            **({"farflung.learner.tokens_per_second": self._last["tokens_per_second"]} if self._last else {}),
        }

    def _troubles(self) -> tuple[str, ...]:
        activation = self._activator.trouble or self._activator.left_behind()
        troubles = self._session.notice, self._session.trouble, self._feeder.trouble, activation
        return (*troubles, self._evaluations.trouble)

    def _trouble(self) -> str:
        """What a person should know, empty when all is well."""
        if self._paused:
            return "paused by request"
        parts = [trouble for trouble in self._troubles() if trouble]
        if self._intake.failures:
            kinds = ", ".join(f"{number} {kind}" for kind, number in self._intake.failures.most_common(3))
            parts.append(f"failed groups: {kinds}; last: {self._intake.last_failure[:200]}")
        if self._ledger.open_groups and not self._roster.present("actor", self.spec.fleet_name):
            parts.append(f"no actor is present in fleet {self.spec.fleet_name}")
        present = self._roster.present("replica", self.spec.fleet_name)
        replicas, enough = len(present), self.spec.fleet.min_replicas
        if replicas < enough:
            there = "no replica is" if not replicas else "1 replica is" if replicas == 1 else f"{replicas} replicas are"
            needed = f"; the run needs {enough} (fleet.min_replicas)" if enough > 1 else ""
            parts.append(f"{there} present in fleet {self.spec.fleet_name}{needed}")
        parts += [f"replica {node.id} is out: {node.detail}" for node in present if node.state == "failed"]
        return "; ".join(parts)

    def _node(self) -> Node:
        gauges: dict[str, float] = {"steps": float(self.spec.run.steps)}
        waits = self._session.trouble if hasattr(self, "_session") else ""
        detail, ready, pins = waits or self._detail, False, list[AdapterRef]()
        if hasattr(self, "_evaluations"):
            pins = self._evaluations.pins
            head = self._session.head
            detail, ready = self._trouble(), True
            gauges |= {
                "step": float(head.step),
                "head": float(head.head),
                "active": float(head.active),
                "credit": float(self._credit()),
                "buffered": float(len(self._buffer)),
                "buffered_steps": len(self._buffer) / self._rule.groups_per_step,
                "occupancy": len(self._buffer) / self._rule.window,
                "rollout_wait": self._waiting_share.read(self._clock()),
                "window": float(self._rule.window),
                "seconds": self._seconds(),
                "seconds_left": self._seconds_left(head.step),
                "activation_seconds": self._activator.seconds,
                **self._last,
                **self._tails.figures(),
                **{name: float(number) for name, number in self._ledger.counts().items()},
                **self._evaluations.gauges(),
            }
        return Node(
            id=self.id,
            node="learner",
            fleet=self.spec.fleet_name,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="ready" if ready else "joining",
            detail=detail,
            run=self.spec.run.name,
            pins=pins,
            gauges=gauges,
        )

    async def _announce(self) -> None:
        while True:
            await self._registry.put_node(self._node())
            await asyncio.sleep(1.0)

    def _summary(self) -> Finished:
        return summarize(
            self._session.head,
            self._rewards,
            self._ledger.counts(),
            self._tails.figures(),
            self._seconds(),
            done=self._done(),
        )


async def _news(event: asyncio.Event) -> None:
    """Wait until `event` is set, or for a second, and clear it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await event.wait()
    event.clear()
