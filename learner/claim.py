"""Taking hold of a run: a new one, the next epoch of an old one, or a clear refusal.

One learner owns a run. It begins by compare-and-set of `epoch + 1` on the head record; from then on every
compare-and-set of its predecessor fails.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.errors import RegistryConflict, RunConflict
from broker.messages import Head, Node
from broker.registry import Registry
from broker.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that is ours. `head` is what was written, `revision` what the next compare-and-set must name."""

    head: Head
    revision: int
    created: bool


def finished(head: Head, spec: RunSpec) -> bool:
    """Whether the run has nothing left to do under this configuration."""
    return head.state == "finished" and (head.step >= spec.run.steps or _target_unchanged(head, spec))


def _target_unchanged(head: Head, spec: RunSpec) -> bool:
    target = head.spec.get("run", {}).get("target_reward")
    return target is not None and target == spec.run.target_reward


async def claim(
    registry: Registry,
    spec: RunSpec,
    *,
    node: str,
    fingerprint: str,
    code: dict[str, str],
    nodes: Sequence[Node],
    restart: bool,
    take_over: bool,
) -> Claim:
    """Own the run of `spec`. `nodes` are those present now.

    Raises RunConflict when a learner holds the run and `take_over` is off, when the recorded run cannot go on under
    this configuration, or when somebody else claims it at the same moment.
    """
    found = await registry.head(spec.run.name)
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    if found is None:
        return await _written(registry, _new_head(spec, node, plain, code, fingerprint, epoch=1), 0, created=True)
    old, revision = found
    holder = next((other for other in nodes if other.id == old.learner and not _died_here(other)), None)
    if holder is not None and not take_over:
        raise RunConflict(
            f"run {spec.run.name} is held by the learner {holder.id} on {holder.host} (pid {holder.pid}); "
            "stop it, wait until it is gone, or displace it with --take-over"
        )
    if restart:
        head = _new_head(spec, node, plain, code, fingerprint, epoch=old.epoch + 1)
        return await _written(registry, head, revision, created=True)
    _check_same_run(old, plain, fingerprint)
    head = replace_head(
        old,
        epoch=old.epoch + 1,
        learner=node,
        state="running",
        detail="",
        spec=plain,
        code=code,
        max_staleness=spec.algorithm.max_staleness,
    )
    return await _written(registry, head, revision, created=False)


async def _written(registry: Registry, head: Head, revision: int, *, created: bool) -> Claim:
    try:
        return Claim(head, await registry.set_head(head, revision), created=created)
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


def _check_same_run(old: Head, plain: dict[str, Any], fingerprint: str) -> None:
    """Refuse to go on with other weights: base model and adapter shape are fixed for an incarnation's life."""
    if old.model != fingerprint:
        raise RunConflict(
            f"run {old.run} was created on the base model {old.model}, this machine's copy is {fingerprint}; use the "
            "same files, choose another run.name, or begin anew with --restart"
        )
    for section, key in (("lora", "rank"), ("lora", "alpha"), ("lora", "targets")):
        was, now = old.spec.get(section, {}).get(key), plain[section][key]
        if was != now:
            raise RunConflict(
                f"run {old.run} was created with {section}.{key} = {was!r}, the configuration now says {now!r}; "
                "restore it, choose another run.name, or begin anew with --restart"
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
