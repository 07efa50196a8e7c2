"""Where a generation request goes. Pure: events in, decisions out; no task, no socket, no clock.

State.
- Replicas, each with a slot (a small integer), what it has confirmed, and its load.
- What each replica's prefix cache is believed to hold (`router.prefixes`): a bounded mirror in order of use.
- The newest groups: their home, and the work reserved for members that are missing (`router.groups`).
- How long continuations are, by run and prompt (`router.lengths`).

Rules.
1. *Eligible* is a replica that takes requests, is not failing, and has confirmed the request's adapter. One that has
   refused the request before counts only where every eligible one has.
2. *Blocks.* A prompt is cut in blocks of the replica's block size, whose hashes are chained and begin with the
   adapter's name and the cache salt (`broker.blocks`). Leading blocks in which prompts fork are common (system
   prompts) and do not decide. How many replicas hold a block does not matter.
3. *Load* is work still to do, in prefilled tokens: of each unfinished request the prompt tokens that were not cached
   plus DECODE_COST times the tokens it will probably sample; and the reserved work of siblings that have not come.
   What other routers placed counts as they said.
4. A request *has a place* where its group's home is, or where a replica holds blocks of it behind the common ones. Of
   several places the one that holds most is taken, then the least loaded.
5. It goes to its place (affinity), unless that has more work than the lightest eligible replica by more than the mean
   work of `spill` requests and of the group's members together, plus what would have to be prefilled anew: then to
   the cheapest (spill). What is reserved for the group's own members does not count: they would go along.
6. Without a place it goes to the cheapest (unmatched): the lightest, or the lightest that has its common blocks,
   whichever has less to do with this request's own prefill counted.
7. When the first member of a group lands, its missing siblings count as load already (reservation).
8. Returned tokens are mirrored, so that the next turn finds its replica. A reply's `cached_tokens` corrects the mirror.

`placements` counts affinity, spill and unmatched as the published prefix-affinity experiment defines them: it went
where its blocks lie; such a replica was there but too loaded; no replica had any block of it but common ones.

A placement takes time in the prompt's length only: replicas are looked at in three numpy calls.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from broker.blocks import BLOCK, HASH, chain, usable_block
from broker.messages import Ids
from router.groups import Group, Groups
from router.lengths import Lengths
from router.prefixes import Match, Prefixes

SPILL_REQUESTS = 16.0
"""A request leaves its place when that is ahead of the lightest replica by this many requests more than its group has.
See docs/routing.md for the measurement: with less, groups are split for nothing; with more, nothing is gained."""

LARGEST_WHOLE = 32
"""A larger group counts as this large there, so that a giant one is shared out where replicas have nothing to do."""

DECODE_COST = 4.0
"""One sampled token costs about as much as this many prefilled ones, in a full batch."""

MAX_BYTES = 1 << 30
"""Memory that the mirrors may take: ten million blocks at their worst, thirty or more as they usually come."""

TYPICAL_WORK = 1024.0
"""The work of a request of which only its id is known, until a first one was placed here."""

RECENT = 16_384
"""Requests whose ids are remembered, so that one that is placed again does not count as another sibling."""

HOLDERS_COMPARED = 32
"""Replicas with a common prefix that are compared at most, so that a large fleet costs no more than a small one."""

PROMPTS_HASHED = 1024
"""Newest prompts whose hashes are remembered: siblings bring the same prompt again."""

LONG_PROMPT = 1 << 15
"""Bytes of a prompt that is hashed anew each time, so that the memory of the others stays below 40 MB."""

INFINITE = float("inf")

Kind = Literal["affinity", "spill", "unmatched"]


class Request(msgspec.Struct, frozen=True):
    """What placement needs to know of a generation request. `prompt` is int32 [n].

    `group` names the requests that share its prompt, "" where nobody says; `siblings` is their number in all, None
    where nobody says. `run` is whose continuation lengths it is like. `most` is how many tokens it asks for.
    """

    id: str
    prompt: Ids
    most: int
    adapter: str | None = None
    group: str = ""
    siblings: int | None = None
    run: str = ""
    salt: str = ""


class Placement(msgspec.Struct, frozen=True):
    """The decision.

    `cached`: prompt tokens that the replica is believed to have. `work`: what the request adds to its load.
    `reserved`: what its group's missing members add.
    """

    replica: str
    kind: Kind
    cached: int
    work: float
    reserved: float


class _Assigned(msgspec.Struct):
    slot: int
    work: float
    match: Match
    block: int
    believed: int
    settled: int
    run: str
    prompt: int


@dataclass(slots=True)
class _Replica:
    name: str
    slot: int
    confirmed: frozenset[str] = frozenset()
    accepts: bool = True
    block: int = BLOCK
    others: float = 0.0
    """Work that it has from others than this router."""
    assigned: dict[str, None] = field(default_factory=dict)


class Placer:
    """The state of one router."""

    def __init__(self, *, spill: float = SPILL_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        """`spill`: see rule 5, in requests. `max_bytes`: memory that the mirrors may take."""
        self.spill = spill
        self._prefixes = Prefixes(max_bytes=max_bytes)
        self._groups = Groups()
        self._lengths = Lengths()
        self._replicas: dict[str, _Replica] = {}
        self._slots: list[_Replica | None] = []
        self._loads: npt.NDArray[np.float64] = np.zeros(0)
        self._barred: dict[str | None, npt.NDArray[np.float64] | None] = {}
        self._block_sizes: list[int] = []
        self._assigned: dict[str, _Assigned] = {}
        self._typical = TYPICAL_WORK
        """Mean work of a request."""
        self._placed = 0
        self._recent: OrderedDict[str, None] = OrderedDict()
        self.placements: dict[Kind, int] = {"affinity": 0, "spill": 0, "unmatched": 0}
        self.prompt_tokens = 0
        """Prompt tokens of the requests that have ended well."""
        self.cached_tokens = 0
        """How many of those their replicas found cached."""

    # ---------------------------------------------------------------------------------------------- replica events

    def update_replica(
        self, replica: str, *, confirmed: Iterable[str], accepts: bool, cache_tokens: int, block: int = BLOCK
    ) -> None:
        """A replica is there, or what it says of itself has changed.

        `confirmed` are the adapters that it has; `accepts` whether it takes requests. A capacity or block size that
        makes no sense counts as the smallest cache worth mirroring, and as the usual block.
        """
        state = self._replicas.get(replica)
        confirmed, block = frozenset(confirmed), usable_block(block)
        capacity = max(0, cache_tokens) // block
        if state is None:
            state = self._join(replica)
        elif state.block != block:
            self._prefixes.clear(state.slot)
        self._prefixes.add(state.slot, capacity)
        if (confirmed, accepts, block) == (state.confirmed, state.accepts, state.block) and self._barred:
            return
        dropped = state.confirmed - confirmed
        state.confirmed, state.accepts, state.block = confirmed, accepts, block
        self._replicas_changed()
        self._forget_unconfirmed(dropped)

    def report_others(self, replica: str, count: int, work: float | None = None) -> None:
        """A replica also has `count` requests that were not placed here: another router's, or this one's before its
        start. `work` is what they add to its load, None where nobody says: then each counts as the mean of those
        placed here.
        """
        state = self._replicas.get(replica)
        if state is not None:
            work = float(round(count * self._typical if work is None else max(0.0, work)))
            self._loads[state.slot] += work - state.others
            state.others = work

    def remove_replica(self, replica: str) -> list[str]:
        """A replica is gone; returns the ids of the requests it had, which must be placed anew."""
        state = self._replicas.pop(replica, None)
        if state is None:
            return []
        self._prefixes.remove(state.slot)
        self._groups.abandon(state.slot)
        self._slots[state.slot] = None
        self._loads[state.slot] = 0.0
        for id in state.assigned:
            del self._assigned[id]
        self._replicas_changed()
        self._forget_unconfirmed(state.confirmed)
        return list(state.assigned)

    def bar(self, replica: str) -> bool:
        """A replica takes no requests until the next `update_replica`; False when it is unknown."""
        state = self._replicas.get(replica)
        if state is None:
            return False
        state.accepts = False
        self._replicas_changed()
        return True

    def clear_cache(self, replica: str) -> None:
        """A replica's prefix cache was emptied."""
        if state := self._replicas.get(replica):
            self._prefixes.clear(state.slot)

    def cache_stored(self, replica: str, adapter: str | None, blocks: bytes, salt: str = "") -> None:
        """A replica says that it holds this chain of blocks, from a prompt's beginning on."""
        if state := self._replicas.get(replica):
            self._prefixes.stored(_space(adapter, salt, state.block), blocks, state.slot)

    def cache_removed(self, replica: str, blocks: bytes) -> None:
        """A replica says that it no longer holds these blocks."""
        if state := self._replicas.get(replica):
            hashes = (blocks[start : start + HASH] for start in range(0, len(blocks), HASH))
            self._prefixes.removed(hashes, state.slot)

    def replicas(self) -> list[str]:
        return sorted(self._replicas)

    def load(self, replica: str) -> float:
        """Work the replica is believed to have left, in prefill tokens, reservations included."""
        state = self._replicas.get(replica)
        return float(self._loads[state.slot]) if state else 0.0

    def others(self, replica: str) -> float:
        """How much of that others placed there."""
        state = self._replicas.get(replica)
        return state.others if state else 0.0

    # ---------------------------------------------------------------------------------------------------- requests

    def eligible(self, adapter: str | None) -> list[str]:
        """Replicas that may serve `adapter` now."""
        return [
            state.name
            for state in self._replicas.values()
            if state.accepts and (adapter is None or adapter in state.confirmed)
        ]

    def can_serve(self, adapter: str | None) -> bool:
        """Whether some replica may serve `adapter` now."""
        return self._bars(adapter) is not None

    def place(self, request: Request, now: float, *, avoid: Iterable[str] = ()) -> Placement | None:
        """Choose a replica and count the request as its load; None when no replica is eligible.

        Those to `avoid` are chosen only where no other is eligible.
        """
        bars = self._bars(request.adapter)
        if bars is None:
            return None
        self.complete(request.id)
        costs = self._loads + bars
        if avoid:
            others = costs.copy()
            others[[state.slot for name in avoid if (state := self._replicas.get(name))]] = INFINITE
            costs = others if others.min() < INFINITE else costs
        lightest = int(costs.argmin())
        prompt = len(request.prompt)
        data = request.prompt.tobytes()
        matches = [self._match(request, data, block) for block in self._block_sizes]
        name = hash(data)
        key = request.group or (request.adapter or "", request.salt, name)
        group = self._groups.get(key)

        place, match, (depth, settled) = self._place_of(matches, group.home if group else -1, costs)
        kind: Kind = "affinity"
        if place < 0 or not self._may_stay(place, match, depth, lightest, matches, costs, group):
            kind = "unmatched" if place < 0 else "spill"
            chosen, match, (depth, settled) = self._cheapest(matches, costs, lightest)
        else:
            chosen = place

        state = self._slots[chosen]
        assert state is not None
        block = state.block
        cached = min(depth * block, max(0, prompt - 1))
        decode = round(self._lengths.expected(request.run, name, request.most) * DECODE_COST)
        work = float(prompt - cached + decode)  # a whole number, so that adding and taking away leaves nothing
        self._assigned[request.id] = _Assigned(chosen, work, match, block, depth, settled, request.run, name)
        state.assigned[request.id] = None
        self._loads[chosen] += work
        self._placed += 1
        self._typical += (work - self._typical) * max(0.02, 1 / self._placed)
        self._prefixes.use(match, chosen)
        if group is None:
            each = float(decode + prompt % block)
            group, old = self._groups.begin(key, chosen, request.siblings, each, now, fresh=place < 0)
            if old is not None and old.reserved:
                self._add(old.home, -old.reserved)
        else:
            if group.reserved:
                self._add(group.home, -group.reserved)
            self._groups.join(key, group, chosen, now, again=request.id in self._recent)
        if group.reserved:
            self._loads[chosen] += group.reserved
        self._recent[request.id] = None
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        self.placements[kind] += 1
        return Placement(state.name, kind, cached, work, group.reserved)

    def complete(
        self,
        id: str,
        *,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
        blocks: bytes = b"",
    ) -> bool:
        """A request has ended, whatever its outcome. False when it is unknown.

        Of one that ended well: how many tokens it sampled, how many of its prompt's tokens were cached, and the hashes
        of the full `blocks` that its continuation added behind those of the prompt.
        """
        assigned = self._assigned.pop(id, None)
        if assigned is None:
            return False
        slot = assigned.slot
        self._add(slot, -assigned.work)
        state = self._slots[slot]
        assert state is not None
        del state.assigned[id]
        if output_tokens is None:
            return True
        self._lengths.ended(assigned.run, assigned.prompt, output_tokens)
        if cached_tokens is not None:
            self.prompt_tokens += max(prompt_tokens, cached_tokens)
            self.cached_tokens += cached_tokens
            self._prefixes.correct(
                slot, settled=assigned.settled, believed=assigned.believed, cached=cached_tokens // assigned.block
            )
        self._prefixes.settle(assigned.match.space, assigned.match.chain, blocks, slot)
        return True

    def knows(self, group: str) -> bool:
        """Whether members of this group were placed here."""
        return self._groups.get(group) is not None

    def prompt_chain(self, id: str) -> bytes:
        """The hashes of a placed request's full blocks, in its replica's block size; empty when it is unknown."""
        found = self._assigned.get(id)
        return found.match.chain if found else b""

    def assigned_to(self, id: str) -> str | None:
        """The replica that a request was placed on."""
        found = self._assigned.get(id)
        state = self._slots[found.slot] if found else None
        return state.name if state else None

    def assigned(self, replica: str) -> list[str]:
        """The ids of the requests the replica is believed to have."""
        state = self._replicas.get(replica)
        return list(state.assigned) if state else []

    def expire(self, now: float) -> None:
        """Give back reservations whose siblings never came."""
        for slot, reserved in self._groups.expire(now):
            self._add(slot, -reserved)

    # -------------------------------------------------------------------------------------------------------- size

    def memory(self) -> int:
        """Bytes that the mirrors take, as accounted; at most `max_bytes`, and BLOCK_BYTES a block of the caches."""
        return self._prefixes.memory()

    def mirrored_blocks(self) -> int:
        """Blocks mirrored of all replicas together."""
        return self._prefixes.total_blocks()

    def mirrored(self) -> Mapping[str, tuple[int, int]]:
        """Blocks mirrored of each replica, and how many may be."""
        prefixes = self._prefixes
        return {
            name: (prefixes.blocks(state.slot), prefixes.limit(state.slot)) for name, state in self._replicas.items()
        }

    # ----------------------------------------------------------------------------------------------------- private

    def _join(self, replica: str) -> _Replica:
        slot = next((slot for slot, state in enumerate(self._slots) if state is None), len(self._slots))
        state = _Replica(replica, slot)
        if slot == len(self._slots):
            self._slots.append(state)
            self._loads = np.append(self._loads, 0.0)
        else:
            self._slots[slot] = state
        self._replicas[replica] = state
        self._barred = {}
        return state

    def _replicas_changed(self) -> None:
        self._barred = {}
        self._block_sizes = list(dict.fromkeys(state.block for state in self._replicas.values()))

    def _forget_unconfirmed(self, adapters: Iterable[str]) -> None:
        """Forget the blocks of versions that no replica has any more."""
        for adapter in adapters:
            if not any(adapter in state.confirmed for state in self._replicas.values()):
                for space in self._prefixes.spaces():
                    if space.startswith(f"{adapter}\0"):
                        self._prefixes.forget(space)

    def _bars(self, adapter: str | None) -> npt.NDArray[np.float64] | None:
        """float64 [slots]: 0 for a replica that may serve `adapter`, infinite for the others; None if none may."""
        if adapter not in self._barred:
            bars = np.full(len(self._slots), np.inf)
            for name in self.eligible(adapter):
                bars[self._replicas[name].slot] = 0.0
            if len(self._barred) > 4096:
                self._barred.clear()
            self._barred[adapter] = bars if np.isfinite(bars).any() else None
        return self._barred[adapter]

    def _match(self, request: Request, data: bytes, block: int) -> Match:
        hashing = _hashes if len(data) < LONG_PROMPT else _hashes.__wrapped__
        hashes = hashing(request.adapter, data, request.salt, block)
        left = len(data) % (4 * block)
        rest = hash(data[-left:]) if left else 0
        return self._prefixes.match(_space(request.adapter, request.salt, block), hashes, rest)

    def _match_for(self, matches: list[Match], slot: int) -> Match:
        """How the prompt lies in the tree of this replica's block size."""
        if len(matches) == 1:
            return matches[0]
        state = self._slots[slot]
        return matches[self._block_sizes.index(state.block)] if state else matches[0]

    def _block_of(self, slot: int) -> int:
        state = self._slots[slot]
        return state.block if state else BLOCK

    def _place_of(
        self, matches: list[Match], home: int, costs: npt.NDArray[np.float64]
    ) -> tuple[int, Match, tuple[int, int]]:
        """Where the request has its place (rule 4), -1 when it has none; and what of the prompt lies there."""
        places = self._prefixes.holders(matches[0])
        for match in matches[1:]:
            places += self._prefixes.holders(match)
        if len(places) > HOLDERS_COMPARED:
            places = sorted(places, key=costs.__getitem__)[:HOLDERS_COMPARED]
        if home >= 0 and home not in places:
            places.append(home)
        if len(places) == 1 and len(matches) == 1 and costs.item(places[0]) != INFINITE:
            return places[0], matches[0], self._prefixes.depth(matches[0], places[0])
        best, found, standing, most, least = -1, matches[0], (0, 0), -1, INFINITE
        for slot in places:
            cost = costs.item(slot)
            if cost == INFINITE:
                continue
            match = self._match_for(matches, slot)
            depth = self._prefixes.depth(match, slot)
            tokens = depth[0] * self._block_of(slot)
            if tokens > most or (tokens == most and cost < least):
                best, found, standing, most, least = slot, match, depth, tokens, cost
        return best, found, standing

    def _may_stay(
        self,
        place: int,
        match: Match,
        depth: int,
        lightest: int,
        matches: list[Match],
        costs: npt.NDArray[np.float64],
        group: Group | None,
    ) -> bool:
        """Whether a request's place is not too loaded (rule 5)."""
        over = costs.item(place) - costs.item(lightest)
        if group is None:
            size = 1.0
        else:
            size = min(LARGEST_WHOLE, group.came + group.missing)
            if group.home == place:
                over -= group.reserved
        over -= (self.spill + size) * self._typical
        if over <= 0 or place == lightest:
            return True
        elsewhere = self._match_for(matches, lightest)
        there = self._prefixes.depth(elsewhere, lightest)[0] * self._block_of(lightest)
        return over <= depth * self._block_of(place) - there

    def _cheapest(
        self, matches: list[Match], costs: npt.NDArray[np.float64], lightest: int
    ) -> tuple[int, Match, tuple[int, int]]:
        """The lightest replica, or a somewhat heavier one that has more of the common blocks (rule 6)."""
        match = self._match_for(matches, lightest)
        depth = self._prefixes.depth(match, lightest)
        best = (lightest, match, depth)
        if all(depth[0] >= other.common for other in matches):
            return best
        cheapest = costs.item(lightest) - depth[0] * self._block_of(lightest)
        for match in matches:
            holders = match.common_run.holders() if match.common_run else iter(())
            for hold in itertools.islice(holders, HOLDERS_COMPARED):
                slot = hold.slot
                if costs.item(slot) == INFINITE or self._match_for(matches, slot) is not match:
                    continue
                depth = self._prefixes.depth(match, slot)
                cost = costs.item(slot) - depth[0] * self._block_of(slot)
                if cost < cheapest:
                    best, cheapest = (slot, match, depth), cost
        return best

    def _add(self, slot: int, work: float) -> None:
        if slot >= 0 and self._slots[slot] is not None:
            self._loads[slot] += work


@lru_cache(maxsize=PROMPTS_HASHED)
def _hashes(adapter: str | None, data: bytes, salt: str, block: int) -> bytes:
    return chain(adapter, np.frombuffer(data, np.int32), salt=salt, block=block)


def _space(adapter: str | None, salt: str, block: int) -> str:
    return f"{adapter or ''}\0{salt}\0{block}"
