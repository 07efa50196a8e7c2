"""Taking hold of a run: a new one, the next epoch of an old one, or a clear refusal.

One learner owns a run. It begins by compare-and-set of `epoch + 1` on the head record; from then on every
compare-and-set of its predecessor fails. Where the broker has lost the record, or fallen behind, the store's newest
copy takes its place: the run goes on, it does not begin anew under the same name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.errors import RegistryConflict, RunConflict
from broker.messages import Head, Node
from broker.registry import PRESENCE_SECONDS, Registry
from broker.runspec import RunSpec
from broker.store import Store
from learner.admission import check_same_policy
from learner.branch import Branch
from learner.history import history_of, newest_head

log = logging.getLogger(__name__)

UNHEARD_CLAIMS = 1000
"""Epochs that are left out when the broker's record is lost. Claims of which a full store could not be told are unknown
then, and an epoch must not come twice.
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that is ours. `head` is what was written, `revision` what the next compare-and-set must name."""

    head: Head
    revision: int
    created: bool
    rebuilt: bool = False
    """The broker had lost the record: it was made again from the store's newest copy."""


def finished(head: Head, spec: RunSpec) -> bool:
    """Whether the run has nothing left to do under this configuration."""
    return head.state == "finished" and (head.step >= spec.run.steps or _target_unchanged(head, spec))


def _target_unchanged(head: Head, spec: RunSpec) -> bool:
    target = head.spec.get("run", {}).get("target_reward")
    return target is not None and target == spec.run.target_reward


async def claim(
    registry: Registry,
    store: Store,
    spec: RunSpec,
    *,
    node: str,
    fingerprint: str,
    code: dict[str, str],
    nodes: Callable[[], Sequence[Node]],
    restart: bool,
    take_over: bool,
    branch: Branch | None = None,
    presence: float = PRESENCE_SECONDS,
) -> Claim:
    """Own the run of `spec`. `nodes` tells who is present; everybody who is says so again within `presence` seconds.

    Raises RunConflict when a learner holds the run and `take_over` is off, when the recorded run cannot go on under
    this configuration, when it exists and was to be branched anew, or when somebody else claims it at the same
    moment; StoreError when the broker has lost the record and the store cannot make up for it.
    """
    run = spec.run.name
    found = await registry.head(run)
    history = await history_of(store, run)
    old, revision = found or (None, 0)
    epoch = max(history.epoch, old.epoch if old else 0) + 1
    if history.copies and (old is None or history.ahead_of(old)):
        epoch += UNHEARD_CLAIMS
    if old is not None and old.epoch <= history.deleted:
        log.warning("run %s was being deleted when that was cut short; it begins anew", run)
        old = None
    rebuilt = False
    if (old is None or history.ahead_of(old)) and not restart:
        remembered = await newest_head(store, run, history)
        rebuilt = remembered is not None
        old = remembered or old
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    if old is not None:
        holder = _holder(old, nodes())
        if holder is None and rebuilt and old.learner:
            # Presence was lost with the record; a learner that is still there is about to say so again.
            await asyncio.sleep(presence)
            holder = _holder(old, nodes())
        if holder is not None and not take_over:
            raise RunConflict(
                f"run {run} is held by the learner {holder.id} on {holder.host} (pid {holder.pid}); "
                "stop it, wait until it is gone, or displace it with --take-over"
            )
    if old is None or restart:
        head = _new_head(spec, node, plain, code, fingerprint, epoch=epoch)
        if branch is not None:
            head = await branch.begin(store, head)
        return await _written(registry, head, revision, created=True)
    if branch is not None:
        raise RunConflict(
            f"run {run} exists already (at step {old.step}) and cannot begin with something else: leave out --from and "
            "--adapter to go on with it, choose another run.name, or begin it anew with --restart"
        )
    check_same_policy(old, plain, fingerprint, remedy="choose another run.name, or begin anew with --restart")
    was, temperature = old.spec.get("sampling", {}).get("temperature"), spec.sampling.temperature
    if was is not None and was != temperature:
        raise RunConflict(
            f"run {run} samples with sampling.temperature = {was!r}, and groups of it may be under way; the "
            f"configuration now says {temperature!r}: restore it, or begin another run with --from {run}"
        )
    head = replace_head(
        old,
        fleet=spec.fleet_name,
        epoch=epoch,
        learner=node,
        state="running",
        detail="",
        spec=plain,
        code=code,
        max_staleness=spec.algorithm.max_staleness,
    )
    return await _written(registry, head, revision, created=False, rebuilt=rebuilt)


def _holder(head: Head, nodes: Sequence[Node]) -> Node | None:
    return next((other for other in nodes if other.id == head.learner and not _died_here(other)), None)


async def _written(registry: Registry, head: Head, revision: int, *, created: bool, rebuilt: bool = False) -> Claim:
    try:
        return Claim(head, await registry.set_head(head, revision), created, rebuilt)
    except RegistryConflict as error:
        raise RunConflict(
            f"another learner claimed run {head.run} at the same moment; it goes on there, and this one is not needed"
        ) from error


def replace_head(head: Head, /, **changes: Any) -> Head:
    """`head` with some fields changed."""
    return msgspec.structs.replace(head, **changes)


def _new_head(
    spec: RunSpec, node: str, plain: dict[str, Any], code: dict[str, str], fingerprint: str, *, epoch: int
) -> Head:
    return Head(
        run=spec.run.name,
        fleet=spec.fleet_name,
        incarnation=secrets.token_hex(4),
        epoch=epoch,
        learner=node,
        step=0,
        head=0,
        active=0,
        max_staleness=spec.algorithm.max_staleness,
        state="running",
        spec=plain,
        code=code,
        model=fingerprint,
    )


def _died_here(node: Node) -> bool:
    """Whether a node's record outlived its process: it was on this machine, and its pid is gone."""
    if node.host != socket.gethostname():
        return False
    try:
        os.kill(node.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
