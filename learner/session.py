"""The learner's hold on its run: the head record it alone may write, and everything it writes with it.

All writes of the head go through one place and one lock. A compare-and-set that fails means that another epoch has
begun: the session is then fenced, and nothing it does counts any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from broker import faults, names
from broker.clock import now
from broker.errors import Fenced, MalformedMessage, ObjectCorrupt, ObjectMissing, RegistryConflict, StoreError
from broker.messages import AdapterRef, BlobRef, Head, VersionRecord, decode
from broker.registry import Registry
from broker.store import Store
from learner.activation import live_versions
from learner.checkpoint import Checkpoint
from learner.claim import Claim, replace_head

log = logging.getLogger(__name__)

BROKER_PATIENCE = 3600.0
"""Seconds for which a write of the head waits for a broker that is away: the state of the run is safe meanwhile."""

STORE_PATIENCE = 300.0
"""Seconds for which a commit waits for a store that is away or full, before the learner gives up and says so."""


class Session:
    """One epoch of one run."""

    def __init__(self, registry: Registry, store: Store, claim: Claim) -> None:
        self._registry = registry
        self._store = store
        self._head = claim.head
        self._revision = claim.revision
        self._lock = asyncio.Lock()
        self.adapters: dict[int, AdapterRef] = {ref.version: ref for ref in claim.head.live}
        """Published versions by number, as far as anything still needs them."""
        self.trouble = ""
        """What keeps a commit from being made, for people."""

    @property
    def head(self) -> Head:
        return self._head

    @property
    def run(self) -> str:
        return self._head.run

    async def write(self, **changes: Any) -> Head:
        """Change fields of the head record; which versions are live follows from them.

        Raises Fenced when the run has moved on to another epoch.
        """
        async with self._lock:
            head = replace_head(self._head, **changes)
            head = replace_head(head, live=self._live(head.head, head.active))
            try:
                self._revision = await self._registry.set_head(head, self._revision, patience=BROKER_PATIENCE)
            except RegistryConflict as error:
                found = await self._registry.head(self.run)
                now = f"epoch {found[0].epoch}, held by {found[0].learner or 'nobody'}" if found else "deleted"
                raise Fenced(
                    f"run {self.run} has moved on without this learner (epoch {self._head.epoch}): it is now {now}. "
                    "Nothing of this learner's last step counts; its groups are with the other one"
                ) from error
            self._head = head
            return head

    async def fenced(self) -> str | None:
        """Why this epoch is over, None while it is not."""
        found = await self._registry.head(self.run)
        if found is None:
            return f"run {self.run} was deleted"
        if (found[0].incarnation, found[0].epoch) != (self._head.incarnation, self._head.epoch):
            return f"run {self.run} is now in epoch {found[0].epoch}, held by {found[0].learner or 'nobody'}"
        return None

    # ------------------------------------------------------------------------------------------------------ versions

    async def offer(self, version: int, step: int, weights: bytes, trace: Mapping[str, str]) -> AdapterRef:
        """Store the adapter of a version to come and show it to replicas, ahead of its commit."""
        prefix = names.adapter_prefix(self.run, self._head.incarnation, version)
        blob = await self._put(prefix, weights)
        faults.reached("learner.adapter_uploaded")
        ref = AdapterRef(
            version=version,
            name=names.adapter_name(self.run, version, blob.sha256),
            key=blob.key,
            size=blob.size,
            sha256=blob.sha256,
        )
        await self._put_version(self._record(ref, step, "offered", trace=dict(trace)))
        faults.reached("learner.adapter_offered")
        return ref

    async def _put_version(self, record: VersionRecord) -> None:
        try:
            await self._registry.put_version(record, patience=BROKER_PATIENCE)
        except RegistryConflict as error:
            why = await self.fenced() or f"run {self.run} has moved on without this learner: {error}"
            raise Fenced(f"{why}. Nothing that this learner had not committed counts") from error

    async def store_blob(self, step: int, part: str, data: bytes) -> BlobRef:
        """Store a part of a step's checkpoint."""
        prefix = names.checkpoint_prefix(self.run, self._head.incarnation, step)
        return await self._put(f"{prefix}/{part}", data)

    async def _put(self, prefix: str, data: bytes) -> BlobRef:
        """Store an object. A store that is away or full is waited for, and that is said; in the end StoreError."""
        deadline = now() + STORE_PATIENCE
        while True:
            try:
                ref = await self._store.put(prefix, data)
            except StoreError as error:
                if now() > deadline:
                    raise
                self.trouble = f"the commit waits for the store: {error}"
                log.warning("%s", self.trouble)
                await asyncio.sleep(2.0)
                continue
            self.trouble = ""
            return ref

    async def commit(
        self,
        checkpoint: Checkpoint,
        ref: BlobRef,
        adapter: AdapterRef | None,
        *,
        reward: float,
        summary: dict[str, float],
        trace: Mapping[str, str],
    ) -> None:
        """Make a step count: one compare-and-set. Raises Fenced."""
        if adapter is not None:
            self.adapters[adapter.version] = adapter
        faults.reached("learner.before_commit")
        await self.write(
            step=checkpoint.step,
            head=checkpoint.version,
            adapter=adapter or self._head.adapter,
            checkpoint=ref,
            summary=summary,
        )
        faults.reached("learner.after_commit")
        if adapter is not None:
            record = self._record(adapter, checkpoint.step, "committed", ref, reward, dict(trace))
            await self._put_version(record)

    async def complete_commit(self, checkpoint: Checkpoint, ref: BlobRef) -> None:
        """Let the record of a committed version say so, should its learner have died, or hung, before it could.

        From then on that learner can write it no more.
        """
        adapter = self._head.adapter
        if adapter is None or adapter.blob != checkpoint.weights:
            return  # the step published no version
        there = await self._registry.version(self.run, adapter.version)
        if there is not None and there.adapter == adapter and there.state != "offered":
            return
        trace = there.trace if there is not None and there.adapter == adapter else {}
        await self._put_version(
            self._record(adapter, checkpoint.step, "committed", ref, checkpoint.rewards[-1], dict(trace))
        )

    async def activate(self, version: int) -> None:
        """Make `version` the one the fleet serves. Raises Fenced."""
        faults.reached("learner.before_activation")
        await self.write(active=version, detail="")
        faults.reached("learner.after_activation")
        wanted = {ref.version for ref in self._head.live}
        for old in [number for number in self.adapters if number not in wanted and number < version]:
            del self.adapters[old]

    def _live(self, head: int, active: int) -> list[AdapterRef]:
        versions = live_versions(head=head, active=active, max_staleness=self._head.max_staleness, known=self.adapters)
        return [self.adapters[version] for version in versions]

    def _record(
        self,
        ref: AdapterRef,
        step: int,
        state: Literal["offered", "committed"],
        checkpoint: BlobRef | None = None,
        reward: float | None = None,
        trace: dict[str, str] | None = None,
    ) -> VersionRecord:
        return VersionRecord(
            run=self.run,
            incarnation=self._head.incarnation,
            epoch=self._head.epoch,
            adapter=ref,
            step=step,
            checkpoint=checkpoint,
            state=state,
            reward=reward,
            trace=trace or {},
        )

    # -------------------------------------------------------------------------------------------------------- resume

    async def newest_intact(self) -> tuple[Checkpoint, BlobRef, bytes, bytes] | None:
        """The newest commit whose every object is there: checkpoint, where it lies, weights, optimizer.

        None for a fresh run.

        Raises StoreError when there were commits and none is intact.
        """
        candidates = await self._candidates()
        lost = []
        for ref in candidates:
            try:
                checkpoint = decode(await self._store.get(ref), Checkpoint)
                weights = await self._store.get(checkpoint.weights)
                optimizer = await self._store.get(checkpoint.optimizer)
            except (ObjectMissing, ObjectCorrupt, MalformedMessage) as error:
                lost.append(str(error))
                continue
            if lost:
                log.error(
                    "run %s resumes from step %d, version %d: newer commits are lost (%s)",
                    self.run, checkpoint.step, checkpoint.version, "; ".join(lost),
                )  # fmt: skip
            return checkpoint, ref, weights, optimizer
        if candidates:
            raise StoreError(
                f"run {self.run} cannot resume: none of its {len(candidates)} commits is intact in the store "
                f"({lost[0]}). Restore the store, or begin anew with --restart"
            )
        return None

    async def _candidates(self) -> Sequence[BlobRef]:
        """Checkpoints from the newest to the oldest."""
        if self._head.checkpoint is None:
            return []
        records = [
            record
            for record in await self._registry.versions(self.run)
            if record.incarnation == self._head.incarnation and record.checkpoint is not None
        ]
        older = [record.checkpoint for record in reversed(records) if record.step < self._head.step]
        return [self._head.checkpoint, *(ref for ref in older if ref is not None)]

    async def go_back_to(self, checkpoint: Checkpoint, ref: BlobRef) -> None:
        """After newer commits were lost: the head is the older commit again. Raises Fenced."""
        known = {
            record.adapter.version: record.adapter
            for record in await self._registry.versions(self.run)
            if record.incarnation == self._head.incarnation and record.adapter.version <= checkpoint.version
        }
        self.adapters = known
        active = min(self._head.active, checkpoint.version)
        await self.write(
            step=checkpoint.step,
            head=checkpoint.version,
            active=active,
            adapter=known.get(checkpoint.version),
            checkpoint=ref,
        )
