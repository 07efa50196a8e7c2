"""What happens in one simulation: the shape of the run and the faults, both from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from broker import faults
from broker.bus import HOLD_WAIT

FAULT_SECONDS = 40.0
"""Faults begin within this long from the start."""

KINDS = (
    ("kill", 6),
    ("kill at a call", 6),
    ("kill at a point", 10),
    ("pause", 4),
    ("pause at a point", 4),
    ("take over", 3),
    ("broker restarts", 3),
    ("broker is wiped", 2),
    ("network is flaky", 4),
    ("store is away", 2),
    ("store is full", 2),
    ("store forgets", 2),
    ("loads fail", 2),
    ("loads are slow", 2),
    ("environment hangs", 2),
    ("actor joins", 2),
    ("actor leaves", 2),
)
"""Every kind of fault with its weight."""


@dataclass(frozen=True)
class Shape:
    """The run."""

    steps: int
    groups_per_step: int
    max_staleness: int
    publish_every: int
    actors: int
    routers: int
    min_replicas: int

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.groups_per_step} groups, max_staleness {self.max_staleness}, "
            f"publish_every {self.publish_every}, {self.actors} actors, {self.routers} routers, "
            f"min_replicas {self.min_replicas}"
        )


@dataclass(frozen=True)
class Fault:
    """One fault. `target` is a component's name, where the kind has one."""

    kind: str
    at: float
    target: str = ""
    seconds: float = 0.0
    count: int = 0
    point: str = ""

    def __str__(self) -> str:
        parts = [f"{self.at:6.2f} s  {self.kind}"]
        parts += [self.target] if self.target else []
        parts += [self.point] if self.point else []
        parts += [f"number {self.count}"] if self.count else []
        parts += [f"for {self.seconds:.2f} s"] if self.seconds else []
        return " ".join(parts)


@dataclass(frozen=True)
class Schedule:
    """One simulation, whole."""

    seed: int
    shape: Shape
    faults: tuple[Fault, ...]

    def without(self, index: int) -> Schedule:
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.shape}"]
        return "\n".join([*lines, *(f"  fault: {fault}" for fault in self.faults)])


def schedule_of(seed: int) -> Schedule:
    """The schedule of a seed. About one in eight has no fault at all."""
    random = Random(seed)
    shape = Shape(
        steps=random.choice((2, 3, 3, 4)),
        groups_per_step=random.choice((1, 1, 2, 2, 3)),
        max_staleness=random.choice((0, 1, 1, 2)),
        publish_every=random.choice((1, 1, 1, 2)),
        actors=random.choice((1, 1, 2, 2, 3)),
        routers=random.choice((1, 1, 1, 2)),
        min_replicas=random.choice((1, 1, 1, 2)),
    )
    if shape.min_replicas > shape.actors:
        shape = replace(shape, min_replicas=1)
    count = random.choice((0, 1, 1, 2, 2, 3, 4, 6))
    return Schedule(seed, shape, tuple(sorted((_fault(random, shape) for _ in range(count)), key=lambda one: one.at)))


def _pause(random: Random) -> float:
    """Seconds that a process stands still: now and then for longer than its longest lease lasts."""
    return random.uniform(HOLD_WAIT, 2 * HOLD_WAIT) if random.random() < 0.05 else random.uniform(0.5, 60.0)


def _fault(random: Random, shape: Shape) -> Fault:
    kinds, weights = zip(*KINDS, strict=True)
    kind = random.choices(kinds, weights)[0]
    # Most of what a short run does, it does in its first seconds.
    at = random.uniform(0.0, random.choice((1.5, 4.0, FAULT_SECONDS)))
    actors = [f"actor-{number}" for number in range(shape.actors)]
    anyone = random.choice(["learner", "learner", *actors, *(f"router-{number}" for number in range(shape.routers))])
    if kind == "kill":
        return Fault(kind, at, target=anyone)
    if kind == "pause":
        return Fault(kind, at, target=anyone, seconds=_pause(random))
    if kind == "kill at a call":
        return Fault(kind, at, target=anyone, count=random.randint(1, 200))
    if kind in ("kill at a point", "pause at a point"):
        point = random.choice([one for one in faults.POINTS if one != "learner.sweeping"])
        target = "learner" if point.startswith("learner") else random.choice(actors)
        seconds = _pause(random) if kind.startswith("pause") else 0.0
        return Fault(kind, 0.0, target=target, point=point, count=random.randint(1, 5), seconds=seconds)
    if kind in ("loads fail", "loads are slow", "environment hangs", "actor leaves"):
        return Fault(
            kind, at, target=random.choice(actors), count=random.randint(1, 4), seconds=random.uniform(1.0, 30.0)
        )
    if kind in ("take over", "actor joins"):
        return Fault(kind, at)
    if kind == "store forgets":
        return Fault(kind, at, point=random.choice(("groups", "adapters", "checkpoints", "newest commit")))
    return Fault(kind, at, seconds=random.uniform(0.3, 25.0))
