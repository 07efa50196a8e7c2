"""The feeder: issues tasks while there is credit, and issues again what the broker lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable

from opentelemetry.trace import Span

from broker import faults, names
from broker.bus import Bus, StreamFull
from broker.errors import ConnectionFailed, StoreError
from broker.messages import Head, Task
from broker.runspec import RunSpec
from learner.ledger import Ledger
from learner.tasks import TaskSource, order
from observability import tracing

log = logging.getLogger(__name__)


def task_seed(run_seed: int, index: int) -> int:
    """The seed of one task, in 0 .. 2**31 - 1; the same whenever the task is issued."""
    digest = hashlib.sha256(f"{run_seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Feeder:
    """Makes tasks and publishes them. Owns the traces of open groups."""

    def __init__(
        self,
        bus: Bus,
        source: TaskSource,
        spec: RunSpec,
        ledger: Ledger,
        head: Head,
        *,
        retake: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`retake` is called when a task was not taken: it sees to the stream, and raises Fenced where this epoch is
        over.
        """
        self._retake = retake
        self._bus = bus
        self._source = source
        self._spec = spec
        self._ledger = ledger
        self._incarnation = head.incarnation
        self._epoch = head.epoch
        self._again = 0
        self.spans: dict[str, Span] = {}
        self.publishing: set[str] = set()
        """Groups whose tasks the broker has not confirmed yet."""
        self.trouble = ""
        """Why a task cannot be issued now, for people."""

    @property
    def _run(self) -> str:
        return self._spec.run.name

    def id_of(self, index: int) -> str:
        return names.group_id(self._run, self._incarnation, index)

    async def issue_next(self, active: int) -> None:
        """Open the next group and publish its task; `active` is the version that its credit counted on."""
        group = self.id_of(self._ledger.cursor)
        index = self._ledger.issue(group)
        faults.reached("learner.issue")
        await self._publish(group, index, "", active)
        faults.reached("learner.issued")

    async def issue_again(self, group: str, index: int, active: int) -> None:
        """Publish the task of an open group that the broker does not hold any more."""
        self._again += 1
        await self._publish(group, index, f".again{self._again}", active)

    async def adopt(self, held: set[str], active: int) -> int:
        """At start: catch up with what the broker holds; returns how many tasks had to be issued again.

        Tasks issued after the last commit are ahead of its cursor: they are opened anew, not lost. Open groups that
        neither stream holds are issued again.
        """
        prefix = f"{self._run}-{self._incarnation}-"
        ahead = [int(group[len(prefix) :]) for group in held if group.startswith(prefix)]
        while ahead and self._ledger.cursor <= max(ahead):
            self._ledger.issue(self.id_of(self._ledger.cursor))
        missing = [(group, index) for group, index in self._ledger.open_ids().items() if group not in held]
        for group, index in missing:
            await self.issue_again(group, index, active)
        return len(missing)

    async def _publish(self, group: str, index: int, suffix: str, active: int) -> None:
        row = self._source.row(order(index, self._source.length, self._spec.run.seed, self._spec.tasks.shuffle))
        task = Task(
            run=self._run,
            incarnation=self._incarnation,
            group=group,
            index=index,
            columns=row,
            group_size=self._spec.algorithm.group_size,
            seed=task_seed(self._spec.run.seed, index),
            active=active,
        )
        span = tracing.root("group", run=self._run, group=group, index=index)
        self.spans[group] = span
        subject = names.task_subject(self._run, group, self._epoch)
        self.publishing.add(group)
        while True:
            try:
                # The epoch is part of the id: an id is remembered after its message is gone.
                await self._bus.publish(
                    subject, task, id=f"{group}.e{self._epoch}{suffix}", headers=tracing.headers(span)
                )
            except (ConnectionFailed, StoreError, StreamFull) as error:
                self.trouble = f"a task cannot be issued: {error}"
                log.warning("task %s not issued yet: %s", group, error)
                await asyncio.sleep(1.0)
                if self._retake is not None:
                    with contextlib.suppress(ConnectionFailed):
                        await self._retake()
                continue
            self.trouble = ""
            self.publishing.discard(group)
            return

    def end(self, group: str, outcome: str) -> None:
        """The group is closed: end its trace."""
        span = self.spans.pop(group, None)
        if span is not None:
            span.set_attribute("farflung.outcome", outcome)
            if outcome in ("failed", "expired"):
                tracing.fail(span, outcome)
            span.end()
