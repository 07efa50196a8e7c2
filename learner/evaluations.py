"""A run's evaluations: which versions are due, one after the other, and where the results go.

They run beside training and hold nothing up: they have no part in the ledger, in credit or in a commit. A version that
becomes due while another is evaluated waits; of those that wait only the newest is kept. An evaluation that its
learner dies with is begun anew by the next one: a result is written when it is whole, or never.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec

from broker import names
from broker.errors import FarflungError, ObjectCorrupt, ObjectMissing
from broker.messages import AdapterRef, BlobRef, Head
from broker.registry import Registry
from broker.runspec import RunSpec
from broker.store import Store
from learner.evaluation import Evaluation, sentence
from learner.evaluator import Evaluator, Plan
from learner.readings import StepLog
from learner.recovery import counts
from learner.tasks import TaskSource
from learner.trackers import Trackers

log = logging.getLogger(__name__)

EVALUATION_LOG = "evals.jsonl"
"""The file in the run directory that gets one line per evaluation."""

READ_AT_ONCE = 16
"""Results read at the same time; each is a kilobyte."""


@dataclass(frozen=True, slots=True)
class Due:
    """A version that is to be evaluated. `step`: the one that made it."""

    version: int
    adapter: AdapterRef | None
    step: int


class Schedule:
    """Which version is evaluated next. Pure."""

    def __init__(self, every: int, first: int) -> None:
        """`first`: the version that the run began with."""
        self._every = every
        self._first = first
        self.evaluated: set[int] = set()
        self.waiting: Due | None = None
        self.current: Due | None = None

    def is_due(self, version: int) -> bool:
        """Whether a version is evaluated though it is not the last one."""
        return version == self._first or (version > self._first and version % self._every == 0)

    def newest_due(self, head: int) -> int | None:
        """The newest version up to `head` that is due, None when it has been evaluated."""
        due = max(self._first, head - head % self._every)
        return due if due not in self.evaluated else None

    def published(self, due: Due, *, last: bool = False) -> Due | None:
        """A version is there; returns the one that is left out since only the newest of those that wait is kept."""
        known = due.version in self.evaluated or (self.current is not None and self.current.version == due.version)
        if known or not (last or self.is_due(due.version)):
            return None
        if self.waiting is not None and self.waiting.version >= due.version:
            return due if self.waiting.version > due.version else None
        skipped, self.waiting = self.waiting, due
        return skipped

    def begin(self) -> Due | None:
        """Take the one that waits, unless it turned out to be evaluated."""
        waiting, self.waiting = self.waiting, None
        self.current = waiting if waiting is not None and waiting.version not in self.evaluated else None
        return self.current

    def end(self, *, evaluated: bool) -> None:
        """The current one is over."""
        if self.current is not None and evaluated:
            self.evaluated.add(self.current.version)
        self.current = None


class Evaluations:
    """The evaluations of one epoch of one run. Without a task source nothing is ever due."""

    def __init__(
        self,
        evaluator: Evaluator,
        registry: Registry,
        store: Store,
        spec: RunSpec,
        tasks: TaskSource | None,
        *,
        head: Callable[[], Head],
        put: Callable[[str, bytes], Awaitable[BlobRef]],
        log: StepLog,
        trackers: Trackers,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`head`: the run's head as of now. `put` stores an object, however long the store is away. `on_end` is called
        whenever an evaluation is over."""
        self._evaluator = evaluator
        self._registry = registry
        self._store = store
        self._spec = spec
        self._tasks = tasks
        self._head = head
        self._put = put
        self._log = log
        self._trackers = trackers
        self._ended = on_end
        self._schedule = Schedule(spec.evaluation.every, head().first)
        self._changed = asyncio.Event()
        self._restored = tasks is None
        self._last: Evaluation | None = None
        self.trouble = ""
        """Why the last evaluation has no result, for people."""

    @property
    def pins(self) -> list[AdapterRef]:
        """What replicas keep loaded for it."""
        return self._evaluator.pins

    @property
    def needed(self) -> list[AdapterRef]:
        """What must stay in the store for it: what is evaluated, and what waits for that."""
        both = (self._schedule.current, self._schedule.waiting)
        return [due.adapter for due in both if due is not None and due.adapter is not None]

    @property
    def idle(self) -> bool:
        """Whether nothing is evaluated, and nothing waits for it."""
        return self._restored and self._schedule.waiting is None and self._schedule.current is None

    def published(self, version: int, adapter: AdapterRef | None, step: int, *, last: bool = False) -> None:
        """A version was committed; `last`: the run's last one."""
        if self._tasks is None:
            return
        skipped = self._schedule.published(Due(version, adapter, step), last=last)
        if skipped is not None:
            log.warning("version %d is not evaluated: a newer one is due already", skipped.version)
        self._changed.set()

    async def _restore(self) -> None:
        """Take up what there is: results that count, and the newest version that is due and has none.

        A store that cannot be asked knows of nothing: the newest due version is evaluated, maybe again.
        """
        head = self._head()
        try:
            results = await results_of(self._registry, self._store, head)
        except FarflungError as error:
            log.warning("earlier evaluations of run %s cannot be read: %s", head.run, error)
            results = []
        self._log.begin()
        for result in results:
            self._log.append(result.flat())
            self._schedule.evaluated.add(result.version)
        self._last = results[-1] if results else None
        version = self._schedule.newest_due(head.head)
        if version is None:
            return
        if version in (0, head.head):
            self.published(version, head.adapter if version else None, head.step if version else 0)
            return
        try:
            record = await self._registry.version(head.run, version)
        except FarflungError as error:
            log.warning("version %d of run %s is not evaluated: %s", version, head.run, error)
            return
        if record is not None and counts(record, head):
            self.published(version, record.adapter, record.step)

    async def run(self) -> None:
        """Evaluate what is due until cancelled. What goes wrong costs the run nothing but the result."""
        if not self._restored:
            await self._restore()
            self._restored = True
            self._ended()
        while True:
            self._changed.clear()
            due = self._schedule.begin()
            if due is None:
                await self._changed.wait()
                continue
            evaluated = False
            try:
                evaluated = await self._evaluate(due)
            finally:
                self._schedule.end(evaluated=evaluated)
                self._ended()

    async def _evaluate(self, due: Due) -> bool:
        assert self._tasks is not None, "nothing is due without tasks"
        try:
            plan = Plan.of(
                self._head(), self._spec, self._spec.evaluation, self._tasks,
                version=due.version, adapter=due.adapter, step=due.step,
            )  # fmt: skip
            result = await self._evaluator.evaluate(plan)
            await self._put(
                names.evaluation_prefix(result.run, result.incarnation, result.version), msgspec.json.encode(result)
            )
        except FarflungError as error:
            self.trouble = f"version {due.version} is not evaluated: {error}"
            log.error("%s", self.trouble)
            return False
        except Exception as error:
            self.trouble = f"version {due.version} is not evaluated: {type(error).__name__}: {error}"
            log.exception("version %d is not evaluated", due.version)
            return False
        self.trouble, self._last = "", result
        log.info("version %d evaluated in %.1f s: %s", due.version, result.seconds, sentence(result.numbers()))
        self._log.append(result.flat())
        self._trackers.log(result.step, result.numbers(), kind="eval")
        return True

    def gauges(self) -> dict[str, float]:
        """The last result, and what is under way, as readings of the learner's."""
        last = self._last.numbers() if self._last is not None else {}
        return {**{f"eval_{name}": value for name, value in last.items()}, **self._evaluator.progress()}


async def results_of(registry: Registry, store: Store, head: Head) -> list[Evaluation]:
    """The results of a run's evaluations, by version; of several for one version the last.

    Those of versions that were lost, or of another version of the same number, are left out. Raises StoreError.
    """
    room = asyncio.Semaphore(READ_AT_ONCE)

    async def read(key: str) -> Evaluation | None:
        async with room:
            return await _read(store, key)

    async def is_of_this(result: Evaluation) -> bool:
        if result.version == 0:
            return True
        if result.version == head.head and head.adapter is not None:
            return result.adapter == head.adapter.name
        async with room:
            record = await registry.version(head.run, result.version)
        return record is None or record.adapter.name == result.adapter

    keys = [key for key in await _keys(store, head) if _version(key) <= head.head]
    results = sorted(_there(await asyncio.gather(*map(read, keys))), key=lambda result: result.time)
    counted = await asyncio.gather(*map(is_of_this, results))
    found = {result.version: result for result, counts_here in zip(results, counted, strict=True) if counts_here}
    return [found[version] for version in sorted(found)]


async def newest_result(store: Store, head: Head) -> Evaluation | None:
    """The result for the newest version that has one. Raises StoreError."""
    keys = sorted((key for key in await _keys(store, head) if _version(key) <= head.head), key=_version)
    return await _read(store, keys[-1]) if keys else None


def _there(results: Iterable[Evaluation | None]) -> list[Evaluation]:
    return [result for result in results if result is not None]


async def _keys(store: Store, head: Head) -> list[str]:
    listed = await store.list(f"{names.run_prefix(head.run, head.incarnation)}/evaluations/")
    return [key for key, _ in listed if key.rpartition("/")[2].partition(".")[0].isdecimal()]


def _version(key: str) -> int:
    return int(key.rpartition("/")[2].partition(".")[0])


async def _read(store: Store, key: str) -> Evaluation | None:
    """A result; None when it is lost or is none, which is said."""
    try:
        data = await store.read(key)
        if hashlib.sha256(data).hexdigest() != key.rpartition(".")[2]:
            raise ObjectCorrupt(f"{key}: its {len(data)} bytes do not have the sha256 in its name")
        return msgspec.json.decode(data, type=Evaluation)
    except (ObjectMissing, ObjectCorrupt, msgspec.DecodeError) as error:
        log.warning("the result of an evaluation is lost: %s", error)
        return None
