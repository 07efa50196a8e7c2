"""The janitor: closes what nobody answers, removes what retention says may go, and notices a newer epoch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from broker import faults, names
from broker.bus import MAX_DELIVERIES, Bus, ConsumerGone, advisory_sequence
from broker.errors import ConnectionFailed, MalformedMessage, ObjectMissing, StoreError
from broker.messages import AdapterRef, BlobRef
from broker.runspec import RunSpec
from broker.store import Store, reference
from learner.ledger import Ledger, Outcome
from learner.lineage import lineage
from learner.session import Session
from learner.sweep import (
    contested,
    groups_prefix,
    losers,
    place_of,
    removable_copies,
    removable_groups,
    removable_versions,
)

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0

INSPECT_SECONDS = 30.0
"""How often the store is asked whether it still has the adapters that replicas may want."""

OVERDUE_FACTOR = 2.0
"""A leased group is expired after this many `group_timeout`s: its actor had one, and a redelivery has another."""


class Leases:
    """Since when each open group is out at an actor, as seen from here. Pure: time comes in."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since: dict[str, float] = {}

    def observe(self, leased: Collection[str], now: float) -> list[str]:
        """Take in which groups are leased now; returns those that have been for longer than the limit."""
        self._since = {group: self._since.get(group, now) for group in leased}
        return [group for group, since in self._since.items() if now - since > self.limit]


class Janitor:
    """Looks after one epoch of one run."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        session: Session,
        ledger: Ledger,
        spec: RunSpec,
        *,
        on_unanswered: Callable[[str, Outcome, str, float | None], None],
        weights_of: Callable[[int], bytes | None],
        issue_again: Callable[[str, int], Awaitable[None]],
        in_hand: Callable[[str], bool],
        evaluated: Callable[[], Iterable[AdapterRef]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`evaluated`: versions that are being evaluated, or wait for it: their adapters stay."""
        self._bus = bus
        self._store = store
        self._session = session
        self._ledger = ledger
        self._spec = spec
        self._unanswered = on_unanswered
        self._weights_of = weights_of
        self._issue_again = issue_again
        self._in_hand = in_hand
        self._evaluated = evaluated
        self._missing: set[str] = set()
        self._clock = clock
        self._leases = Leases(OVERDUE_FACTOR * spec.environment.group_timeout)
        self._swept = self._inspected = clock()

    async def run(self) -> None:
        """Look after the run until cancelled. Raises Fenced when another epoch has begun."""
        # The advisory is not stored: one that comes while nobody listens is made up for by the lease's overdue limit.
        await self._bus.subscribe(names.given_up_subject(self._session.run), self._on_given_up)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._session.require()
            except ConnectionFailed as error:
                log.warning("%s; going on when it is back", error)
                continue
            with contextlib.suppress(nats.errors.Error, TimeoutError, ConnectionFailed, ConsumerGone):
                await self._compare()
            if self._clock() - self._inspected > INSPECT_SECONDS:
                self._inspected = self._clock()
                await self._put_back()
            if self._clock() - self._swept > self._spec.storage.sweep_seconds:
                self._swept = self._clock()
                await self._sweep()

    async def _compare(self) -> None:
        """Hold the ledger against what lies on the broker, tasks first: an answer is stored before its task goes."""
        run, open_ids = self._session.run, self._ledger.open_ids()
        tasks = {names.group_at(subject): subject for subject in await self._bus.subjects_held(names.tasks_stream(run))}
        answers = {names.group_at(subject) for subject in await self._bus.subjects_held(names.groups_stream(run))}
        await self._issue_lost(open_ids, tasks.keys() | answers)
        await self._expire_overdue(tasks, answers)

    async def _expire_overdue(self, tasks: Mapping[str, str], answers: Collection[str]) -> None:
        """Close groups that were leased long ago and of which nothing was heard, and dead-letter their tasks.

        `tasks`: the subject of each group's task.
        """
        stream = names.tasks_stream(self._session.run)
        try:
            info = await self._bus.jetstream.consumer_info(stream, names.ACTORS_CONSUMER)
        except nats.js.errors.NotFoundError:
            return  # no actor has come yet
        unanswered = [group for group in self._ledger.open_ids() if group in tasks and group not in answers]
        # Tasks are delivered in the order they were issued: the last `num_pending` of them still wait.
        leased = unanswered[: max(0, len(unanswered) - int(info.num_pending or 0))]
        for group in self._leases.observe(leased, self._clock()):
            try:
                message = await self._bus.jetstream.get_last_msg(stream, tasks[group])
            except nats.js.errors.NotFoundError:
                continue  # it has just been answered
            reason = "nothing was heard of it since it was leased, for twice group_timeout"
            await self._close(tasks[group], "expired", reason, message.data or b"", self._leases.limit)

    async def _issue_lost(self, open_ids: Mapping[str, int], there: Collection[str]) -> None:
        """Issue again what was open before the broker was asked, and is nowhere, twice in a row.

        A learner that was displaced may have taken an answer off its stream and died with it; the actor that repeats
        the answer is told that it was stored, and lets go of the task. So this is asked as long as the run goes on.
        """
        missing = {
            group
            for group in open_ids
            if group not in there and self._ledger.is_open(group) and not self._in_hand(group)
        }
        for group in sorted(missing & self._missing):
            log.warning("group %s is open and nowhere on the broker: it is issued again", group)
            await self._issue_again(group, open_ids[group])
        self._missing = missing - self._missing

    async def _on_given_up(self, message: Msg) -> None:
        """The broker delivers a task no more: every actor that had it died with it or gave it back."""
        sequence = advisory_sequence(message.data)
        if sequence is None:
            return
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            task = await self._bus.jetstream.get_msg(names.tasks_stream(self._session.run), sequence)
            subject = task.subject or ""
            group = names.group_at(subject)
            if self._ledger.is_open(group):
                reason = f"{MAX_DELIVERIES} actors had its task, and each died with it or gave it back"
                await self._close(subject, "failed", reason, task.data or b"")
            else:
                await self._bus.jetstream.purge_stream(names.tasks_stream(self._session.run), subject=subject)

    async def _close(
        self, subject: str, outcome: Outcome, reason: str, task: bytes, seconds: float | None = None
    ) -> None:
        """Close the group whose task lies at `subject` and nobody answers; dead-letter the task.

        A late answer finds it closed. `seconds`: how long it was out at least, if that is known.
        """
        group = names.group_at(subject)
        log.warning("group %s is closed as %s: %s", group, outcome, reason)
        self._unanswered(group, outcome, reason, seconds)
        await self._bus.jetstream.purge_stream(names.tasks_stream(self._session.run), subject=subject)
        await self._bus.dead_letter(subject, task, reason)

    async def _put_back(self) -> None:
        """Store the adapters again that the store has lost and replicas may still want: their bytes are here."""
        head = self._session.head
        for ref in head.live:
            weights = self._weights_of(ref.version)
            prefix = names.adapter_prefix(head.run, head.incarnation, ref.version)
            try:
                if weights is None or reference(prefix, weights) != ref.blob or await self._store.exists(ref.blob):
                    continue
                log.error("the store has lost %s; it is stored again", ref.key)
                await self._store.put(prefix, weights)
            except StoreError as error:
                log.warning("not looked after: %s", error)
                return

    async def _sweep(self) -> None:
        """Remove objects by the retention the user set. A store that is away is swept another time."""
        head, storage = self._session.head, self._spec.storage
        prefix = names.run_prefix(head.run, head.incarnation)
        try:
            groups = await self._store.list(groups_prefix(head.run, head.incarnation))
            versions = await self._store.list(f"{prefix}/adapters/")
            checkpoints = await self._store.list(f"{prefix}/checkpoints/")
            copies = await self._store.list(f"{names.history_prefix(head.run)}/")
            now = max((written for _, written in [*groups, *versions, *checkpoints]), default=0.0)
            kept = {ref.key for ref in (*head.live, *self._evaluated())}
            kept |= {ref.key for ref in (head.adapter, head.checkpoint) if ref}
            doomed = removable_groups(
                groups,
                open_groups=self._ledger.open_ids().keys(),
                now=now,
                keep_hours=storage.keep_groups_hours,
                grace_hours=storage.grace_hours,
            )
            # The newest versions were made by this many steps, and each of those steps has a checkpoint.
            steps = storage.keep_versions * self._spec.algorithm.publish_every
            for objects, newest, keep in (
                (versions, head.head, storage.keep_versions),
                (checkpoints, head.step, steps),
            ):
                doomed += removable_versions(
                    objects,
                    newest=newest,
                    referenced=kept,
                    keep=keep,
                    now=now,
                    grace_hours=storage.grace_hours,
                )
            doomed += removable_copies(
                copies,
                incarnation=head.incarnation,
                newest=head.step,
                keep=steps,
                now=now,
                grace_hours=storage.grace_hours,
            )
            places = contested([*groups, *versions, *checkpoints], now=now, grace_hours=storage.grace_hours)
            doomed += losers(places, await self._named(head.checkpoint, places))
            for key in dict.fromkeys(doomed):
                await self._session.require()  # what is doomed in one epoch may be needed in the next
                await self._store.remove(key)
                faults.reached("learner.sweeping")
        except (StoreError, MalformedMessage, ConnectionFailed) as error:
            log.warning("not swept: %s", error)
            return
        if doomed:
            log.info("%d objects removed", len(doomed))

    async def _named(self, newest: BlobRef | None, places: Collection[str]) -> dict[str, str]:
        """What the commits from `newest` back name in each of `places`, as far back as there are any."""
        wanted, named = set(places), dict[str, str]()
        if not wanted:
            return named
        with contextlib.suppress(ObjectMissing):  # older commits were swept
            async for ref, checkpoint in lineage(self._store, newest):
                blobs = [ref, checkpoint.weights, checkpoint.optimizer, *(group.blob for group in checkpoint.trained)]
                named |= {place_of(blob.key): blob.key for blob in blobs if blob and place_of(blob.key) in wanted}
                if named.keys() == wanted:
                    break
        return named
