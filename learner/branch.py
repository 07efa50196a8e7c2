"""Branching: a new run that begins with a committed version of another run.

The new run begins with head 1: the origin's adapter under a key and a name of its own, so that nothing of it depends
on the origin's objects or on whether the origin goes on, is begun anew or is deleted. An adapter from elsewhere
(`learner.imported`) takes an origin's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from broker import names
from broker.errors import ConfigError, MalformedMessage, ObjectCorrupt, ObjectMissing, RunConflict
from broker.messages import AdapterRef, BlobRef, Head, decode
from broker.registry import Registry
from broker.runspec import RunSpec
from broker.store import Store
from learner.admission import check_same_policy
from learner.checkpoint import Checkpoint
from learner.history import history_of, newest_head, read_ancestry
from learner.ledger import Ledger
from learner.recovery import counts

FIRST = 1
"""The version a branched run begins with; version 0 is the base model for every run."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What `--from` names: a run, and one of its versions or (None) the newest."""

    run: str
    version: int | None

    @classmethod
    def parse(cls, text: str, option: str = "--from") -> Origin:
        """Read `RUN`, `RUN@latest` or `RUN@VERSION`, which stands for `option`. Raises ConfigError."""
        run, _, version = text.partition("@")
        if not run or (version not in ("", "latest") and not version.isdecimal()):
            raise ConfigError(f"{option} {text}: expected RUN, RUN@latest or RUN@VERSION, such as addition@12")
        return cls(run, int(version) if version.isdecimal() else None)


@dataclass(frozen=True, slots=True)
class Branch:
    """A version of another run, fetched and verified. `optimizer` None: the new run begins with a fresh one."""

    origin: str
    weights: bytes
    optimizer: bytes | None

    async def begin(self, store: Store, head: Head) -> Head:
        """Store version 1 and the state after step 0 of the new run `head`; returns its head with both named.

        Raises StoreError.
        """
        checkpoints = names.checkpoint_prefix(head.run, head.incarnation, 0)
        weights = await store.put(names.adapter_prefix(head.run, head.incarnation, FIRST), self.weights)
        optimizer = None
        if self.optimizer is not None:
            optimizer = await store.put(f"{checkpoints}/optimizer", self.optimizer)
        state = Checkpoint(
            run=head.run,
            incarnation=head.incarnation,
            step=0,
            version=FIRST,
            weights=weights,
            optimizer=optimizer,
            ledger=Ledger().to_state(),
            rewards=[],
            trained=[],
            seconds=0.0,
        )
        name = names.adapter_name(head.run, FIRST, weights.sha256)
        adapter = AdapterRef(FIRST, name, weights.key, weights.size, weights.sha256)
        return msgspec.structs.replace(
            head,
            head=FIRST,
            first=FIRST,
            origin=self.origin,
            adapter=adapter,
            live=[adapter],
            checkpoint=await store.put(f"{checkpoints}/state", state.encode()),
        )


async def fetch_branch(
    registry: Registry, store: Store, origin: Origin, spec: RunSpec, *, fingerprint: str, fresh_optimizer: bool
) -> Branch:
    """Fetch what the new run of `spec` begins with.

    Raises RunConflict when there is no such run or version, or when it does not fit `spec`; the message names the
    versions there are, or the setting that differs. Raises StoreError when the store cannot be read.
    """
    if origin.run == spec.run.name:
        raise RunConflict(
            f"run {spec.run.name} cannot be branched from itself: choose another run.name, or leave out --from to go "
            "on with it"
        )
    head, published = await _published(registry, store, origin.run)
    stored = {key for key, _ in await store.list(f"{names.run_prefix(head.run, head.incarnation)}/adapters/")}
    stored |= {key for key, _ in await store.list(f"{names.run_prefix(head.run, head.incarnation)}/checkpoints/")}
    there = {version: where for version, where in published.items() if {where[0].key, where[1].key} <= stored}
    version = origin.version if origin.version is not None else max(there, default=None)
    if version is None or version not in there:
        wanted = f"no version {version}" if version is not None else "no version yet"
        why = " (version 0 is the base model: leave out --from)" if version == 0 else ""
        raise RunConflict(
            f"run {origin.run} has {wanted} to branch from{why}; versions there are: {_ranges(there) or 'none'}"
        )
    check_same_policy(
        head, msgspec.to_builtins(spec), fingerprint, remedy="since a branch keeps its origin's base model and adapter"
    )
    try:
        adapter, where = there[version]
        weights = await store.get(adapter.blob)
        state = decode(await store.get(where), Checkpoint)
        optimizer = await store.get(state.optimizer) if state.optimizer and not fresh_optimizer else None
    except (ObjectMissing, ObjectCorrupt, MalformedMessage) as error:
        others = _ranges(there.keys() - {version}) or "none"
        raise RunConflict(
            f"version {version} of run {origin.run} is lost ({error}); other versions: {others}"
        ) from error
    return Branch(f"{origin.run}@{version}", weights, optimizer)


async def _published(
    registry: Registry, store: Store, run: str
) -> tuple[Head, Mapping[int, tuple[AdapterRef, BlobRef]]]:
    """A run's head, and where each committed version's adapter and state lie. From the store if the broker lost it."""
    found = await registry.head(run)
    if found is not None:
        head = found[0]
        versions = {
            record.adapter.version: (record.adapter, record.checkpoint)
            for record in await registry.versions(run)
            if counts(record, head) and record.checkpoint and record.adapter.version <= head.head
        }
        # The newest version's record is written after the head: its learner may have died in between.
        if head.adapter and head.checkpoint:
            versions.setdefault(head.head, (head.adapter, head.checkpoint))
        return head, versions
    history = await history_of(store, run)
    newest = await newest_head(store, run, history)
    if newest is None:
        there = ", ".join(other.run for other in await registry.heads()) or "none"
        raise RunConflict(f"there is no run {run} to branch from; runs there are: {there}")
    states = await read_ancestry(store, history.states(history.incarnation), newest.epoch, newest.step)
    versions = {}
    for head in states:
        if head.adapter and head.checkpoint:
            versions.setdefault(head.head, (head.adapter, head.checkpoint))
    return newest, versions


def _ranges(numbers: Iterable[int]) -> str:
    """`1 to 3, 7` for 1, 2, 3 and 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)
