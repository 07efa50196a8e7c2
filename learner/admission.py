"""What is refused before a run is claimed. Pure: records in, an error out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from broker.errors import ConfigError, RunConflict
from broker.messages import Head, Node
from broker.runspec import RunSpec


def check_ranks(spec: RunSpec, replicas: Iterable[Node]) -> None:
    """Refuse a fleet whose engines were started for smaller adapters than this run's. Raises ConfigError."""
    for node in replicas:
        if node.max_rank and node.max_rank < spec.lora.rank:
            raise ConfigError(
                f"fleet {spec.fleet_name}: replica {node.id} takes adapters up to rank {node.max_rank}, lora.rank is "
                f"{spec.lora.rank}. Start replicas with --max-lora-rank {spec.lora.rank}, or lower lora.rank"
            )


def check_slots(spec: RunSpec, heads: Iterable[Head], replicas: Iterable[Node]) -> None:
    """Refuse a fleet whose replicas cannot hold this run's adapters beside those of the runs already there.

    Raises ConfigError with the sum spelled out.
    """
    needs = {spec.run.name: spec.adapter_slots}
    for head in heads:
        if head.fleet == spec.fleet_name and head.run != spec.run.name and head.state == "running":
            needs[head.run] = head.adapter_slots
    total = sum(needs.values())
    parts = " + ".join(f"{number} ({run})" for run, number in needs.items())
    for node in replicas:
        if node.slots < total:
            raise ConfigError(
                f"fleet {spec.fleet_name}: replica {node.id} holds {node.slots} adapters, but {parts} = {total} are "
                f"needed (max_staleness + 2 + eval_slots per run). Start replicas with --adapter-slots {total}, or "
                "lower algorithm.max_staleness or fleet.eval_slots"
            )


def check_same_policy(old: Head, plain: dict[str, Any], fingerprint: str, *, remedy: str) -> None:
    """Refuse other weights than those of `old`: base model and adapter shape are fixed for an incarnation's life."""
    if old.model != fingerprint:
        raise RunConflict(
            f"run {old.run} was created on the base model {old.model}, this machine's copy is {fingerprint}; use the "
            f"same files, {remedy}"
        )
    for section, key in (("lora", "rank"), ("lora", "alpha"), ("lora", "targets")):
        was, now = old.spec.get(section, {}).get(key), plain[section][key]
        if was != now:
            raise RunConflict(
                f"run {old.run} was created with {section}.{key} = {was!r}, the configuration now says {now!r}; "
                f"restore it, {remedy}"
            )
