"""What each replica's prefix cache is believed to hold. Pure: no task, no socket, no clock.

State. One radix tree over all replicas, for each space (an adapter and a cache salt). Its nodes are *runs*: blocks that
follow each other without a fork, as the concatenated hashes of `broker.blocks`. A block's hash covers everything
before it, so a run is found by its first block's hash alone. A *hold* says that a replica has the first so many blocks
of a run. The holds of one replica are a list in order of use: its mirror.

Rules.
- A mirror holds at most `limit` blocks, and its runs and holds take at most BLOCK_BYTES for each block of its limit,
  whatever the prompts look like. The replica's capacity is the limit's upper bound.
- What was used longest ago goes first. A prompt is used from its end to its beginning, so that ends go before
  beginnings, as in the engine, and a hold without the holds before it never is.
- *Correction.* Blocks that a request which has ended went through are settled: they were computed. A reply that found
  fewer cached than are settled shrinks the limit; one that found more than believed lets it grow back. Where an engine
  publishes what it removes, those blocks count as gone until they are sent there again.
- *Fork.* A run forks when prompts went on from it in two ways: two runs, or two remainders behind its last full block.
  Sampled continuations do not count: a prompt does not become common because it was answered eight times. Nor does it
  count how many replicas have a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from broker.blocks import HASH

BLOCK_BYTES = 100
"""Memory that a mirror may take for each block of its limit."""

RUN_BYTES = 320
"""Memory of a run without its hashes: object, index entry and its key. A test measures that this is enough."""

HOLD_BYTES = 160
"""Memory of a hold, and of its entry in its run where several replicas have it."""

GONE_BYTES = 160
"""Memory of a block that an engine said it removed, at worst."""

GONE_SHARE = 16
"""At most one block in this many of a mirror's limit is remembered as gone."""

SHRINK = 0.95
"""A limit's factor at each reply that found less than was settled. Fourteen such replies halve it."""

GROW = 1.01
"""A limit's factor at each reply that found more than was believed."""

LEAST_LIMIT = 64
"""Blocks that are mirrored of each replica at least."""


class Run:
    """Blocks without a fork between them."""

    __slots__ = ("asked", "children", "forks", "hashes", "holds", "parent", "remainder", "remainders")

    def __init__(self, hashes: bytes, parent: Run | None, *, asked: bool) -> None:
        self.hashes = hashes
        self.parent = parent
        self.asked = asked
        """Whether a prompt went this way, and not only a continuation."""
        self.children = 0
        self.forks = 0
        """How many runs that prompts went on with follow it."""
        self.remainder = 0
        """A hash of what the first prompt that ended here had behind its last full block."""
        self.remainders = 0
        """How many different ones there were; 2 stands for more."""
        self.holds: Hold | dict[int, Hold] | None = None

    @property
    def forked(self) -> bool:
        return self.forks > 1 or self.remainders > 1

    def hold_of(self, slot: int) -> Hold | None:
        holds = self.holds
        if holds is None:
            return None
        if isinstance(holds, dict):
            return holds.get(slot)
        return holds if holds.slot == slot else None

    def holders(self) -> Iterator[Hold]:
        holds = self.holds
        if holds is None:
            return iter(())
        return iter(holds.values()) if isinstance(holds, dict) else iter((holds,))

    def add(self, hold: Hold) -> None:
        holds = self.holds
        if holds is None:
            self.holds = hold
        elif isinstance(holds, dict):
            holds[hold.slot] = hold
        else:
            self.holds = {holds.slot: holds, hold.slot: hold}

    def discard(self, slot: int) -> None:
        holds = self.holds
        if isinstance(holds, dict):
            holds.pop(slot, None)
            if len(holds) == 1:
                self.holds = next(iter(holds.values()))
        else:
            self.holds = None


class Hold:
    """One replica has the first `blocks` blocks of a run; of those the first `settled` were surely computed."""

    __slots__ = ("blocks", "newer", "older", "run", "settled", "slot", "space")

    run: Run
    newer: Hold
    older: Hold

    def __init__(self, slot: int, blocks: int, space: Space) -> None:
        self.slot = slot
        self.blocks = blocks
        self.settled = 0
        self.space = space


class Space:
    """The runs of one adapter, by their first block's hash."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: dict[bytes, Run] = {}


class _Mirror:
    """The holds of one replica, from the one used longest ago (`ends.newer`) to the one used last (`ends.older`)."""

    __slots__ = ("blocks", "bytes", "capacity", "ends", "gone", "learned")

    def __init__(self, slot: int, space: Space) -> None:
        self.ends = Hold(slot, 0, space)
        self.ends.newer = self.ends.older = self.ends
        self.blocks = 0
        self.bytes = 0
        self.capacity = LEAST_LIMIT
        self.learned = float(LEAST_LIMIT)
        """Blocks that the replica really keeps, as far as its replies have told."""
        self.gone: set[bytes] = set()

    def link(self, hold: Hold, before: Hold) -> None:
        """Put `hold` right before `before`, in order of use."""
        older = before.older
        hold.older, hold.newer = older, before
        older.newer = before.older = hold

    @staticmethod
    def unlink(hold: Hold) -> None:
        hold.older.newer = hold.newer
        hold.newer.older = hold.older

    def use(self, hold: Hold) -> None:
        if hold.newer is not self.ends:
            self.unlink(hold)
            self.link(hold, self.ends)


class Match:
    """How a chain lies in the tree."""

    __slots__ = ("chain", "common", "common_run", "matched", "path", "remainder", "space", "starts")

    def __init__(self, space: str, chain: bytes, remainder: int) -> None:
        """`remainder`: a hash of the prompt's tokens behind its last full block, 0 where there are none."""
        self.space = space
        self.chain = chain
        self.remainder = remainder
        self.path: list[Run] = []
        """The runs that it goes through, in order; the last may be left early."""
        self.starts: list[int] = []
        """The place of each run's first hash in the chain, in bytes."""
        self.matched = 0
        """Leading blocks that some replica had when it was last used."""
        self.common = 0
        """Leading blocks that prompts share and that decide nothing: those before the last fork."""
        self.common_run: Run | None = None
        """The run in which they end."""


class Prefixes:
    """The mirrors of all replicas. Replicas are small integers, `slot`s; the caller numbers them."""

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes` bounds the accounted memory of all mirrors together: their limits shrink in proportion."""
        self.max_bytes = max_bytes
        self._spaces: dict[str, Space] = {}
        self._nowhere = Space()
        self._mirrors: dict[int, _Mirror] = {}
        self._runs = 0
        self._hashes = 0
        self._holds = 0
        self._share = 1.0

    # ------------------------------------------------------------------------------------------------------ replicas

    def add(self, slot: int, capacity: int) -> None:
        """A replica has a cache of `capacity` blocks; also when that has changed."""
        mirror = self._mirrors.get(slot)
        capacity = max(LEAST_LIMIT, capacity)
        if mirror is None:
            mirror = self._mirrors[slot] = _Mirror(slot, self._nowhere)
        elif mirror.capacity == capacity:
            return
        mirror.learned = float(capacity)
        mirror.capacity = capacity
        self._share_out()

    def remove(self, slot: int) -> None:
        """A replica is gone, and its cache with it."""
        self.clear(slot)
        if self._mirrors.pop(slot, None) is not None:
            self._share_out()

    def clear(self, slot: int) -> None:
        """A replica's cache is empty."""
        mirror = self._mirrors.get(slot)
        if mirror is None:
            return
        mirror.gone.clear()
        while mirror.ends.newer is not mirror.ends:
            self._drop(mirror, mirror.ends.newer)

    def forget(self, space: str) -> None:
        """Nobody will ask in this space again."""
        found = self._spaces.pop(space, None)
        if found is None:
            return
        for run in found.runs.values():
            for hold in run.holders():
                mirror = self._mirrors[hold.slot]
                mirror.unlink(hold)
                self._account(mirror, hold, -1)
            self._runs -= 1
            self._hashes -= len(run.hashes)

    # ------------------------------------------------------------------------------------------------------- reading

    def match(self, space: str, chain: bytes, remainder: int) -> Match:
        """Find what is known of a prompt. Takes time in the runs it goes through, not in its blocks."""
        found = Match(space, chain, remainder)
        here = self._spaces.get(space)
        if here is None:
            return found
        runs, path = here.runs, found.path
        at, end = 0, len(chain)
        while at < end:
            run = runs.get(chain[at : at + HASH])
            if run is None:
                if path and path[-1].forks:
                    found.common, found.common_run = at, path[-1]  # it would be the second way on from there
                break
            path.append(run)
            found.starts.append(at)
            hashes = run.hashes
            if chain.startswith(hashes, at):
                at += len(hashes)
                if run.forked:
                    found.common, found.common_run = at, run
                continue
            same = _agreement(chain, at, hashes)
            if at + same < end and run.asked:
                found.common, found.common_run = at + same, run
            at += same
            break
        else:
            if path and remainder and path[-1].remainder not in (0, remainder):
                found.common, found.common_run = at, path[-1]
        found.matched, found.common = at // HASH, found.common // HASH
        return found

    def depth(self, match: Match, slot: int) -> tuple[int, int]:
        """How many leading blocks of the matched chain the replica is believed to have, and how many of those it has
        surely computed.
        """
        depth = settled = 0
        sure = True
        for run in match.path:
            hold = run.hold_of(slot)
            if hold is None:
                break
            blocks = hold.blocks
            depth += blocks
            if sure:
                settled += hold.settled
                sure = hold.settled == blocks
            if blocks * HASH < len(run.hashes):
                break
        if depth > match.matched:
            depth = match.matched
        gone = self._mirrors[slot].gone
        if gone:
            while depth and match.chain[(depth - 1) * HASH : depth * HASH] in gone:
                depth -= 1
        return depth, min(settled, depth)

    def holders(self, match: Match) -> list[int]:
        """The replicas that have something of the chain behind its common part, those that have most first."""
        path, common = match.path, match.common
        found: list[int] = []
        if match.matched <= common:
            return found
        for number in range(len(path) - 1, -1, -1):
            run, start = path[number], match.starts[number] // HASH
            if start + len(run.hashes) // HASH <= common:
                break
            holds = run.holds
            if isinstance(holds, Hold):
                if start + holds.blocks > common and holds.slot not in found:
                    found.append(holds.slot)
            elif holds is not None:
                found += [slot for slot, hold in holds.items() if start + hold.blocks > common and slot not in found]
        return [slot for slot in found if not self._mirrors[slot].gone or self.depth(match, slot)[0] > common]

    # ------------------------------------------------------------------------------------------------------- changing

    def use(self, match: Match, slot: int) -> None:
        """The matched prompt goes to a replica, which will have all of it."""
        mirror = self._mirrors.get(slot)
        if mirror is not None and not mirror.gone and self._has_all(match, slot):
            for run in reversed(match.path):
                hold = run.hold_of(slot)
                assert hold is not None
                mirror.use(hold)
            return
        self._insert(match.space, match.chain, slot, asked=len(match.chain), remainder=match.remainder, settled=False)

    def settle(self, space: str, prompt: bytes, continuation: bytes, slot: int) -> None:
        """A request has ended at a replica: the blocks of its prompt and of its continuation were computed there."""
        self._insert(space, prompt + continuation, slot, asked=len(prompt), settled=True)

    def stored(self, space: str, chain: bytes, slot: int) -> None:
        """An engine said that it has this chain."""
        self._insert(space, chain, slot, asked=0, settled=True)

    def removed(self, hashes: Iterable[bytes], slot: int) -> None:
        """An engine said that it removed these blocks."""
        mirror = self._mirrors.get(slot)
        if mirror is None:
            return
        room = max(1, self._limit(mirror) // GONE_SHARE)
        for block in hashes:
            if len(mirror.gone) >= room:
                mirror.gone.pop()
            mirror.gone.add(block)

    def correct(self, slot: int, *, settled: int, believed: int, cached: int) -> None:
        """A reply found `cached` blocks where `believed` were mirrored, `settled` of them surely computed."""
        mirror = self._mirrors.get(slot)
        if mirror is None:
            return
        if cached + 1 < settled:
            mirror.learned = max(LEAST_LIMIT, min(mirror.learned, mirror.blocks) * SHRINK)
            self._trim(mirror)
        elif cached > believed:
            mirror.learned = min(mirror.capacity, mirror.learned * GROW)

    # ---------------------------------------------------------------------------------------------------------- size

    def blocks(self, slot: int) -> int:
        """Blocks mirrored of one replica."""
        mirror = self._mirrors.get(slot)
        return mirror.blocks if mirror else 0

    def limit(self, slot: int) -> int:
        """Blocks that may be mirrored of one replica now."""
        mirror = self._mirrors.get(slot)
        return self._limit(mirror) if mirror else 0

    def total_blocks(self) -> int:
        return sum(mirror.blocks for mirror in self._mirrors.values())

    def memory(self) -> int:
        """Bytes that the tree and the mirrors take, as accounted."""
        gone = sum(len(mirror.gone) for mirror in self._mirrors.values())
        return self._runs * RUN_BYTES + self._hashes + self._holds * HOLD_BYTES + gone * GONE_BYTES

    def spaces(self) -> list[str]:
        return list(self._spaces)

    # ------------------------------------------------------------------------------------------------------- private

    def _insert(self, space: str, chain: bytes, slot: int, *, asked: int, settled: bool, remainder: int = 0) -> None:
        """The replica has this chain. Its first `asked` bytes are a prompt's, those behind them a continuation's."""
        mirror = self._mirrors.get(slot)
        if mirror is None or not chain:
            return
        here = self._spaces.get(space)
        if here is None:
            here = self._spaces[space] = Space()
        runs = here.runs
        at, end = 0, len(chain)
        ends_inside = 0
        path: list[Hold] = []
        parent: Run | None = None
        while at < end:
            run = runs.get(chain[at : at + HASH])
            if run is None:
                prompted = at < asked
                more = chain[at:asked] if prompted else chain[at:]
                at += len(more)
                if parent is not None and self._extendable(parent, slot, prompted):
                    self._lengthen(mirror, parent, more)
                else:
                    run = self._new(here, more, parent, asked=prompted)
                    path.append(self._hold(mirror, run, len(more) // HASH, here))
                    parent = run
                continue
            if not chain.startswith(run.hashes, at):
                same = _agreement(chain, at, run.hashes)
                if at + same < end or remainder:  # a prompt that ends inside a run without a remainder tells nothing
                    run = self._split(here, run, same)
                else:
                    ends_inside = same // HASH
                    path.append(self._hold(mirror, run, ends_inside, here))
                    parent = None
                    break
            path.append(self._hold(mirror, run, len(run.hashes) // HASH, here))
            parent = run
            at += len(run.hashes)
        if remainder and parent is not None and parent.remainder != remainder:
            parent.remainder = parent.remainder or remainder
            parent.remainders = min(2, parent.remainders + 1)
        if settled:
            was_settled = path[-1].settled
            for hold in path:
                hold.settled = hold.blocks
            if ends_inside:
                path[-1].settled = max(was_settled, ends_inside)
        for hold in reversed(path):
            mirror.use(hold)
        if mirror.gone:
            for start in range(0, end, HASH):
                mirror.gone.discard(chain[start : start + HASH])
        self._trim(mirror)

    @staticmethod
    def _has_all(match: Match, slot: int) -> bool:
        """Whether the replica's holds cover the whole chain, run by run, and it tells nothing new."""
        path = match.path
        if not path or match.starts[-1] + len(path[-1].hashes) != len(match.chain):
            return False
        if match.matched * HASH != len(match.chain) or match.remainder not in (0, path[-1].remainder):
            return False
        last = path[-1].hold_of(slot)  # it has all before it too
        return last is not None and last.blocks * HASH == len(path[-1].hashes)

    @staticmethod
    def _extendable(run: Run, slot: int, asked: bool) -> bool:
        """Whether more can simply be appended to `run`: nothing else goes on from it, and nobody else has it."""
        holds = run.holds
        return (
            not run.children
            and not run.remainders
            and run.asked == asked
            and isinstance(holds, Hold)
            and holds.slot == slot
        )

    def _new(self, here: Space, hashes: bytes, parent: Run | None, *, asked: bool) -> Run:
        run = Run(hashes, parent, asked=asked)
        here.runs[hashes[:HASH]] = run
        if parent is not None:
            parent.children += 1
            parent.forks += asked
        self._runs += 1
        self._hashes += len(hashes)
        return run

    def _lengthen(self, mirror: _Mirror, run: Run, more: bytes) -> None:
        hold = run.holds
        assert isinstance(hold, Hold)
        self._account(mirror, hold, -1)
        run.hashes += more
        self._hashes += len(more)
        hold.blocks = len(run.hashes) // HASH
        self._account(mirror, hold, 1)

    def _hold(self, mirror: _Mirror, run: Run, blocks: int, here: Space) -> Hold:
        """The mirror's hold on at least the first `blocks` blocks of `run`."""
        slot = mirror.ends.slot
        hold = run.hold_of(slot)
        if hold is None:
            hold = Hold(slot, blocks, here)
            hold.run = run
            run.add(hold)
            mirror.link(hold, mirror.ends)
            self._account(mirror, hold, 1)
        elif hold.blocks < blocks:
            self._account(mirror, hold, -1)
            hold.blocks = blocks
            self._account(mirror, hold, 1)
        return hold

    def _account(self, mirror: _Mirror, hold: Hold, sign: int) -> None:
        mirror.blocks += sign * hold.blocks
        mirror.bytes += sign * (RUN_BYTES + HOLD_BYTES + hold.blocks * HASH)
        self._holds += sign

    def _split(self, here: Space, run: Run, size: int) -> Run:
        """Cut `run` after `size` bytes of hashes; returns the upper part, which is new."""
        upper = Run(run.hashes[:size], run.parent, asked=run.asked)
        upper.children = 1
        upper.forks = int(run.asked)
        run.hashes = run.hashes[size:]
        run.parent = upper
        here.runs[upper.hashes[:HASH]] = upper
        here.runs[run.hashes[:HASH]] = run
        self._runs += 1
        blocks = size // HASH
        for hold in list(run.holders()):
            mirror = self._mirrors[hold.slot]
            self._account(mirror, hold, -1)
            if hold.blocks <= blocks:
                run.discard(hold.slot)
                hold.run = upper
                upper.add(hold)
                self._account(mirror, hold, 1)
                continue
            first = Hold(hold.slot, blocks, here)
            first.run = upper
            first.settled = min(blocks, hold.settled)
            upper.add(first)
            mirror.link(first, hold.newer)
            hold.blocks -= blocks
            hold.settled = max(0, hold.settled - blocks)
            self._account(mirror, hold, 1)
            self._account(mirror, first, 1)
        if run.holds is None:
            self._remove_run(here, run)
        return upper

    def _drop(self, mirror: _Mirror, hold: Hold) -> None:
        """Forget a hold, and the run if nobody else has it."""
        mirror.unlink(hold)
        self._account(mirror, hold, -1)
        run = hold.run
        run.discard(hold.slot)
        if run.holds is None:
            self._remove_run(hold.space, run)

    def _remove_run(self, here: Space, run: Run) -> None:
        del here.runs[run.hashes[:HASH]]
        self._runs -= 1
        self._hashes -= len(run.hashes)
        parent = run.parent
        if parent is not None:
            parent.children -= 1
            parent.forks -= run.asked

    def _trim(self, mirror: _Mirror) -> None:
        """Evict until the mirror is within its limit, in blocks and in bytes."""
        limit = self._limit(mirror)
        room = limit * (BLOCK_BYTES - GONE_BYTES // GONE_SHARE)
        while mirror.blocks > limit or mirror.bytes > room:
            oldest = mirror.ends.newer
            over = mirror.blocks - limit
            if mirror.bytes <= room and over < oldest.blocks:
                self._account(mirror, oldest, -1)
                oldest.blocks -= over
                oldest.settled = min(oldest.settled, oldest.blocks)
                self._account(mirror, oldest, 1)
                self._shorten(oldest)
            else:
                self._drop(mirror, oldest)

    def _shorten(self, hold: Hold) -> None:
        """Blocks at a run's end that nobody has any more are forgotten."""
        run = hold.run
        if run.holds is hold and not run.children and hold.blocks * HASH < len(run.hashes):
            self._hashes -= len(run.hashes) - hold.blocks * HASH
            run.hashes = run.hashes[: hold.blocks * HASH]
            run.remainder, run.remainders = 0, 0

    def _limit(self, mirror: _Mirror) -> int:
        """Blocks that the mirror may have: what its replica keeps, within its part of `max_bytes`."""
        return int(min(mirror.learned, max(1.0, mirror.capacity * self._share)))

    def _share_out(self) -> None:
        capacity = sum(mirror.capacity for mirror in self._mirrors.values())
        self._share = min(1.0, self.max_bytes / (BLOCK_BYTES * capacity)) if capacity else 1.0
        for mirror in self._mirrors.values():
            self._trim(mirror)


def _agreement(chain: bytes, at: int, hashes: bytes) -> int:
    """Bytes of leading blocks in which `chain` from `at` on and `hashes` agree; they agree in the first.

    Hashes are chained: where two blocks are equal, all before them are.
    """
    low, high = HASH, min(len(chain) - at, len(hashes))
    while low < high:
        middle = (low + high + HASH) // (2 * HASH) * HASH
        if chain[at + middle - HASH : at + middle] == hashes[middle - HASH : middle]:
            low = middle
        else:
            high = middle - HASH
    return low
