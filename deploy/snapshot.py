"""What a fleet looks like right now, read from the registry: for the live view, for `farflung status`, for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from broker.messages import Head, Node
from observability.diagnosis import Readings, Verdict, diagnose

PAUSED = "paused"
"""How a learner's note begins while the run is paused."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One run, its learner if present, and the nodes of its fleet."""

    head: Head
    learner: Node | None
    nodes: tuple[Node, ...]

    def of_kind(self, kind: str) -> list[Node]:
        return [node for node in self.nodes if node.node == kind]

    def gauge(self, name: str, default: float = 0.0) -> float:
        """A reading of the learner's."""
        return self.learner.gauges.get(name, default) if self.learner else default

    @property
    def tokens_per_second(self) -> float:
        return sum(node.gauges.get("tokens_per_second", 0.0) for node in self.of_kind("replica"))

    @property
    def backpressure(self) -> float:
        return _mean([node.gauges.get("backpressure", 0.0) for node in self.of_kind("actor")])

    def lacks_active(self, node: Node) -> bool:
        """Whether `node` is a replica that does not serve the active version, so that no request for it goes there."""
        active = next((ref.name for ref in self.head.live if ref.version == self.head.active), None)
        return node.node == "replica" and active is not None and active not in node.confirmed

    def verdict(self) -> Verdict:
        """Which part holds the others back; nobody does while nothing is to be done."""
        if self.head.state != "running" or self.learner is None:
            return Verdict("unknown", f"the run is {self.head.state}" if self.learner else "no learner is present")
        if self.learner.detail.startswith(PAUSED):
            return Verdict("none", "the run is paused")
        actors, replicas = self.of_kind("actor"), self.of_kind("replica")
        capacity = sum(node.capacity for node in actors) or 1
        busy = _mean([node.gauges.get("busy", 0.0) for node in actors])
        running = sum(node.gauges.get("running", 0.0) for node in replicas)
        return diagnose(
            Readings(
                steps=int(self.gauge("step")),
                occupancy=self.gauge("occupancy"),
                rollout_wait=self.gauge("rollout_wait"),
                backpressure=self.backpressure,
                credit_spent=self.gauge("credit", 1.0) <= 0,
                slots_idle=1.0 - busy,
                outside_generation=_mean([node.gauges.get("outside_generation", 0.0) for node in actors]),
                inflight=sum(node.gauges.get("episodes", 0.0) for node in actors) / capacity,
                replica_load=running / capacity,
            )
        )

    def to_plain(self) -> dict[str, Any]:
        """As plain data for JSON."""
        verdict = self.verdict()
        head = {name: value for name, value in msgspec.to_builtins(self.head).items() if name not in ("spec", "kind")}
        return {
            "run": head,
            "learner": _node(self.learner) if self.learner else None,
            "nodes": [_node(node) for node in self.nodes],
            "left_behind": [node.id for node in self.nodes if self.lacks_active(node)],
            "tokens_per_second": self.tokens_per_second,
            "backpressure": self.backpressure,
            "bottleneck": verdict.bottleneck,
            "diagnosis": verdict.sentence,
        }


def snapshot_of(head: Head, present: Sequence[Node]) -> Snapshot:
    """Put a run's head and the nodes that are there together."""
    nodes = tuple(node for node in present if node.fleet == head.fleet and (not node.run or node.run == head.run))
    learner = next((node for node in nodes if node.node == "learner"), None)
    return Snapshot(head=head, learner=learner, nodes=nodes)


def _node(node: Node) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(node)
    plain.pop("kind", None)
    return plain


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
