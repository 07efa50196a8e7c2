"""Where a generation request goes. Pure: events in, decisions out; no task, no socket, no clock.

Rules, in this order:
- A replica is eligible only while it takes requests and has confirmed the request's adapter.
- Prompts are cut in blocks of BLOCK tokens, hashed in a chain that starts with the adapter's name: the blocks of one
  version never match another's. Each replica has a bounded mirror (LRU) of the blocks it was sent or returned.
- The cost of a replica is the work it still has, in tokens, plus the work this request would add there: the prompt
  tokens not mirrored there, and the expected output. The cheapest replica gets the request.
- *Reservation*: when the first member of a group lands, the outputs of its missing siblings count as that replica's
  load already, so that groups spread although their members stick together.
- A group's later members go where its first went (affinity), unless that replica's load exceeds the lightest
  eligible one's by more than SPILL_TOKENS (spill).

Returned tokens are mirrored too, so that the next turn of a conversation finds its replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from broker.blocks import BLOCK, chain
from broker.messages import Ids

SPILL_TOKENS = 8192
"""A group leaves its replica once that has this much more work than the lightest: about a full batch of 64 replies."""

DECODE_COST = 4.0
"""One sampled token costs about as much as this many prefilled ones, in a full batch."""

GROUPS_REMEMBERED = 65_536
"""Groups whose replica is remembered, newest first."""

TYPICAL_WORK = 1024.0
"""The work of a request of which only its id is known, in prefill tokens, until a first one was placed here."""

RESERVATION_SECONDS = 30.0
"""Siblings that have not come by then are not coming: their reservation is given back."""

Kind = Literal["affinity", "spill", "unmatched"]
"""affinity: it went where its group or its prefix lies. spill: it had such a place and was sent elsewhere. unmatched:
no replica had anything of it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What placement needs to know of a generation request. `prompt` is int32 [n]."""

    id: str
    group: str
    siblings: int
    adapter: str | None
    prompt: Ids
    expected_output: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision. `cached` is how many prompt tokens the replica is believed to have."""

    replica: str
    kind: Kind
    cached: int


@dataclass
class _Assigned:
    replica: str
    work: float


@dataclass
class _Replica:
    confirmed: frozenset[str] = frozenset()
    accepts: bool = True
    mirror: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    mirror_blocks: int = 2048
    load: float = 0.0
    others: int = 0
    """Requests that it reports and that were not placed here."""


@dataclass
class _GroupPlace:
    replica: str
    missing: int
    reserved_each: float
    since: float


class Placer:
    """The state of one router: replicas, their mirrored caches and their load."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._assigned: dict[str, _Assigned] = {}
        self._groups: OrderedDict[str, _GroupPlace] = OrderedDict()
        self._typical = TYPICAL_WORK
        self.placements: dict[Kind, int] = {"affinity": 0, "spill": 0, "unmatched": 0}

    # ---------------------------------------------------------------------------------------------- replica events

    def update_replica(self, replica: str, *, confirmed: Iterable[str], accepts: bool, cache_tokens: int) -> None:
        """A replica is there, or what it says of itself has changed."""
        state = self._replicas.setdefault(replica, _Replica())
        state.confirmed = frozenset(confirmed)
        state.accepts = accepts
        # A capacity of zero or less is nonsense; it then counts as the smallest cache worth mirroring.
        state.mirror_blocks = max(64, cache_tokens // BLOCK)
        while len(state.mirror) > state.mirror_blocks:
            state.mirror.popitem(last=False)

    def report_others(self, replica: str, count: int) -> None:
        """A replica also has `count` requests that were not placed here: another router's, or this one's before its
        start. Each counts as much as a request placed here on average.
        """
        state = self._replicas.get(replica)
        if state is not None:
            state.others = count

    def remove_replica(self, replica: str) -> list[str]:
        """A replica is gone; returns the ids of the requests it had, which must be placed anew."""
        self._replicas.pop(replica, None)
        for group in [name for name, place in self._groups.items() if place.replica == replica]:
            del self._groups[group]
        orphans = [id for id, assigned in self._assigned.items() if assigned.replica == replica]
        for id in orphans:
            del self._assigned[id]
        return orphans

    def replicas(self) -> list[str]:
        return sorted(self._replicas)

    def load(self, replica: str) -> float:
        """Work the replica is believed to have left, in prefill tokens, reservations included."""
        state = self._replicas.get(replica)
        return state.load + state.others * self._typical if state else 0.0

    # ---------------------------------------------------------------------------------------------------- requests

    def eligible(self, adapter: str | None) -> list[str]:
        """Replicas that may serve `adapter` now."""
        return [
            name
            for name, state in self._replicas.items()
            if state.accepts and (adapter is None or adapter in state.confirmed)
        ]

    def place(self, request: Request, now: float) -> Placement | None:
        """Choose a replica and count the request as its load; None when no replica is eligible."""
        candidates = self.eligible(request.adapter)
        if not candidates:
            return None
        blocks = chain(request.adapter, request.prompt)
        decode = request.expected_output * DECODE_COST
        matched = {name: self._matched(name, blocks) for name in candidates}
        prompt = len(request.prompt)

        def cost(name: str) -> float:
            return self.load(name) + (prompt - matched[name] * BLOCK)

        lightest = min(candidates, key=lambda name: (self.load(name), name))
        place = self._groups.get(request.group) if request.group else None
        if place is not None and place.replica in candidates:
            over = self.load(place.replica) - self.load(lightest)
            chosen, kind = (place.replica, "affinity") if over <= SPILL_TOKENS else (min(candidates, key=cost), "spill")
        else:
            place = None
            chosen = min(candidates, key=lambda name: (cost(name), name))
            best = max(matched.values())
            kind = "unmatched" if best == 0 else "affinity" if matched[chosen] == best else "spill"
        cached = matched[chosen] * BLOCK
        self._assign(request, chosen, blocks, prompt - cached + decode)
        self._reserve(request, chosen, place, decode, now)
        self.placements[kind] += 1  # type: ignore[index]
        return Placement(chosen, kind, cached)  # type: ignore[arg-type]

    def complete(self, id: str, output_blocks: Sequence[bytes] = ()) -> bool:
        """A request has ended, whatever its outcome, leaving `output_blocks` cached. False when it is unknown."""
        assigned = self._assigned.pop(id, None)
        if assigned is None:
            return False
        state = self._replicas.get(assigned.replica)
        if state is not None:
            state.load = max(0.0, state.load - assigned.work)
            self._mirror(state, output_blocks)
        return True

    def assigned_to(self, id: str) -> str | None:
        found = self._assigned.get(id)
        return found.replica if found else None

    def assigned(self, replica: str) -> list[str]:
        """The ids of the requests the replica is believed to have."""
        return [id for id, assigned in self._assigned.items() if assigned.replica == replica]

    def expire(self, now: float) -> None:
        """Give back reservations whose siblings never came."""
        for place in self._groups.values():
            if place.missing > 0 and now - place.since > RESERVATION_SECONDS:
                self._release(place)

    # ----------------------------------------------------------------------------------------------------- private

    def _matched(self, replica: str, blocks: Sequence[bytes]) -> int:
        mirror = self._replicas[replica].mirror
        for count, block in enumerate(blocks):
            if block not in mirror:
                return count
        return len(blocks)

    def _assign(self, request: Request, replica: str, blocks: Sequence[bytes], work: float) -> None:
        state = self._replicas[replica]
        state.load += work
        self._typical = 0.95 * self._typical + 0.05 * work
        self._assigned[request.id] = _Assigned(replica, work)
        self._mirror(state, blocks)

    @staticmethod
    def _mirror(state: _Replica, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            state.mirror[block] = None
            state.mirror.move_to_end(block)
        while len(state.mirror) > state.mirror_blocks:
            state.mirror.popitem(last=False)

    def _reserve(self, request: Request, replica: str, place: _GroupPlace | None, each: float, now: float) -> None:
        """Count the missing siblings when the first member lands; give back one share as each of them arrives."""
        if not request.group or request.siblings < 2:
            return
        if place is not None:
            if place.missing > 0:
                place.missing -= 1
                home = self._replicas.get(place.replica)
                if home is not None:
                    home.load = max(0.0, home.load - place.reserved_each)
            return
        missing = request.siblings - 1
        self._replicas[replica].load += missing * each
        self._groups[request.group] = _GroupPlace(replica, missing, each, now)
        while len(self._groups) > GROUPS_REMEMBERED:
            _, old = self._groups.popitem(last=False)
            self._release(old)

    def _release(self, place: _GroupPlace) -> None:
        home = self._replicas.get(place.replica)
        if home is not None and place.missing > 0:
            home.load = max(0.0, home.load - place.missing * place.reserved_each)
        place.missing = 0
