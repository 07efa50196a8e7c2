"""The intake: takes what actors finished, fetches and checks it, and fills the buffer.

Deliveries of groups that may be trained on are held, unacknowledged, until the commit that closes them. What is
closed without a commit (failed, too stale) is acknowledged at once: should the learner die before its next commit,
the group is found open and nowhere, and is issued again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from broker import names
from broker.bus import HOLD_HEARTBEAT, Bus, Delivery, Puller
from broker.ending import end
from broker.errors import MalformedMessage, ObjectCorrupt, ObjectMissing
from broker.messages import FailureKind, GroupFailed, GroupReady, decode_one_of
from broker.store import Store
from broker.trajectories import Group
from learner.buffer import Buffer, Held
from learner.credit import CreditRule
from learner.feeder import Feeder
from learner.ledger import Ledger, Outcome
from learner.session import Session
from learner.tails import Tails
from observability import metrics

log = logging.getLogger(__name__)

FETCH_AT_ONCE = 16
"""Groups downloaded at the same time."""


class Intake:
    """Receives for one epoch."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        puller: Puller,
        session: Session,
        ledger: Ledger,
        buffer: Buffer,
        feeder: Feeder,
        rule: CreditRule,
        *,
        tails: Tails,
        on_change: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._store = store
        self._puller = puller
        self._session = session
        self._ledger = ledger
        self._buffer = buffer
        self._feeder = feeder
        self._rule = rule
        self._tails = tails
        self._changed = on_change
        self._holding: dict[str, Delivery] = {}
        """Groups in hand, from their arrival until a commit or a closing lets go of them."""
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order they were begun
        self._room = asyncio.Semaphore(FETCH_AT_ONCE)
        self.failed_in_a_row = 0
        self.last_failure = ""
        self.failures: Counter[str] = Counter()
        """Failed groups by kind of failure."""

    async def run(self) -> None:
        """Receive until cancelled. Raises ConsumerGone when another epoch has begun."""
        signs_of_life = asyncio.create_task(self._keep())
        try:
            while True:
                for delivery in await self._puller.fetch(32, 2.0):
                    await self._room.acquire()
                    task = asyncio.create_task(self._receive(delivery))
                    self._tasks[task] = None
                    task.add_done_callback(self._done)
        finally:
            await end(signs_of_life, *self._tasks)

    async def _keep(self) -> None:
        """What is held may be held for long (a pause, a slow step): keep the broker from delivering it again."""
        while True:
            await asyncio.sleep(HOLD_HEARTBEAT)
            for delivery in list(self._holding.values()):
                await delivery.in_progress()

    def holds(self, group: str) -> bool:
        """Whether a group is in hand."""
        return group in self._holding

    def let_go(self, groups: Iterable[str]) -> None:
        """These groups are closed and acknowledged."""
        for group in groups:
            self._holding.pop(group, None)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("a group could not be received", exc_info=task.exception())
        self._changed()

    async def _receive(self, delivery: Delivery) -> None:
        try:
            message = decode_one_of(delivery.data, GroupReady, GroupFailed)
        except MalformedMessage as error:
            await self._bus.dead_letter(delivery.subject, delivery.data, str(error))
            group = names.group_at(delivery.subject)
            if self._ledger.is_open(group) and group not in self._holding:
                self.note_failure("task", f"its answer cannot be read: {error}")
                self.close(group, "failed", [])
            await delivery.ack()
            return
        if not isinstance(message, GroupReady | GroupFailed):
            return
        id = message.group
        held = self._holding.get(id)
        if held is not None and held.sequence == delivery.sequence:
            await delivery.in_progress()  # the very message that is held: acknowledging it would give it up
            return
        ours = message.incarnation == self._session.head.incarnation
        if not ours or held is not None or not self._ledger.is_open(id):
            self._ledger.late += 1
            metrics.count("farflung.groups.late", 1, run=self._session.run)
            log.info("group %s came late, from %s", id, message.actor)
            await delivery.ack()
            return
        if isinstance(message, GroupFailed):
            self._take_failure(message)
            await delivery.ack()
            return
        if self._rule.too_stale(version=message.version, head=self._session.head.head) or not self._known(message):
            self.close(id, "dropped", message.lengths, message.seconds.get("group"))
            await delivery.ack()
            return
        await self._take_group(message, delivery)

    def _known(self, ready: GroupReady) -> bool:
        """Whether the adapter that served a group is this run's version of that number.

        After newer commits were lost, groups of versions that are no more may still arrive; and the base model never
        samples for a run that was branched.
        """
        if ready.version < self._session.head.first:
            return False
        ref = self._session.adapters.get(ready.version)
        return ready.adapter == (ref.name if ref is not None else None) and (ready.version == 0) == (ref is None)

    def _take_failure(self, message: GroupFailed) -> None:
        seconds = message.seconds.get("group")
        if message.failure == "stale":
            self.close(message.group, "dropped", message.lengths, seconds)
            return
        self.note_failure(message.failure, message.reason)
        log.warning("group %s failed on %s (%s)", message.group, message.actor, self.last_failure)
        self.close(message.group, "failed", message.lengths, seconds)

    def note_failure(self, failure: FailureKind, reason: str) -> None:
        """Count a failed group: by kind, and in a row."""
        self.failed_in_a_row += 1
        self.failures[failure] += 1
        self.last_failure = f"{failure}: {reason}"

    async def _take_group(self, ready: GroupReady, delivery: Delivery) -> None:
        self._holding[ready.group] = delivery
        try:
            data = await self._store.get_patiently(ready.blob)
            try:
                group = Group.from_blob(data)
            except MalformedMessage as error:  # the very bytes that the actor made: another try would make them again
                self.let_go([ready.group])
                await self._bus.dead_letter(delivery.subject, delivery.data, f"its blob cannot be read: {error}")
                self.note_failure("task", f"its blob cannot be read: {error}")
                self.close(ready.group, "failed", ready.lengths, ready.seconds.get("group"))
                await delivery.ack()
                return
            if group.group != ready.group or group.version != ready.version:
                raise MalformedMessage(f"the blob holds {group.group} under version {group.version}")
        except (ObjectMissing, ObjectCorrupt, MalformedMessage) as error:
            self.let_go([ready.group])
            await self._bus.dead_letter(delivery.subject, delivery.data, f"its blob cannot be used: {error}")
            await delivery.ack()
            await self._feeder.issue_again(ready.group, ready.index, self._session.head.active)
            return
        if not self._ledger.is_open(ready.group):
            self.let_go([ready.group])
            await delivery.ack()  # closed as expired while it was being fetched
            return
        self.failed_in_a_row = 0
        self._buffer.add(Held(ready, group, delivery, delivery.headers))

    def close(self, group: str, outcome: Outcome, lengths: Sequence[int], seconds: float | None = None) -> None:
        """Close a group that no commit closes: `lengths` it had sampled by then, `seconds` it had taken, if known."""
        if self._ledger.close(group, outcome):
            metrics.count("farflung.groups", 1, run=self._session.run, outcome=outcome)
            self._feeder.end(group, outcome)
            self._tails.add(outcome, lengths, seconds)
