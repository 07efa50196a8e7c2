"""Which part holds the others back, from a few readings. Pure: readings in, verdict out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bottleneck = Literal["learner", "generation", "window", "inflight cap", "environment", "none", "unknown"]

HIGH = 0.5
LOW = 0.2


@dataclass(frozen=True, slots=True)
class Readings:
    """What the components report, each over the same recent stretch of time.

    Shares are 0..1. `occupancy`: finished, untrained groups over the window. `rollout_wait`: of the learner's time,
    spent waiting for groups. `backpressure`: of the actors' slot time, idle while credit was spent and a step's
    groups were buffered. `slots_idle`: of the actors' slot time, without a task. `outside_generation`: of the episodes'
    time, spent in environments and rewards. `inflight`: episodes running over the actors' caps. `replica_load`:
    requests in the replicas' batches over their capacity.
    """

    steps: int
    occupancy: float
    rollout_wait: float
    backpressure: float
    credit_spent: bool
    slots_idle: float
    outside_generation: float
    inflight: float
    replica_load: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bottleneck, and the sentence a person reads."""

    bottleneck: Bottleneck
    sentence: str


def diagnose(readings: Readings) -> Verdict:
    """Name the bottleneck."""
    if readings.steps < 2:
        return Verdict("unknown", "too early to tell: fewer than two steps done")
    if readings.rollout_wait < LOW:
        if readings.backpressure > LOW or readings.occupancy > HIGH or readings.slots_idle > HIGH:
            return Verdict("learner", "the learner is the bottleneck: groups wait for it, and actors idle")
        return Verdict("none", "balanced: the learner seldom waits, and actors seldom idle")
    if readings.outside_generation > HIGH:
        return Verdict(
            "environment",
            "the environment or the reward is the bottleneck: episodes spend most time outside generation",
        )
    if readings.credit_spent and readings.slots_idle > HIGH:
        return Verdict("window", "the credit window is the cap: raise max_staleness or groups_per_step")
    if readings.inflight > 0.9 and readings.replica_load < HIGH:
        return Verdict("inflight cap", "max_inflight is the cap: replicas have room; raise it or start more actors")
    return Verdict("generation", "generation is the bottleneck: add replicas, or shorten replies")
