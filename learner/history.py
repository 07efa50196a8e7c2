"""What the store remembers of a run: a copy of its head record for every claim and every commit.

The broker's head record says what happened; these copies are there for the day the broker has lost it. Each is
immutable and its key tells, without reading it, its kind, epoch, step and incarnation.

Invariant: the copy of a commit lies in the store before the commit counts, so every commit has one. A copy without
its commit (the learner died in between) does no harm: it is a state that holds together, weights and ledger, and the
epoch tells it from what a later learner made of the same step. Epochs rise over a run's whole life, across restarts:
the newest incarnation is the one that holds the highest epoch, whatever any clock says. A deleted run leaves a mark
with its last epoch; nothing up to it comes back.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from broker import names
from broker.errors import MalformedMessage, ObjectCorrupt, ObjectMissing, StoreError
from broker.messages import Head, decode
from broker.store import Store

log = logging.getLogger(__name__)

Kind = Literal["claim", "commit", "deleted"]

READ_AT_ONCE = 16
"""Copies read at the same time; they are a few kilobytes each."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of the head record, as its key tells."""

    key: str
    kind: Kind
    epoch: int
    step: int
    incarnation: str

    @property
    def age(self) -> tuple[int, bool, int]:
        """What orders copies, oldest first: by epoch; an epoch's claim comes before its commits, those by step."""
        return self.epoch, self.kind == "commit", self.step


def prefix_of(kind: Kind, head: Head) -> str:
    """The key of a copy of `head`, without its sha256."""
    return f"{names.history_prefix(head.run)}/{kind}-{head.epoch:08d}-{head.step:08d}-{head.incarnation}"


def read_key(key: str) -> Copy | None:
    """The copy that lies under `key`, None when it is no such key."""
    kind, _, rest = key.rpartition("/")[2].partition(".")[0].partition("-")
    parts = rest.split("-", 2)
    if kind not in get_args(Kind) or len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return Copy(key, kind, int(parts[0]), int(parts[1]), parts[2])  # type: ignore[arg-type]


class History:
    """The copies of one run. Pure: made from keys."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        copies = sorted((copy for copy in map(read_key, keys) if copy is not None), key=lambda copy: copy.age)
        self.epoch = max((copy.epoch for copy in copies), default=0)
        """The highest epoch ever recorded, that of a deletion included; the next one must be higher."""
        deleted = max((copy.epoch for copy in copies if copy.kind == "deleted"), default=0)
        living = [copy for copy in copies if copy.epoch > deleted and copy.kind != "deleted"]
        self.deleted = deleted
        """The epoch up to which the run was deleted on purpose; 0 when it never was."""
        self.incarnation = living[-1].incarnation if living else ""
        """The newest incarnation; empty when there is none."""
        self.copies = [copy for copy in reversed(living) if copy.incarnation == self.incarnation]
        """The newest incarnation's claims and commits, newest first."""

    def ahead_of(self, head: Head) -> bool:
        """Whether commits were made after `head` that it does not know of: the broker's record is an old one.

        The copy of the very next step proves nothing: its learner may have died before the commit.
        """
        newest = self.copies[0] if self.copies else None
        if newest is None or newest.epoch < head.epoch:
            return False
        return newest.epoch > head.epoch or (newest.kind == "commit" and newest.step > head.step + 1)

    def states(self, incarnation: str) -> list[Copy]:
        """What an incarnation has been at: its commits, and the claim it began with, newest first."""
        return [
            copy
            for copy in self.copies
            if copy.incarnation == incarnation and (copy.kind == "commit" or copy.step == 0)
        ]


def ancestry(states: Iterable[Copy], epoch: int, step: int) -> list[Copy]:
    """Those of `states` that led to the one after `step` of `epoch`, newest first.

    A learner that went back, or that repeated a step, has left commits of older epochs behind that nothing builds on.
    """
    found: list[Copy] = []
    for copy in sorted(states, key=lambda copy: copy.age, reverse=True):
        below = found[-1].step if found else step + 1
        if copy.epoch <= epoch and copy.step < below:
            found.append(copy)
    return found


async def history_of(store: Store, run: str) -> History:
    """List what the store remembers of `run`. Raises StoreError."""
    return History(key for key, _ in await store.list(f"{names.history_prefix(run)}/"))


async def read_copy(store: Store, copy: Copy) -> Head:
    """The head record of a copy. Raises ObjectMissing, ObjectCorrupt or StoreError."""
    data = await store.read(copy.key)
    expected = copy.key.rpartition(".")[2]
    if hashlib.sha256(data).hexdigest() != expected:
        raise ObjectCorrupt(f"{copy.key}: its {len(data)} bytes do not have the sha256 in its name")
    try:
        return decode(data, Head)
    except MalformedMessage as error:
        raise ObjectCorrupt(f"{copy.key}: {error}") from error


async def newest_head(store: Store, run: str, history: History) -> Head | None:
    """The newest head record that can be read; None when the store remembers none.

    Raises StoreError, with the remedy, when there are copies and none can be read.
    """
    lost = ""
    for copy in history.copies:
        try:
            return await read_copy(store, copy)
        except (ObjectMissing, ObjectCorrupt) as error:
            lost = lost or str(error)
            log.error("run %s: a copy of its head record is lost: %s", run, error)
    if not history.copies:
        return None
    raise StoreError(
        f"run {run} cannot be resumed: the broker has no record of it, and none of the {len(history.copies)} copies in "
        f"the store can be read ({lost}). Restore one of the two, or begin anew with --restart"
    )


async def read_ancestry(store: Store, states: Iterable[Copy], epoch: int, step: int) -> list[Head]:
    """The head records of every state that led to `step` of `epoch`, oldest first; lost ones are left out."""
    room = asyncio.Semaphore(READ_AT_ONCE)

    async def read(copy: Copy) -> Head | None:
        async with room:
            try:
                return await read_copy(store, copy)
            except (ObjectMissing, ObjectCorrupt) as error:
                log.warning("a copy of a head record is lost: %s", error)
                return None

    found = await asyncio.gather(*(read(copy) for copy in ancestry(states, epoch, step)))
    return [head for head in reversed(found) if head is not None]
