"""Placement rules to compare: ours, round robin, and the published prefix-affinity rule from its description."""

from __future__ import annotations

from typing import Any

from broker.blocks import BLOCK, chain
from router.placement import SPILL_REQUESTS, Placer, Request
from tests.benchmarks.fleet import Done, split
from tests.benchmarks.traces import Ask, Scenario


class _Static:
    """A rule that knows nothing of replicas that come and go."""

    def left(self, replica: int, now: float) -> None:
        raise NotImplementedError

    def joined(self, replica: int, now: float) -> None:
        raise NotImplementedError


class RoundRobin(_Static):
    """One after the other."""

    def __init__(self, scenario: Scenario) -> None:
        self._replicas = scenario.replicas
        self._next = 0
        self.placements: dict[str, int] = {}

    def place(self, id: str, ask: Ask, now: float) -> int:
        self._next += 1
        return self._next % self._replicas

    def ended(self, done: Done, now: float) -> None:
        pass


class Published(_Static):
    """The published rule: a block is common when all replicas have served it or when it has two successors; the
    replica with most other blocks wins unless it is `imbalance` requests ahead of the least loaded, which is taken
    otherwise, in turn. Nothing is ever forgotten.
    """

    def __init__(self, scenario: Scenario, imbalance: int = 8) -> None:
        self._imbalance = imbalance
        self._flying = [0] * scenario.replicas
        self._served: dict[bytes, set[int]] = {}
        self._next: dict[bytes, set[bytes]] = {}
        self._where: dict[str, int] = {}
        self._turn = 0
        self.placements = {"affinity": 0, "spill": 0, "unmatched": 0}

    def place(self, id: str, ask: Ask, now: float) -> int:
        hashes = split(chain(ask.adapter, ask.prompt))
        everyone = set(range(len(self._flying)))
        matched = dict.fromkeys(everyone, 0)
        alive = set(everyone)
        common, still = 0, True
        for block in hashes:
            owners = self._served.get(block, set())
            alive &= owners
            if not alive:
                break
            for replica in alive:
                matched[replica] += 1
            still = still and (owners == everyone or len(self._next.get(block, ())) > 1)
            common += still
        least = min(self._flying)
        best = max(everyone, key=lambda replica: (matched[replica], -self._flying[replica]))
        if matched[best] > common and self._flying[best] - least <= self._imbalance:
            kind = "affinity"
        else:
            kind = "spill" if matched[best] > common else "unmatched"
            idle = [replica for replica in sorted(everyone) if self._flying[replica] == least]
            best = idle[self._turn % len(idle)]
            self._turn += 1
        self.placements[kind] += 1
        for before, block in zip([None, *hashes], hashes, strict=False):
            self._served.setdefault(block, set()).add(best)
            if before is not None:
                self._next.setdefault(before, set()).add(block)
        self._flying[best] += 1
        self._where[id] = best
        return best

    def ended(self, done: Done, now: float) -> None:
        self._flying[self._where.pop(done.id)] -= 1


class Ours:
    """`router.placement`. `told`: the message names group and siblings, as an actor's does.

    With several `routers` each has the groups that a hash gives it, and knows of the others' work what replicas report.
    """

    def __init__(
        self, scenario: Scenario, *, told: bool = True, spill: float = SPILL_REQUESTS, routers: int = 1,
        max_bytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        self.placers = [Placer(spill=spill, max_bytes=max_bytes) for _ in range(routers)]
        self._told = told
        self._scenario = scenario
        self._adapters: list[str] = []
        self._names = [f"r{number:04d}" for number in range(scenario.replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._there = set(self._names)
        self._owners: dict[str, Placer] = {}
        for name in self._names:
            self._tell(name)

    @property
    def placements(self) -> dict[str, int]:
        kinds = self.placers[0].placements
        return {kind: sum(placer.placements[kind] for placer in self.placers) for kind in kinds}

    def _tell(self, name: str) -> None:
        for placer in self.placers:
            placer.update_replica(
                name, confirmed=self._adapters, accepts=True, cache_tokens=self._scenario.blocks * BLOCK
            )

    def place(self, id: str, ask: Ask, now: float) -> int:
        if ask.adapter not in self._adapters:
            self._adapters = [*self._adapters[-7:], ask.adapter]  # as many as an engine has slots
            for name in self._there:
                self._tell(name)
        placer = self.placers[hash(ask.group) % len(self.placers)]
        self._owners[id] = placer
        placer.expire(now)
        told: dict[str, Any] = {"group": f"g{ask.group}", "siblings": self._scenario.size} if self._told else {}
        placed = placer.place(Request(id, ask.prompt, self._scenario.most, adapter=ask.adapter, **told), now)
        assert placed is not None
        return self._numbers[placed.replica]

    def ended(self, done: Done, now: float) -> None:
        placer = self._owners.pop(done.id)
        name = placer.assigned_to(done.id)
        assert name is not None
        placer.complete(
            done.id,
            output_tokens=len(done.sampled),
            cached_tokens=done.cached,
            prompt_tokens=len(done.prompt),
            blocks=done.blocks,
        )
        if len(self.placers) > 1:
            self._report(name)

    def _report(self, name: str) -> None:
        """What a replica's report tells each router of what the others have there."""
        own = [placer.load(name) - placer.others(name) for placer in self.placers]
        for placer, work in zip(self.placers, own, strict=True):
            placer.report_others(name, 1, sum(own) - work)

    def left(self, replica: int, now: float) -> None:
        self._there.discard(self._names[replica])
        for placer in self.placers:
            placer.remove_replica(self._names[replica])

    def joined(self, replica: int, now: float) -> None:
        self._there.add(self._names[replica])
        self._tell(self._names[replica])
