"""The learner's hold on its run: the head record it alone may write, and everything it writes with it.

All writes of the head go through one place and one lock. A compare-and-set that fails means that another epoch has
begun: the session is then fenced, and nothing it does counts any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from broker import faults, names
from broker.clock import now
from broker.errors import (
    BrokerLost,
    Fenced,
    RegistryConflict,
    StoreError,
)
from broker.messages import AdapterRef, BlobRef, Head, VersionRecord
from broker.registry import Registry
from broker.store import Store
from learner.activation import live_versions
from learner.checkpoint import Checkpoint
from learner.claim import Claim, replace_head
from learner.history import Kind, history_of, prefix_of, read_ancestry
from learner.recovery import Intact, counts, newest_intact

log = logging.getLogger(__name__)

BROKER_PATIENCE = 3600.0
"""Seconds for which a write of the head waits for a broker that is away: the state of the run is safe meanwhile."""

STORE_PATIENCE = 300.0
"""Seconds for which a commit waits for a store that is away or full, before the learner gives up and says so."""

REBUILT = (
    "the broker had lost this run; its record was made again from the store, and groups that were in flight are issued "
    "again"
)


class Session:
    """One epoch of one run."""

    def __init__(self, registry: Registry, store: Store, claim: Claim) -> None:
        self._registry = registry
        self._store = store
        self._head = claim.head
        self._revision = claim.revision
        self._rebuilt = claim.rebuilt
        self._claimed: Head | None = None
        """The head as claimed, while the store has no copy of it."""
        self._lock = asyncio.Lock()
        self._unsure: Head | None = None
        """What was being written when the writer was cancelled: the broker may have it, or not."""
        self.adapters: dict[int, AdapterRef] = {ref.version: ref for ref in claim.head.live}
        """Published versions by number, as far as anything still needs them."""
        self._offered: dict[int, int] = {}
        """The revisions of the version records that are to be written again when their versions are committed."""
        self.trouble = ""
        """What keeps a commit from being made, for people."""
        self.notice = REBUILT if claim.rebuilt else ""
        """What was lost, and where the run goes on; for people, until the first commit."""

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
            head = self._changed(**changes)
            unsure, self._unsure = self._unsure, head
            try:
                self._revision = await self._registry.set_head(head, self._revision, patience=BROKER_PATIENCE)
            except RegistryConflict as error:
                found = await self._registry.head(self.run)
                if found is not None and found[0] == unsure:
                    # A write whose caller was cancelled was made after all: go on from there.
                    self._head = unsure
                    head = self._changed(**changes)
                    self._revision = await self._registry.set_head(head, found[1], patience=BROKER_PATIENCE)
                    self._head, self._unsure = head, None
                    return head
                why = await self.fenced() or f"the record of run {self.run} was written by somebody else"
                raise Fenced(
                    f"{why}; this learner's epoch, {self._head.epoch}, is over. Nothing of its last step counts; its "
                    "groups are with the other one"
                ) from error
            self._head, self._unsure = head, None
            return head

    def _changed(self, **changes: Any) -> Head:
        head = replace_head(self._head, **changes)
        return replace_head(head, live=self._live(head.head, head.active))

    async def fenced(self) -> str | None:
        """Why this epoch is over, None while it is not.

        Raises BrokerLost when the record is gone although nobody deleted the run.
        """
        found = await self._registry.head(self.run)
        if found is None:
            if await self._deleted():
                return f"run {self.run} was deleted"
            raise BrokerLost(
                f"the broker has lost the record of run {self.run}. Start the learner again: it goes on from the last "
                "commit, which is in the store"
            )
        head, ours = found[0], self._head
        same_learner = head.learner in ("", ours.learner)  # nobody: we are just leaving
        if (head.incarnation, head.epoch) != (ours.incarnation, ours.epoch) or not same_learner:
            return f"run {self.run} is now in epoch {head.epoch}, held by {head.learner or 'nobody'}"
        return None

    async def require(self) -> None:
        """Go on only if this epoch does. Raises Fenced when another has begun, BrokerLost, ConnectionFailed."""
        if why := await self.fenced():
            raise Fenced(f"{why}. Nothing that this learner had not committed counts")

    async def _deleted(self) -> bool:
        """Whether somebody deleted the run; a store that cannot be asked knows of nothing."""
        try:
            return (await history_of(self._store, self.run)).deleted >= self._head.epoch
        except StoreError as error:
            log.warning("whether run %s was deleted cannot be read: %s", self.run, error)
            return False

    async def remember_claim(self) -> None:
        """Leave a copy of the head record as claimed: from now on the store knows of this epoch.

        A store that is away or full keeps no run from beginning; the copy is made with the first commit then.
        """
        try:
            await self._store.put(prefix_of("claim", self._head), self._head.encode())
        except StoreError as error:
            log.warning("the store does not know yet that run %s was claimed: %s", self.run, error)
            self._claimed = self._head

    async def _remember(self, kind: Kind, head: Head) -> None:
        await self.put(prefix_of(kind, head), head.encode())

    # ------------------------------------------------------------------------------------------------------ versions

    async def offer(self, version: int, step: int, weights: bytes, trace: Mapping[str, str]) -> AdapterRef:
        """Store the adapter of a version to come and show it to replicas, ahead of its commit."""
        prefix = names.adapter_prefix(self.run, self._head.incarnation, version)
        blob = await self.put(prefix, weights)
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
        version = record.adapter.version
        known = self._offered.pop(version, 0)
        try:
            revision = await self._registry.put_version(record, known, patience=BROKER_PATIENCE)
        except RegistryConflict as error:
            why = await self.fenced() or f"run {self.run} has moved on without this learner: {error}"
            raise Fenced(f"{why}. Nothing that this learner had not committed counts") from error
        if record.state == "offered":
            self._offered[version] = revision

    async def store_blob(self, step: int, part: str, data: bytes) -> BlobRef:
        """Store a part of a step's checkpoint."""
        prefix = names.checkpoint_prefix(self.run, self._head.incarnation, step)
        return await self.put(f"{prefix}/{part}", data)

    async def put(self, prefix: str, data: bytes) -> BlobRef:
        """Store an object under `{prefix}.{sha256}`.

        A store that is away or full is waited for, and that is said; in the end StoreError.
        """
        deadline = now() + STORE_PATIENCE
        while True:
            try:
                ref = await self._store.put(prefix, data)
            except StoreError as error:
                if now() > deadline:
                    raise
                self.trouble = f"the run waits for the store: {error}"
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
        """Make a step count: a copy of the head to be into the store, then one compare-and-set. Raises Fenced."""
        if adapter is not None:
            self.adapters[adapter.version] = adapter
        changes: dict[str, Any] = {
            "step": checkpoint.step,
            "head": checkpoint.version,
            "adapter": adapter or self._head.adapter,
            "checkpoint": ref,
            "summary": summary,
        }
        if self._claimed is not None:
            await self._remember("claim", self._claimed)
            self._claimed = None
        await self._remember("commit", self._changed(**changes))
        faults.reached("learner.before_commit")
        await self.write(**changes)
        self.notice = ""
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
            self._record(
                adapter, checkpoint.step, "committed", ref, next(reversed(checkpoint.rewards), None), dict(trace)
            )
        )

    async def activate(self, version: int) -> None:
        """Make `version` the one the fleet serves. Raises Fenced."""
        faults.reached("learner.before_activation")
        for skipped in range(self._head.active + 1, version):
            self.adapters.pop(skipped, None)  # superseded before it was active: nothing was sampled under it
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

    async def newest_intact(self) -> Intact | None:
        """The newest commit whose every object is there. None for a run that has none yet.

        Raises StoreError when there were commits and none is intact.
        """
        return await newest_intact(self._registry, self._store, self._head)

    async def resume_from(self, intact: Intact) -> None:
        """Bring the records to `intact`, which need not be what they say now, and tell a person what was lost.

        The head is that commit's; of its live versions those remain whose adapter is there. The version records are
        completed: a learner may have died between its last commit and the record of the version it published, and a
        broker that was lost has none. Raises Fenced.
        """
        before, found = self._head, intact.head
        self.adapters = {
            ref.version: ref
            for ref in found.live
            if ref.version <= found.head and (ref == found.adapter or await self._store.exists(ref.blob))
        }
        active = min(before.active, found.head)
        if active and active not in self.adapters:
            active = found.head
        if (active, intact.lost) != (before.active, ()) or self.adapters.keys() != {ref.version for ref in before.live}:
            await self.write(
                step=found.step,
                head=found.head,
                active=active,
                adapter=found.adapter,
                checkpoint=found.checkpoint,
                summary=found.summary,
            )
        await self._mend_versions(intact)
        self._tell(before, intact)

    async def _mend_versions(self, intact: Intact) -> None:
        """Records of lost versions say so; those of the versions up to the head say that they are committed."""
        records = {record.adapter.version: record for record in await self._registry.versions(self.run)}
        for version, record in records.items():
            if version > self._head.head and counts(record, self._head):
                detail = f"lost from the store; the run went back to version {self._head.head}"
                await self._put_version(
                    msgspec.structs.replace(
                        record, epoch=self._head.epoch, state="failed", checkpoint=None, detail=detail
                    )
                )
        if self._rebuilt:
            await self._list_versions(intact)
        if self._head.checkpoint is not None:
            await self.complete_commit(intact.checkpoint, self._head.checkpoint)

    async def _list_versions(self, intact: Intact) -> None:
        """A broker that was lost has no version records: make them again from the store's copies of the head."""
        history = await history_of(self._store, self.run)
        copies = history.states(self._head.incarnation)
        published: dict[int, Head] = {}
        for state in await read_ancestry(self._store, copies, intact.head.epoch, intact.head.step):
            published.setdefault(state.head, state)
        for state in published.values():
            if state.adapter is not None:
                reward = state.summary.get("reward")
                await self._put_version(self._record(state.adapter, state.step, "committed", state.checkpoint, reward))

    def _tell(self, before: Head, intact: Intact) -> None:
        """Say what was lost, on screen and in the log."""
        parts = [self.notice] if self.notice else []
        if intact.lost:
            steps = before.step - intact.head.step
            parts.append(f"the newest {steps} step(s) are lost from the store ({intact.lost[0]})")
        if parts:
            self.notice = "; ".join([*parts, f"it goes on from step {self._head.step}, version {self._head.head}"])
            log.warning("run %s: %s", self.run, self.notice)
