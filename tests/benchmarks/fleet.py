"""A fleet in simulated time: replicas with an exact prefix cache, slots, a prefill lane and parallel decoding.

What a replica does follows vLLM: blocks are shared as soon as a request is scheduled, the last prompt token is always
computed, a running request's blocks cannot be evicted, free blocks are evicted in order of use with ends before
beginnings, and a request waits while its blocks do not fit. Lengths of continuations are quantiles of a lognormal
distribution, shuffled, so that each replica's thousandth request has done the same work whichever router sent it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from broker.blocks import BLOCK, HASH, chain, end_of, extend
from broker.messages import Ids
from tests.benchmarks.traces import Ask, Scenario, asks, continuation, next_turn

PREFILL_SECONDS = 20e-6
"""One prompt token that is not cached, in a lane of its own."""

DECODE_SECONDS = 900e-6
"""One sampled token, whatever else runs."""

BASE_SECONDS = 1e-3

CHAINS_KEPT = 64
"""Groups of which a replica remembers the prompt's hashes."""


@dataclass(frozen=True)
class Done:
    """What a router hears of a request that has ended."""

    id: str
    cached: int
    sampled: Ids
    prompt: Ids
    blocks: bytes
    """Hashes of the full blocks that its continuation added."""


class Router(Protocol):
    """What the simulation drives."""

    def place(self, id: str, ask: Ask, now: float) -> int:
        """The number of the replica that gets `ask`."""

    def ended(self, done: Done, now: float) -> None: ...

    def left(self, replica: int, now: float) -> None:
        """A replica has died. What it had is placed again."""

    def joined(self, replica: int, now: float) -> None:
        """It is there again, with nothing cached."""


class Cache:
    """One replica's KV blocks. A block is in use by running requests, or free and kept in order of use."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._users: dict[bytes, int] = {}
        self._free: OrderedDict[bytes, None] = OrderedDict()
        self._held = 0
        self.evicted = 0

    def found(self, hashes: Sequence[bytes], tokens: int) -> int:
        """Leading blocks of a prompt of so many tokens that are there."""
        usable = min(len(hashes), (tokens - 1) // BLOCK)
        return next((count for count in range(usable) if hashes[count] not in self._users), usable)

    def take(self, hashes: Sequence[bytes], more: int) -> bool:
        """Use a prompt's blocks, and `more` that have no hash yet. False, and nothing done, when they do not fit."""
        for block in hashes:
            self._use(block)
        room = self._blocks - self._held - len(self._users) + len(self._free)
        if room < more:
            self.give(hashes)
            for block in hashes:
                if self._users.get(block) == 0 and len(self._users) + self._held > self._blocks:
                    self._evict(block)
            return False
        self._held += more
        while len(self._users) + self._held > self._blocks:
            self._evict(next(iter(self._free)))
        return True

    def _use(self, block: bytes) -> None:
        self._free.pop(block, None)
        self._users[block] = self._users.get(block, 0) + 1

    def _evict(self, block: bytes) -> None:
        del self._free[block], self._users[block]
        self.evicted += 1

    def give(self, hashes: Sequence[bytes]) -> None:
        """Use these blocks no longer."""
        for block in reversed(hashes):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def empty(self) -> None:
        """Forget every block."""
        self._users.clear()
        self._free.clear()
        self._held = 0

    def keep(self, hashes: Sequence[bytes], more: int) -> None:
        """`more` held blocks are given back; those that were filled stay as free ones."""
        self._held -= more
        for block in reversed(hashes):
            if block not in self._users and len(self._users) + self._held < self._blocks:
                self._users[block] = 0
                self._free[block] = None


@dataclass
class _Running:
    ask: Ask
    id: str
    chained: bytes
    hashes: list[bytes]
    more: int
    cached: int = 0
    length: int = 0


class Replica:
    """One engine."""

    def __init__(self, number: int, scenario: Scenario) -> None:
        self.number = number
        self.cache = Cache(scenario.blocks)
        self._slots = scenario.slots
        self._most = scenario.most
        self.running: dict[str, _Running] = {}
        self.waiting: deque[_Running] = deque()
        self._lane_free = 0.0
        self._drawn = 0
        normal = statistics.NormalDist(math.log(200), 0.6)
        self._lengths = [max(8, int(math.exp(normal.inv_cdf((rank + 0.5) / 1024)))) for rank in range(1024)]
        random.Random(number).shuffle(self._lengths)
        self.prompt_tokens = self.cached_tokens = self.requests = 0
        self._chains: OrderedDict[int, tuple[Ids, bytes, list[bytes]]] = OrderedDict()

    def die(self) -> list[tuple[str, Ask]]:
        """Lose everything; the requests that it had."""
        had = [(request.id, request.ask) for request in [*self.running.values(), *self.waiting]]
        self.running.clear()
        self.waiting.clear()
        self.cache.empty()
        return had

    def submit(self, id: str, ask: Ask) -> None:
        chained, hashes = self._hashes(ask)
        more = -(-(len(ask.prompt) + self._most) // BLOCK) - len(hashes)
        self.waiting.append(_Running(ask, id, chained, hashes, more))

    def _hashes(self, ask: Ask) -> tuple[bytes, list[bytes]]:
        """A prompt's chain, whole and block by block. A group's members, which come to one replica, share them."""
        known = self._chains.get(ask.group)
        if known is None or known[0] is not ask.prompt:
            chained = chain(ask.adapter, ask.prompt)
            known = self._chains[ask.group] = (ask.prompt, chained, split(chained))
            if len(self._chains) > CHAINS_KEPT:
                self._chains.popitem(last=False)
        return known[1:]

    def start(self, now: float) -> list[tuple[float, str]]:
        """Begin what can begin; (when it ends, id) of each."""
        begun = []
        while self.waiting and len(self.running) < self._slots:
            request = self.waiting[0]
            found = self.cache.found(request.hashes, len(request.ask.prompt))
            if not self.cache.take(request.hashes, request.more):
                break
            self.waiting.popleft()
            request.cached = found * BLOCK
            self.running[request.id] = request
            self._drawn += 1
            request.length = min(self._most, self._lengths[self._drawn % 1024])
            work = (len(request.ask.prompt) - request.cached) * PREFILL_SECONDS
            self._lane_free = max(now, self._lane_free) + work
            begun.append((self._lane_free + request.length * DECODE_SECONDS + BASE_SECONDS, request.id))
        return begun

    def finish(self, id: str) -> Done:
        request = self.running.pop(id)
        ask = request.ask
        sampled = continuation(ask, request.length)
        self.prompt_tokens += len(ask.prompt)
        self.cached_tokens += request.cached
        self.requests += 1
        self.cache.give(request.hashes)
        rest = ask.prompt[len(request.hashes) * BLOCK :]
        blocks, _ = extend(ask.adapter, end_of(request.chained), np.concatenate([rest, sampled]))
        self.cache.keep(split(blocks), request.more)
        return Done(id, request.cached, sampled, ask.prompt, blocks)


def split(chained: bytes) -> list[bytes]:
    """A chain's hashes, one by one."""
    return [chained[at : at + HASH] for at in range(0, len(chained), HASH)]


@dataclass
class Outcome:
    """What a replay showed. `balance`: most over mean of requests in flight, averaged over time, middle of the run."""

    requests: int
    hit: float
    balance: float
    seconds: float
    evicted: int
    deaths: int
    per_replica: list[int] = field(default_factory=list)


def replay(
    scenario: Scenario, router: Router, *, seed: int = 0, trace: Iterable[Ask] | None = None, die_every: int = 0
) -> Outcome:
    """Replay a scenario through `router`, keeping `in_flight` requests going.

    `die_every`: a replica dies each time this many requests have been served, and returns after twice as many.
    """
    replicas = [Replica(number, scenario) for number in range(scenario.replicas)]
    fresh = iter(asks(scenario, seed) if trace is None else trace)
    next_turns: deque[Ask] = deque()
    total = scenario.groups * scenario.size * scenario.turns
    numbers, order, dice = itertools.count(), itertools.count(), random.Random(seed)
    where: dict[str, tuple[int, Ask]] = {}
    ends: list[tuple[float, int, str, int]] = []
    dead: deque[tuple[int, int]] = deque()
    now, last, weighted, measured, served, deaths = 0.0, 0.0, 0.0, 0.0, 0, 0

    flights = np.zeros(len(replicas), np.int64)

    def begin(number: int) -> None:
        for end, id in replicas[number].start(now):
            heapq.heappush(ends, (end, next(order), id, number))

    def send(id: str, ask: Ask) -> None:
        number = router.place(id, ask, now)
        where[id] = (number, ask)
        flights[number] += 1
        replicas[number].submit(id, ask)
        begin(number)

    def issue() -> None:
        while len(where) < scenario.in_flight:
            ask = next_turns.popleft() if next_turns else next(fresh, None)
            if ask is None:
                return
            send(f"q{next(numbers)}", ask)

    issue()
    while ends:
        end, _, id, number = heapq.heappop(ends)
        if id not in replicas[number].running:
            continue  # it died with its replica
        now = end
        if 0.05 * total < served < 0.85 * total:
            weighted += (now - last) * int(flights.max()) * (len(replicas) - len(dead)) / len(where)
            measured += now - last
        last = now
        _, ask = where.pop(id)
        flights[number] -= 1
        done = replicas[number].finish(id)
        served += 1
        router.ended(done, now)
        begin(number)
        if (following := next_turn(scenario, ask, done.sampled, seed)) is not None:
            next_turns.append(following)
        if dead and served >= dead[0][1]:
            router.joined(dead.popleft()[0], now)
        if die_every and served % die_every == 0:
            victim = dice.choice([n for n in range(len(replicas)) if n not in {gone for gone, _ in dead}])
            dead.append((victim, served + 2 * die_every))
            deaths += 1
            had = replicas[victim].die()
            flights[victim] = 0
            router.left(victim, now)
            for lost, asked in had:
                send(lost, asked)
        issue()
    assert not where, "every request was served"
    return Outcome(
        requests=served,
        hit=sum(replica.cached_tokens for replica in replicas) / sum(replica.prompt_tokens for replica in replicas),
        balance=weighted / measured if measured else 0.0,
        seconds=now,
        evicted=sum(replica.cache.evicted for replica in replicas),
        deaths=deaths,
        per_replica=[replica.requests for replica in replicas],
    )
