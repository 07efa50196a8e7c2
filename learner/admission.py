"""What is refused before a run is claimed. Pure: records in, an error out."""

from __future__ import annotations

from collections.abc import Iterable

from broker.errors import ConfigError
from broker.messages import Head, Node
from broker.runspec import RunSpec


def check_slots(spec: RunSpec, heads: Iterable[Head], replicas: Iterable[Node]) -> None:
    """Refuse a fleet whose replicas cannot hold this run's adapters beside those of the runs already there.

    Raises ConfigError with the sum spelled out.
    """
    needs = {spec.run.name: spec.adapter_slots}
    for head in heads:
        if head.fleet == spec.fleet_name and head.run != spec.run.name and head.state == "running":
            evaluation = int(head.spec.get("fleet", {}).get("eval_slots", 0))
            needs[head.run] = head.max_staleness + 2 + evaluation
    total = sum(needs.values())
    parts = " + ".join(f"{number} ({run})" for run, number in needs.items())
    for node in replicas:
        if node.slots < total:
            raise ConfigError(
                f"fleet {spec.fleet_name}: replica {node.id} holds {node.slots} adapters, but {parts} = {total} are "
                f"needed (max_staleness + 2 + eval_slots per run). Start replicas with --adapter-slots {total}, or "
                "lower algorithm.max_staleness"
            )
