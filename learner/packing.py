"""Packing: the token sequences of a step as few full rows without padding, every shared beginning computed once.

The sequences of a group form a prefix tree: replies share their prompt, an agent's forked turns share what they have
in common, as deep as that goes. A row holds such trees in preorder, cut into *segments*; a segment sees itself,
causally, and the segments on its way to the root, and its positions go on where its parent ends. So
`[prompt, reply 1, reply 2]` costs the prompt once and gives each reply the same numbers as `[prompt, reply]` alone.

Every trained token appears exactly once among the rows' targets, and packing the same sequences twice gives the same
rows. What follows a sequence's last predicting token is not computed at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.messages import Floats, Ids

Indices = npt.NDArray[np.int64]

MIN_SAVED = 4
"""A common beginning is computed once if that saves at least this many tokens; a segment is not free."""

MAX_REPEATED = 0.02
"""The share of a step's tokens that may be computed twice (the prompts of replies that move) to fill rows."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence to train on or to score.

    `token_ids` int32 [n]; `behaviour` float32 [n], the logprobs when sampled; `trained` bool [n], which tokens were
    sampled (never the first: nothing predicts it). `advantage` and `weight` hold for each of its trained tokens.
    Only sequences of one `group` share prompts. `staleness` int [n]: how many versions old the policy was that sampled
    each token; None: fresh. Sequences of one `episode` count as one; empty: this one counts by itself.
    """

    token_ids: Ids
    behaviour: Floats
    trained: npt.NDArray[np.bool_]
    advantage: float
    group: str
    weight: float = 1.0
    staleness: npt.NDArray[np.integer[Any]] | None = None
    episode: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of a row. `parent`: the index of the segment that they go on from; None for a root."""

    start: int
    stop: int
    parent: int | None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One forward and backward pass: n tokens in, m trained tokens out. All indices count within the row."""

    token_ids: Indices
    """[n]"""
    position_ids: Indices
    """[n], each token's place in its own sequence"""
    segments: tuple[Segment, ...]
    """They cover [0, n) in preorder: a segment stands before its children, and what descends from it is contiguous."""
    predictor: Indices
    """[m], the token whose logits predict the trained one"""
    target: Indices
    """[m], the trained token's id"""
    behaviour: Floats
    """[m]"""
    advantage: Floats
    """[m]"""
    weight: Floats
    """[m]"""
    staleness: Indices
    """[m]"""
    sequence: Indices
    """[m], which of the packed sequences it belongs to"""
    offset: Indices
    """[m], where in that sequence it stands"""

    def __len__(self) -> int:
        return len(self.token_ids)

    def family_ends(self) -> Indices:
        """Of each segment, where the last of its descendants ends; [segments]."""
        ends = np.asarray([segment.stop for segment in self.segments], dtype=np.int64)
        for index in range(len(self.segments) - 1, -1, -1):
            parent = self.segments[index].parent
            if parent is not None:
                ends[parent] = max(ends[parent], ends[index])
        return ends

    def seen_until(self) -> Indices:
        """[n]: token k is seen by the tokens from k up to here, and by no others."""
        return np.repeat(self.family_ends(), [len(segment) for segment in self.segments])

    def visible(self) -> npt.NDArray[np.bool_]:
        """The attention mask, bool [n, n]: True where the token of this row sees the token of this column."""
        tokens = np.arange(len(self))
        return _visible(tokens, tokens, self.seen_until())


@dataclass(frozen=True, slots=True)
class Tile:
    """Some neighbouring tokens as one piece of attention. Indices count within the row."""

    queries: Indices
    """[q], contiguous"""
    keys: Indices
    """[k], what they see before the first query, then the queries themselves"""
    visible: npt.NDArray[np.bool_]
    """[q, k], which query sees which key"""


@dataclass(frozen=True, slots=True)
class Packing:
    """The rows of one step, and what they cost."""

    rows: tuple[PackedRow, ...]
    token_budget: int
    plain_tokens: int
    """What the sequences hold, one by one and whole."""

    @property
    def computed_tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def trained_tokens(self) -> int:
        return sum(len(row.target) for row in self.rows)

    @property
    def saved_tokens(self) -> int:
        """Tokens that need no computation: shared beginnings, and what nothing is predicted from."""
        return self.plain_tokens - self.computed_tokens

    @property
    def fill(self) -> float:
        """Computed tokens over what the rows had room for; a row that exceeds the budget counts as full."""
        room = sum(max(self.token_budget, len(row)) for row in self.rows)
        return self.computed_tokens / room if room else 0.0


def pack(sequences: Sequence[TokenSequence], token_budget: int) -> Packing:
    """Pack `sequences` into rows of at most `token_budget` tokens.

    A tree too large for one row is split and repeats what its parts share; a sequence longer than the budget gets a
    longer row of its own. A sequence without trained tokens costs nothing.

    Raises ValueError when a sequence's arrays differ in length or its first token is to be trained on.
    """
    groups: dict[str, list[_Member]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        shapes = (len(sequence.token_ids), len(sequence.behaviour), len(sequence.trained))
        if len(set(shapes)) != 1:
            raise ValueError(f"sequence {index}: ids, logprobs and mask must have one length, got {shapes}")
        trained = np.flatnonzero(sequence.trained)
        if not len(trained):
            continue
        if trained[0] == 0:
            raise ValueError(f"sequence {index}: its first token cannot be trained on, nothing predicts it")
        groups[sequence.group].append(_Member(index, sequence.token_ids[: trained[-1]]))
    forest = _Forest()
    blocks = []
    for members in groups.values():
        for tree in _alike(members, 0, 0):
            forest.plant(tree)
            blocks += _blocks(forest, [member.index for member in tree], token_budget)
    rows = _empty_some(_best_fit(blocks, token_budget), token_budget)
    return Packing(
        rows=tuple(_lay_out(sequences, forest, row) for row in rows),
        token_budget=token_budget,
        plain_tokens=sum(len(sequence.token_ids) for sequence in sequences),
    )


# ------------------------------------------------------------------------------------------------------------- the tree


@dataclass(frozen=True, slots=True)
class _Member:
    """Sequence `index` of those packed, and its computed tokens."""

    index: int
    tokens: Ids


@dataclass(frozen=True, slots=True)
class _Node:
    """Tokens [start, stop) of sequence `source`, and of every other whose path leads through here."""

    source: int
    start: int
    stop: int
    parent: int | None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class _Forest:
    """Prefix trees of several groups. A sequence is a path of nodes, from a root to where it ends."""

    nodes: list[_Node] = field(default_factory=list)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def plant(self, members: Sequence[_Member], start: int = 0, above: tuple[int, ...] = ()) -> None:
        """Grow what `members`, which agree up to `start` on the nodes `above` and go on alike, add to the forest."""
        stop = _agree_until(members, start)
        node = len(self.nodes)
        self.nodes.append(_Node(members[0].index, start, stop, above[-1] if above else None))
        path = (*above, node)
        for member in members:
            if len(member.tokens) == stop:
                self.paths[member.index] = path
        for lot in _alike([member for member in members if len(member.tokens) > stop], stop, stop):
            self.plant(lot, stop, path)


def _agree_until(members: Sequence[_Member], start: int) -> int:
    """How far the tokens of `members`, which agree up to `start`, are the same."""
    first = members[0].tokens
    stop = len(first)
    for member in members[1:]:
        stop = min(stop, len(member.tokens))
        differing = np.flatnonzero(first[start:stop] != member.tokens[start:stop])
        if len(differing):
            stop = start + int(differing[0])
    return stop


def _alike(members: Sequence[_Member], start: int, at: int) -> Iterator[list[_Member]]:
    """Lots of members whose common tokens from `start` on are worth sharing; alone where they are not.

    All of `members` agree on [start, at).
    """
    by_token: dict[int, list[_Member]] = defaultdict(list)
    for member in members:
        if len(member.tokens) == at:
            yield [member]
        else:
            by_token[int(member.tokens[at])].append(member)
    for lot in by_token.values():
        stop = _agree_until(lot, at)
        if len(lot) == 1 or (len(lot) - 1) * (stop - start) >= MIN_SAVED:
            yield lot
        else:
            yield from _alike(lot, start, stop)


# ------------------------------------------------------------------------------------------------------------- the rows


@dataclass(slots=True)
class _Row:
    """A row in the making: some sequences, and the nodes that their paths need."""

    forest: _Forest
    members: list[int] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
    size: int = 0

    def cost(self, member: int) -> int:
        """Tokens that `member` would add."""
        return sum(len(self.forest.nodes[node]) for node in self.forest.paths[member] if node not in self.nodes)

    def add(self, member: int) -> None:
        self.size += self.cost(member)
        self.nodes.update(self.forest.paths[member])
        self.members.append(member)

    def copy(self) -> _Row:
        return _Row(self.forest, list(self.members), set(self.nodes), self.size)


def _blocks(forest: _Forest, members: Sequence[int], token_budget: int) -> list[_Row]:
    """A tree as one block, or as several that fit the budget where it does not."""
    whole = _Row(forest)
    for member in members:
        whole.add(member)
    if whole.size <= token_budget:
        return [whole]
    blocks: list[_Row] = []
    for member in _longest_first(forest, members):
        if not _put(blocks, member, token_budget):
            blocks.append(_Row(forest))
            blocks[-1].add(member)
    return blocks


def _longest_first(forest: _Forest, members: Iterable[int]) -> list[int]:
    return sorted(members, key=lambda member: -_Row(forest).cost(member))


def _put(rows: Iterable[_Row], member: int, token_budget: int) -> bool:
    """Add `member` to the row with room in which it costs least, and of those to the fullest. Tells whether one had."""
    costs = [(row.cost(member), row) for row in rows]
    fitting = [(cost, row) for cost, row in costs if row.size + cost <= token_budget]
    if not fitting:
        return False
    _, row = min(fitting, key=lambda pair: (pair[0], -pair[1].size))
    row.add(member)
    return True


def _best_fit(blocks: Sequence[_Row], token_budget: int) -> list[_Row]:
    """Best-fit-decreasing bin packing of whole blocks."""
    rows: list[_Row] = []
    for block in sorted(blocks, key=lambda block: -block.size):
        fitting = [row for row in rows if row.size + block.size <= token_budget]
        if fitting:
            row = max(fitting, key=lambda row: row.size)
        else:
            row = _Row(block.forest)
            rows.append(row)
        for member in block.members:
            row.add(member)
    return rows


def _empty_some(rows: list[_Row], token_budget: int) -> list[_Row]:
    """Move the sequences of the emptiest row into the gaps of the others, and so on while all of them find one."""
    allowed = int(MAX_REPEATED * sum(row.size for row in rows))
    while len(rows) > 1:
        emptiest = min(rows, key=lambda row: row.size)
        others = [row.copy() for row in rows if row is not emptiest]
        before = sum(row.size for row in rows)
        moving = _longest_first(emptiest.forest, emptiest.members)
        if not all(_put(others, member, token_budget) for member in moving):
            break
        allowed -= sum(row.size for row in others) - before
        if allowed < 0:
            break
        rows = others
    return rows


def _lay_out(sequences: Sequence[TokenSequence], forest: _Forest, row: _Row) -> PackedRow:
    """Write a row's trees in preorder. A node with one child in this row is one segment with it."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for node in sorted(row.nodes):
        children[forest.nodes[node].parent].append(node)
    token_ids: list[Ids] = []
    position_ids: list[Indices] = []
    segments: list[Segment] = []
    begins: dict[int, int] = {}
    length = 0
    waiting: list[tuple[int, int | None]] = [(node, None) for node in reversed(children[None])]
    while waiting:
        node, parent = waiting.pop()
        start = length
        while True:
            found = forest.nodes[node]
            begins[node] = length
            token_ids.append(sequences[found.source].token_ids[found.start : found.stop])
            position_ids.append(np.arange(found.start, found.stop))
            length += len(found)
            if len(children[node]) != 1:
                break
            node = children[node][0]
        segments.append(Segment(start, length, parent))
        waiting += [(child, len(segments) - 1) for child in reversed(children[node])]

    order = sorted(row.members)
    offset = [np.flatnonzero(sequences[index].trained) for index in order]
    predictor = []
    for index, trained in zip(order, offset, strict=True):
        path = [(forest.nodes[node], begins[node]) for node in forest.paths[index]]
        places = np.concatenate([np.arange(begin, begin + len(node)) for node, begin in path])
        predictor.append(places[trained - 1])
    counts = [len(trained) for trained in offset]

    def per_token(values: Sequence[float]) -> Floats:
        return np.repeat(np.asarray(values, dtype=np.float32), counts)

    def at_trained(arrays: Iterable[npt.NDArray[Any]], dtype: type[Any]) -> npt.NDArray[Any]:
        return np.concatenate([array[trained] for array, trained in zip(arrays, offset, strict=True)]).astype(dtype)

    return PackedRow(
        token_ids=np.concatenate(token_ids).astype(np.int64),
        position_ids=np.concatenate(position_ids).astype(np.int64),
        segments=tuple(segments),
        predictor=np.concatenate(predictor),
        target=at_trained((sequences[index].token_ids for index in order), np.int64),
        behaviour=at_trained((sequences[index].behaviour for index in order), np.float32),
        advantage=per_token([sequences[index].advantage for index in order]),
        weight=per_token([sequences[index].weight for index in order]),
        staleness=at_trained((_staleness(sequences[index]) for index in order), np.int64),
        sequence=np.repeat(np.asarray(order, dtype=np.int64), counts),
        offset=np.concatenate(offset),
    )


def _staleness(sequence: TokenSequence) -> npt.NDArray[np.integer[Any]]:
    return np.zeros(len(sequence.token_ids), dtype=np.int64) if sequence.staleness is None else sequence.staleness


# ------------------------------------------------------------------------------------------------------------ attention


def tiles(row: PackedRow, limit: int) -> list[Tile]:
    """Cut a row's attention into tiles of at most `limit` queries, unless one root alone is longer.

    Attention over a whole row would cost its length squared, nearly all of it masked out. Over tiles it costs the
    length times `limit` and what lies above; short segments share a tile, long ones are cut. A long root stays whole:
    it is plainly causal, which kernels do best.
    """
    segments, ends, until = row.segments, row.family_ends(), row.seen_until()
    cuts = [0]
    for segment, end in zip(segments, ends, strict=True):
        wanted = end if end - segment.start <= limit else segment.stop
        if wanted - cuts[-1] > limit and segment.start > cuts[-1]:
            cuts.append(segment.start)
        if len(segment) > limit and segment.parent is not None:
            cuts += range(segment.start + limit, segment.stop, limit)
    cut = []
    holder = np.repeat(np.arange(len(segments)), [len(segment) for segment in segments])
    for start, stop in zip(cuts, [*cuts[1:], len(row)], strict=True):
        queries = np.arange(start, stop)
        # Preorder: whatever a later query sees before the first one, the first one sees too.
        above: list[Indices] = []
        index: int | None = int(holder[start])
        while index is not None:
            above.append(np.arange(segments[index].start, min(start, segments[index].stop)))
            index = segments[index].parent
        keys = np.concatenate([*reversed(above), queries])
        cut.append(Tile(queries, keys, _visible(queries, keys, until)))
    return cut


def _visible(queries: Indices, keys: Indices, until: Indices) -> npt.NDArray[np.bool_]:
    """Which query sees which key: those up to itself, of its own way to the root."""
    mask: npt.NDArray[np.bool_] = (keys <= queries[:, None]) & (queries[:, None] < until[keys])
    return mask
