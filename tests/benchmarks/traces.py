"""Synthetic GRPO traffic for router benchmarks: the scenarios of the HTTP harness, made anew for simulation.

A trace is a list of asks in issue order. Whoever replays it keeps a number of them in flight and issues the next as
soon as one has ended, so that "siblings arrive at slightly different times" is a bounded shuffle of that order.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from broker.blocks import HASH, chain
from broker.messages import Ids

VOCABULARY = 17_576


@dataclass(frozen=True)
class Ask:
    """One request. `prompt` is int32 [n]; `turn` counts from 0."""

    group: int
    member: int
    adapter: str
    prompt: Ids
    turn: int = 0


@dataclass(frozen=True)
class Scenario:
    """Traffic and the fleet it meets."""

    replicas: int = 4
    slots: int = 32
    """Requests that a replica runs at once."""
    blocks: int = 20_000
    """KV blocks of a replica."""
    groups: int = 600
    size: int = 8
    prompts: int = 300
    """Distinct prompts: fewer than groups, so that they come back, under later versions."""
    template: int = 23
    """Tokens that every prompt begins with."""
    shortest: int = 100
    longest: int = 400
    most: int = 1200
    version_every: int = 512
    """Requests until the adapter's version goes up."""
    spread: int = 24
    """How far, in requests, a member may drift from its group."""
    turns: int = 1
    reply: int = 40
    """Tokens that the environment adds between turns."""
    in_flight: int = 128


BASE = Scenario()

SCENARIOS = {
    "s1": replace(BASE, replicas=2, slots=64),
    "s2": BASE,
    "s3": replace(BASE, template=1024),
    "s4": replace(BASE, turns=3, groups=200, prompts=200),
    "s5": replace(BASE, blocks=1400),
    "s6": replace(BASE, slots=16),
    "s7": replace(BASE, spread=256),
}
"""s1: two replicas. s2: four. s3: a shared system prompt of 1,024 tokens. s4: three turns. s5: caches that overflow.
s6: twice more in flight than slots. s7: siblings that arrive far apart."""


def asks(scenario: Scenario, seed: int = 0) -> list[Ask]:
    """The first turns of the trace, in issue order."""
    dice = random.Random(seed)
    order = list(_order(scenario, dice))
    prompts = _Prompts(scenario, seed)
    placed = []
    for group, prompt in enumerate(order):
        placed += _members(scenario, group, prompts[prompt], dice)
    placed.sort(key=lambda pair: pair[0])
    return [ask for _, ask in placed]


def stream(scenario: Scenario, seed: int = 0) -> Iterator[Ask]:
    """The same, made while it is read: for traces that do not fit into memory."""
    dice = random.Random(seed)
    prompts = _Prompts(scenario, seed)
    ready: list[tuple[float, int, Ask]] = []
    count = itertools.count()
    for group, prompt in enumerate(_order(scenario, dice)):
        for when, ask in _members(scenario, group, prompts[prompt], dice):
            heapq.heappush(ready, (when, next(count), ask))
        while ready and ready[0][0] < (group + 1) * scenario.size:
            yield heapq.heappop(ready)[2]
    while ready:
        yield heapq.heappop(ready)[2]


def _order(scenario: Scenario, dice: random.Random) -> Iterator[int]:
    """The prompt of each group, epoch by epoch."""
    epoch: list[int] = []
    for _ in range(scenario.groups):
        if not epoch:
            epoch = list(range(min(scenario.prompts, scenario.groups)))
            dice.shuffle(epoch)
        yield epoch.pop()


def _members(scenario: Scenario, group: int, prompt: Ids, dice: random.Random) -> list[tuple[float, Ask]]:
    """A group's members, each with its place in issue order."""
    first = group * scenario.size
    adapter = f"policy-v{first // scenario.version_every}"
    return [
        (first + member + dice.uniform(0, scenario.spread), Ask(group, member, adapter, prompt))
        for member in range(scenario.size)
    ]


class _Prompts:
    """The distinct prompts of a scenario, made when asked for."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        self._template = np.random.default_rng(seed).integers(0, VOCABULARY, scenario.template, dtype=np.int32)

    def __getitem__(self, number: int) -> Ids:
        numbers = np.random.default_rng([self._seed, number])
        size = int(numbers.integers(self._scenario.shortest, self._scenario.longest + 1))
        return np.concatenate([self._template, numbers.integers(0, VOCABULARY, size, dtype=np.int32)])


_SAMPLED = np.random.default_rng(1).integers(0, VOCABULARY, 1 << 20, dtype=np.int32)


def continuation(ask: Ask, length: int) -> Ids:
    """What is sampled for `ask`, int32 [length]: the same each time, and another for every member and turn."""
    at = (ask.group * 7919 + ask.member * 104_729 + ask.turn * 15_485_863) % (len(_SAMPLED) - length)
    return _SAMPLED[at : at + length]


def next_turn(scenario: Scenario, ask: Ask, sampled: Ids, seed: int = 0) -> Ask | None:
    """What follows when `sampled` has answered `ask`; None after the last turn."""
    if ask.turn + 1 >= scenario.turns:
        return None
    numbers = np.random.default_rng([seed, ask.group, ask.member, ask.turn])
    reply = numbers.integers(0, VOCABULARY, scenario.reply, dtype=np.int32)
    return replace(ask, prompt=np.concatenate([ask.prompt, sampled, reply]), turn=ask.turn + 1)


def bound(trace: Iterable[Ask], block: int = 16) -> float:
    """Hit rate of one infinite cache that sees the trace in order: no placement does better on first turns.

    As in vLLM the last token of a prompt is computed in any case.
    """
    seen: set[bytes] = set()
    begun: set[int] = set()
    cached = total = 0
    for ask in trace:
        usable = (len(ask.prompt) - 1) // block * HASH
        total += len(ask.prompt)
        if ask.group in begun:  # a sibling was there before
            cached += usable // HASH * block
            continue
        begun.add(ask.group)
        hashes = chain(ask.adapter, ask.prompt, block=block)
        found = 0
        while found < usable and hashes[found : found + HASH] in seen:
            found += HASH
        cached += found // HASH * block
        seen.update(hashes[at : at + HASH] for at in range(0, len(hashes), HASH))
    return cached / total
