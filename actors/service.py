"""The actor: leases tasks, runs their episodes, stores the groups.

Invariant: a task is acknowledged only after the broker has acknowledged what answers it (GroupReady or GroupFailed).
So whatever happens to this process, the task is answered by it or runs again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.episode import Generate, GroupOutcome, run_group
from actors.evaluations import Evaluations
from actors.generation import Generator, generate_for
from actors.residency import still_counts
from actors.shares import Demand, Shares
from actors.workload import Workload, Workloads
from broker import faults, names
from broker.bus import HEARTBEATS, Bus, ConsumerGone, Delivery, Puller, StreamFull, actors_consumer
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.errors import ConnectionFailed, FarflungError, MalformedMessage, StoreError
from broker.messages import (
    BlobRef,
    FailureKind,
    GenerateReply,
    GroupFailed,
    GroupReady,
    Head,
    Message,
    Node,
    Task,
    decode,
    unpack_ids,
)
from broker.registry import PRESENCE_SECONDS, Heads, Registry, Roster
from broker.store import Store
from broker.trajectories import Group
from observability import metrics, tracing
from observability.shares import Share

log = logging.getLogger(__name__)

POLL_ALONE = 2.0
"""How long an actor waits at the only run's queue."""

POLL_AMONG = 0.1
"""How long it waits at each queue when several runs share it and all queues seem empty."""

LOOK_SECONDS = 0.2
"""A queue that was found empty is looked at again after this long, while other runs are served."""

NEWS_SECONDS = 10.0
"""How long a task may wait for the news of the version it counts on; a watch that went deaf re-reads within 2 s."""

REFUSED_RETRY_SECONDS = 0.5
"""A full groups stream is tried again after this long."""

STORE_RETRY_SECONDS = 2.0
"""A store or a broker that is away or full is tried again after this long."""


@dataclass
class Lease:
    """A task being worked on."""

    delivery: Delivery
    task: Task
    workload: Workload
    began: float
    version: int = 0
    adapter: str | None = None
    work: asyncio.Task[GroupOutcome] | None = None
    stale: bool = False
    blocked: bool = False
    """Its episodes are over, and what came of them was refused: the stream is full, the store or the broker is away."""
    sampled: dict[int, int] = field(default_factory=dict)
    """Tokens sampled so far, by episode."""

    def answer_id(self, what: str) -> str:
        """The id to publish an answer under.

        The broker remembers ids after their messages are gone, so the id names this very delivery: an answer to a
        task that was issued again must not pass for a repetition of the first.
        """
        return f"{self.task.group}:{self.delivery.sequence}.{self.delivery.attempt}:{what}"


class Actor:
    """Runs episodes for every run of its fleet."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        store: Store,
        tokenizer: ChatTokenizer,
        *,
        fleet: str,
        id: str,
        context: int,
        roots: Sequence[Path],
        max_inflight: int,
        clock: Callable[[], float] = time.monotonic,
        workloads: Workloads | None = None,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._store = store
        self._tokenizer = tokenizer
        self.fleet = fleet
        self.id = id
        self._context = context
        self._max_inflight = max_inflight
        self._shares = Shares(max_inflight)
        self._polled: dict[str, float] = {}
        self._found_empty: dict[str, float] = {}
        """When a run's queue was looked at last, and when it was empty then."""
        self._clock = clock
        self._generator = Generator(bus, fleet=fleet, clock=clock)
        self._workloads = workloads or Workloads(roots)
        self._pullers: dict[str, Puller] = {}
        self._leases: dict[tuple[str, int], Lease] = {}
        """By subject and sequence: one for each message, however often it is delivered."""
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order they were begun
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._busy = Share()
        self._idle_held_back = Share()
        self._outside = Share()
        self._episodes = 0
        self._trouble = ""
        """What keeps finished groups from being handed over, for people."""
        self._heads: Heads
        self._roster: Roster
        self._evaluations: Evaluations

    async def run(self) -> None:
        """Work until cancelled; tasks under way are then given back, to run elsewhere at once."""
        self._heads = Heads(self._registry, on_change=self._on_head)
        self._roster = Roster(self._registry, clock=self._clock)
        parts: list[asyncio.Task[None]] = []
        try:
            await self._heads.ready.wait()
            await self._roster.ready.wait()
            await self._generator.start()
            log.info("actor %s works for fleet %s", self.id, self.fleet)
            self._evaluations = Evaluations(
                self._bus,
                self._generator,
                self._tokenizer,
                self._heads,
                self._roster,
                self._workloads,
                actor=self.id,
                context=self._context,
                max_inflight=self._max_inflight,
                clock=self._clock,
            )
            parts = [
                asyncio.create_task(part) for part in (self._announce(), self._lease_tasks(), self._evaluations.run())
            ]
            await asyncio.gather(*parts)
        finally:
            await end(*parts, *self._tasks)
            await self._heads.close()
            await self._roster.close()
            await self._registry.remove_node(self.id)

    # ------------------------------------------------------------------------------------------------------ leasing

    def _on_head(self, run: str) -> None:
        """A run moved on: cancel groups whose version is too old to be trained on, or was lost and made anew."""
        self._changed.set()
        self._news.set()
        head = self._heads.heads.get(run)
        for lease in self._leases.values():
            if lease.task.run != run or lease.stale or lease.work is None:
                continue
            gone = head is None or head.incarnation != lease.task.incarnation
            if gone or (head is not None and not still_counts(head, lease.version, lease.adapter)):
                lease.stale = True
                lease.work.cancel()

    def _of(self, run: str, *, blocked: bool) -> list[Lease]:
        """The leases of one run, or of all (""), that go on, or those that were refused when they were over."""
        leases = self._leases.values()
        return [lease for lease in leases if lease.blocked == blocked and run in ("", lease.task.run)]

    def _slots(self, run: str = "", *, blocked: bool) -> int:
        """The episodes of those leases."""
        return sum(lease.task.group_size for lease in self._of(run, blocked=blocked))

    def _workable(self) -> list[tuple[Head, Workload]]:
        """Runs to take tasks of: of this fleet, running, their learner present, their code here."""
        learners = {node.run for node in self._roster.present("learner")}
        found = []
        for head in self._heads.heads.values():
            if head.fleet == self.fleet and head.state == "running" and head.run in learners:
                workload = self._workloads.of(head)
                if workload is not None:
                    found.append((head, workload))
        return sorted(found, key=lambda item: item[0].run)

    async def _lease_tasks(self) -> None:
        """Take tasks of whichever run's turn it is, while episodes may start."""
        while True:
            self._changed.clear()
            runs = {head.run: workload for head, workload in self._workable()}
            self._note_shares(idle=True)
            now = self._clock()
            waits = {run for run in runs if len(runs) == 1 or now - self._found_empty.get(run, -1e9) > LOOK_SECONDS}
            turn = self._shares.next_run(self._demands(runs, waits), now)
            idle = self._idle(runs) if not waits else None
            if turn is not None and turn.fits:
                await self._lease(runs[turn.run], POLL_ALONE if len(runs) == 1 else 0.0)
            elif turn is not None and not await self._has_tasks(runs[turn.run]):
                self._found_empty[turn.run] = self._clock()  # no slots are kept for a run without tasks
            elif idle is not None:
                await self._lease(runs[idle], POLL_AMONG)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS if len(runs) > 1 else 1.0):
                        await self._changed.wait()

    def _demands(self, runs: Mapping[str, Workload], waits: Collection[str]) -> list[Demand]:
        """What each run holds and wants. Runs that no tasks are taken of any more may still hold something."""
        now = self._clock()
        return [
            Demand(
                run=run,
                size=runs[run].spec.algorithm.group_size if run in runs else 0,
                working=self._slots(run, blocked=False),
                blocked=self._slots(run, blocked=True),
                waits=run in waits,
                oldest=max((now - lease.began for lease in self._of(run, blocked=False)), default=0.0),
            )
            for run in {*runs, *(lease.task.run for lease in self._leases.values())}
        ]

    def _idle(self, runs: Mapping[str, Workload]) -> str | None:
        """While no run seems to have a task: the one with room whose queue was left alone for longest."""
        for run in sorted(runs, key=lambda run: (self._polled.get(run, 0.0), run)):
            turn = self._shares.next_run(self._demands(runs, {run}), self._clock())
            if turn is not None and turn.fits:
                return run
        return None

    async def _has_tasks(self, workload: Workload) -> bool:
        puller = await self._puller(workload)
        try:
            return puller is not None and await puller.waiting() > 0
        except ConsumerGone:
            return False

    async def _lease(self, workload: Workload, patience: float) -> None:
        """Take a task of a run, waiting up to `patience` seconds for one, and begin it."""
        run, puller = workload.run, await self._puller(workload)
        self._polled[run] = self._clock()
        if puller is None:
            self._found_empty[run] = self._clock()
            await asyncio.sleep(min(patience, LOOK_SECONDS))
            return
        try:
            if patience > 0:
                deliveries = await puller.fetch(1, patience)
            else:
                found = await puller.take()
                deliveries = [found] if found is not None else []
        except ConsumerGone as error:
            log.info("run %s: %s", run, error)
            await self._pullers.pop(run).close()
            return
        for delivery in deliveries:
            self._found_empty.pop(run, None)
            await self._accept(delivery)
        if not deliveries:
            self._found_empty[run] = self._clock()

    async def _puller(self, workload: Workload) -> Puller | None:
        run, lease_seconds = workload.run, workload.spec.fleet.lease_seconds
        if run not in self._pullers:
            try:
                self._pullers[run] = await self._bus.puller(names.tasks_stream(run), actors_consumer(lease_seconds))
            except (ConsumerGone, ConnectionFailed) as error:
                log.info("run %s has no tasks to lease: %s", run, error)
                return None
        return self._pullers[run]

    async def _accept(self, delivery: Delivery) -> None:
        """Start on a task, or put aside what is none."""
        try:
            task = decode(delivery.data, Task)
        except MalformedMessage as error:
            # Given back, not acknowledged: once its deliveries are used up, the learner closes the group.
            if delivery.attempt == 1:
                await self._bus.dead_letter(delivery.subject, delivery.data, str(error))
            await delivery.release()
            return
        head = self._heads.heads.get(task.run)
        workload = self._workloads.of(head) if head is not None else None
        if head is None or workload is None or head.incarnation != task.incarnation:
            await delivery.release(delay=5.0)
            return
        key = (delivery.subject, delivery.sequence)
        if (known := self._leases.get(key)) is not None:
            log.info("group %s was delivered again while it is worked on", task.group)
            known.delivery = delivery
            await delivery.in_progress()
            return
        faults.reached("actor.leased")
        lease = self._leases[key] = Lease(delivery, task, workload, self._clock())
        self._shares.begin(task.run, task.group_size, lease.began)
        running = asyncio.create_task(self._work(lease), name=task.group)
        self._tasks[running] = None
        running.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        self._note_shares(idle=True)

    # ------------------------------------------------------------------------------------------------------ working

    async def _work(self, lease: Lease) -> None:
        """One group, from lease to acknowledgement."""
        task = lease.task
        heartbeat = asyncio.create_task(self._keep(lease))
        try:
            with tracing.span("actor", parent=lease.delivery.headers, group=task.group, actor=self.id):
                answer, id = await self._answer(lease)
                if answer is not None:
                    await self._publish(lease, answer, id)
            await lease.delivery.ack()
            faults.reached("actor.acknowledged")
        except asyncio.CancelledError:
            await lease.delivery.release()
            raise
        except FarflungError as error:
            # Neither the store nor the broker would take it: the lease is given back, and the group runs again.
            log.error("group %s could not be handed over: %s", task.group, error)
            await lease.delivery.release(delay=5.0)
        except Exception:
            log.exception("group %s could not be worked on", task.group)
            await lease.delivery.release(delay=5.0)
        finally:
            heartbeat.cancel()
            self._leases.pop((lease.delivery.subject, lease.delivery.sequence))
            self._changed.set()
            self._note_shares(idle=True)

    async def _resolve_version(self, lease: Lease) -> None:
        """Fix the version that serves the whole group: the active one, as new at least as the task's credit counted on.

        The learner activates and issues in one breath, and the task may be here before the news.
        """
        deadline = self._clock() + NEWS_SECONDS
        while True:
            head = self._heads.heads.get(lease.task.run)
            # A version beyond the head was lost since the task was issued: there is no news to wait for.
            if head is None or head.active >= min(lease.task.active, head.head) or self._clock() > deadline:
                break
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._news.wait()
        if head is None:
            raise StoreError(f"run {lease.task.run} is gone")
        if head.active < head.first:
            raise StoreError(f"the version that run {lease.task.run} begins with, {head.first}, is not active yet")
        lease.version = head.active
        lease.adapter = next((ref.name for ref in head.live if ref.version == head.active), None)
        if head.active > 0 and lease.adapter is None:
            # The base model must never answer in an adapter's place.
            raise StoreError(f"version {head.active} of run {lease.task.run} is active but its adapter is not named")

    async def _keep(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(lease.workload.spec.fleet.lease_seconds / HEARTBEATS)
            await lease.delivery.in_progress()

    async def _answer(self, lease: Lease) -> tuple[Message | None, str]:
        """Run the group; the message that answers its task, and the id to publish it under."""
        task, spec = lease.task, lease.workload.spec
        await self._resolve_version(lease)
        lease.work = asyncio.create_task(
            run_group(
                task=task,
                factory=lease.workload.factory,
                tokenizer=self._tokenizer,
                spec=spec,
                generate=self._generate_for(lease),
                context=self._context,
                clock=self._clock,
            )
        )
        try:
            await asyncio.wait([lease.work])
        except asyncio.CancelledError:
            lease.work.cancel()
            await asyncio.gather(lease.work, return_exceptions=True)
            raise
        self._shares.end(task.run, self._clock() - lease.began)
        if lease.stale:
            reason = f"version {lease.version} fell too far behind while the group ran"
            return self._failed(lease, "stale", reason, {}), lease.answer_id("stale")
        if lease.work.cancelled():
            reason = "its generation was cancelled"
            return self._failed(lease, "generation", reason, {}), lease.answer_id("cancelled")
        try:
            outcome = lease.work.result()
        except Exception as error:
            log.exception("group %s failed unexpectedly", task.group)
            reason = f"{type(error).__name__}: {error}"
            return self._failed(lease, "task", reason, {}), lease.answer_id("failed")
        self._count(outcome)
        if len(outcome.episodes) < min(spec.min_group_size, task.group_size):
            category, reason = outcome.main_failure()
            reason = f"{len(outcome.failures)} of {task.group_size} episodes failed: {reason}"
            return self._failed(lease, category, reason, outcome.seconds), lease.answer_id("failed")
        return await self._store_group(lease, outcome)

    async def _store_group(self, lease: Lease, outcome: GroupOutcome) -> tuple[GroupReady, str]:
        task = lease.task
        group = Group(
            run=task.run,
            incarnation=task.incarnation,
            group=task.group,
            index=task.index,
            version=lease.version,
            adapter=lease.adapter,
            episodes=outcome.episodes,
            columns=dict(task.columns),
        )
        began = self._clock()
        with tracing.span("store", group=task.group) as span:
            data = group.encode()
            ref = await self._put(lease, data)
            faults.reached("actor.blob_stored")
            span.set_attribute("farflung.bytes", len(data))
        ready = GroupReady(
            run=task.run,
            incarnation=task.incarnation,
            group=task.group,
            index=task.index,
            version=lease.version,
            adapter=lease.adapter,
            key=ref.key,
            size=ref.size,
            sha256=ref.sha256,
            rewards=group.rewards,
            lengths=outcome.lengths,
            seconds={**outcome.seconds, "store": self._clock() - began, "group": self._clock() - lease.began},
            actor=self.id,
        )
        return ready, lease.answer_id(ref.sha256[:16])

    async def _put(self, lease: Lease, data: bytes) -> BlobRef:
        """Store a group. A store that is away or full is waited for, with the lease kept: what was sampled counts."""
        task = lease.task
        while True:
            try:
                ref = await self._store.put(names.group_prefix(task.run, task.incarnation, task.group), data)
            except StoreError as error:
                if lease.stale:
                    raise
                await self._wait_for("the store", lease, error)
            else:
                self._trouble = ""
                return ref

    async def _wait_for(self, what: str, lease: Lease, error: FarflungError) -> None:
        """Give who cannot take a finished group now the time to come right, and tell people."""
        self._trouble = self._trouble or f"groups wait for {what}: {error}"
        log.warning("group %s waits for %s: %s", lease.task.group, what, error)
        self._block(lease)
        await asyncio.sleep(STORE_RETRY_SECONDS)

    def _block(self, lease: Lease) -> None:
        """A finished group waits to be handed over: from now on its slots are its own run's trouble alone."""
        lease.blocked = True
        self._changed.set()

    def _failed(self, lease: Lease, failure: FailureKind, reason: str, seconds: dict[str, float]) -> GroupFailed:
        task = lease.task
        log.warning("group %s failed (%s): %s", task.group, failure, reason)
        return GroupFailed(
            run=task.run,
            incarnation=task.incarnation,
            group=task.group,
            index=task.index,
            version=lease.version,
            failure=failure,
            reason=reason[:2000],
            lengths=[lease.sampled.get(index, 0) for index in range(task.group_size)],
            seconds={**seconds, "group": self._clock() - lease.began},
            actor=self.id,
        )

    async def _publish(self, lease: Lease, answer: Message, id: str) -> None:
        """Hand the answer over; a full stream and a broker that is away or full are waited for, with the lease kept."""
        subject = names.group_subject(lease.task.run, lease.task.group)
        headers = tracing.headers()
        while True:
            try:
                receipt = await self._bus.publish(subject, answer, id=id, headers=headers)
            except StreamFull:
                self._block(lease)
                began = self._clock()
                await asyncio.sleep(REFUSED_RETRY_SECONDS)
                self._bus.refused_seconds += self._clock() - began
                if lease.stale:
                    raise StoreError("the run moved on while its groups stream was full") from None
                continue
            except (ConnectionFailed, StoreError) as error:
                if lease.stale:
                    raise
                await self._wait_for("the broker", lease, error)
                continue
            self._trouble = ""
            if receipt.outcome != "stored":
                log.info("group %s was answered already (%s)", lease.task.group, receipt.outcome)
            faults.reached("actor.published")
            return

    def _generate_for(self, lease: Lease) -> Generate:
        """The `generate` that this lease's episodes call: one version for the whole group."""

        def note(episode: int, reply: GenerateReply) -> None:
            lease.sampled[episode] = lease.sampled.get(episode, 0) + len(unpack_ids(reply.token_ids))
            faults.reached("actor.mid_episode")

        return generate_for(
            self._generator,
            self._tokenizer,
            lease.task,
            version=lease.version,
            adapter=lease.adapter,
            temperature=lease.workload.spec.sampling.temperature,
            on_reply=note,
        )

    # ----------------------------------------------------------------------------------------------------- readings

    def _count(self, outcome: GroupOutcome) -> None:
        self._episodes += len(outcome.episodes)
        metrics.count("farflung.episodes", len(outcome.episodes), outcome="done")
        for failure in outcome.failures:
            metrics.count("farflung.episodes", 1, outcome=failure.category)
        total = outcome.seconds["generate"] + outcome.seconds["environment"] + outcome.seconds["reward"]
        if total > 0:
            now = self._clock()
            self._outside.set(1 - outcome.seconds["generate"] / total, now)

    def _note_shares(self, *, idle: bool) -> None:
        """Book how busy the slots are, and how much of their idleness is the learner's holding back."""
        now = self._clock()
        busy = min(1.0, self._slots(blocked=False) / self._max_inflight)
        self._busy.set(busy, now)
        held_back = any(
            node.gauges.get("credit", 1.0) <= 0 and node.gauges.get("buffered_steps", 0.0) >= 1.0
            for node in self._roster.present("learner", self.fleet)
        )
        self._idle_held_back.set(1.0 - busy if held_back and idle else 0.0, now)

    def _gauges(self) -> dict[str, float]:
        return {
            "farflung.actor.slots_busy": float(self._slots(blocked=False)),
            "farflung.actor.evaluating": float(self._evaluations.samples),
            "farflung.actor.slots": float(self._max_inflight),
            "farflung.backpressure": self._idle_held_back.read(self._clock()),
        }

    async def _announce(self) -> None:
        metrics.observe(self._gauges, actor=self.id)
        while True:
            now = self._clock()
            refused = [f"run {run}: {reason}" for run, reason in sorted(self._workloads.refused.items())]
            await self._registry.put_node(
                Node(
                    id=self.id,
                    node="actor",
                    fleet=self.fleet,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    state="ready",
                    detail="; ".join([*refused, *([self._trouble] if self._trouble else [])]),
                    capacity=self._max_inflight,
                    code=self._workloads.code,
                    gauges={
                        "episodes": float(self._slots(blocked=False)),
                        "evaluating": float(self._evaluations.samples),
                        "blocked": float(self._slots(blocked=True)),
                        "busy": self._busy.read(now),
                        "backpressure": self._idle_held_back.read(now),
                        "outside_generation": self._outside.read(now),
                        "refused_seconds": self._bus.refused_seconds,
                        "episodes_done": float(self._episodes),
                    },
                )
            )
            await asyncio.sleep(PRESENCE_SECONDS / 2)
