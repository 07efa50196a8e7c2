"""Packing: the token sequences of a step as few rows without padding, every shared prompt computed once.

A row is a chain of segments. A *root* sees only itself, causally. A suffix also sees its *prefix*: the root that holds
the prompt which it shares with its siblings; its positions go on where the prefix ends. So `[prompt, reply 1, reply 2]`
costs the prompt once and gives each reply the same numbers as `[prompt, reply]` alone would.

Every trained token appears exactly once among the rows' targets, and packing the same sequences twice gives the same
rows. What follows a sequence's last predicting token is not computed at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from broker.messages import Floats, Ids

Indices = npt.NDArray[np.int64]
T = TypeVar("T")


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
    """Tokens [start, stop) of a row. `prefix`: the index of the segment that they also see; None for a root."""

    start: int
    stop: int
    prefix: int | None

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
    """They cover [0, n) in order; a prefix stands before its suffixes."""
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

    def visible(self) -> npt.NDArray[np.bool_]:
        """The attention mask, bool [n, n]: True where the token of this row sees the token of this column."""
        return _visible(self.segments, range(len(self.segments)), None)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some whole segments of a row as one piece of attention. Indices count within the row."""

    queries: Indices
    """[q], the segments' tokens, which are contiguous"""
    keys: Indices
    """[k], the tokens of a prefix that stands elsewhere, if there is one, then the queries' own"""
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
        """Tokens that need no computation: shared prompts, and what nothing is predicted from."""
        return self.plain_tokens - self.computed_tokens

    @property
    def fill(self) -> float:
        """Computed tokens over what the rows had room for; a row that exceeds the budget counts as full."""
        room = sum(max(self.token_budget, len(row)) for row in self.rows)
        return self.computed_tokens / room if room else 0.0


@dataclass(frozen=True, slots=True)
class _Member:
    """Sequence `index`, of which the first `last` tokens are computed; sampling starts at `first`."""

    index: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Members that share their first `prefix` tokens. The unit that is placed in a row."""

    prefix: int
    members: tuple[_Member, ...]

    def __len__(self) -> int:
        return self.prefix + sum(member.last - self.prefix for member in self.members)


def pack(sequences: Sequence[TokenSequence], token_budget: int) -> Packing:
    """Pack `sequences` into rows of at most `token_budget` tokens.

    First-fit-decreasing. A group too large for one row is split and repeats its prompt; a sequence longer than the
    budget gets a longer row of its own. A sequence without trained tokens costs nothing.

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
        groups[sequence.group].append(_Member(index, int(trained[0]), int(trained[-1])))
    blocks = [
        block
        for members in groups.values()
        for prefix, sharing in _by_prompt(sequences, members)
        for block in _split(prefix, sharing, token_budget)
    ]
    rows = _first_fit(blocks, [len(block) for block in blocks], token_budget)
    return Packing(
        rows=tuple(_lay_out(sequences, row) for row in rows),
        token_budget=token_budget,
        plain_tokens=sum(len(sequence.token_ids) for sequence in sequences),
    )


def _by_prompt(sequences: Sequence[TokenSequence], members: Sequence[_Member]) -> list[tuple[int, list[_Member]]]:
    """Which members of a group share a prompt: (its length, they).

    A member that is alone with its prompt (its history was rewritten, say) joins the longest prompt of the others
    that its own begins with.
    """
    by_prompt: dict[bytes, list[_Member]] = defaultdict(list)
    for member in members:
        by_prompt[np.ascontiguousarray(sequences[member.index].token_ids[: member.first]).tobytes()].append(member)
    shared: dict[bytes, list[_Member]] = {}
    for prompt in sorted(by_prompt, key=len):
        hosts = [host for host in shared if prompt.startswith(host)] if len(by_prompt[prompt]) == 1 else []
        shared.setdefault(max(hosts, key=len, default=prompt), []).extend(by_prompt[prompt])
    return [(sharing[0].first, sharing) for sharing in shared.values()]


def _split(prefix: int, members: Sequence[_Member], token_budget: int) -> list[_Block]:
    """Members of one prompt as blocks that fit the budget. A member alone is one root, without a prefix."""
    lots = _first_fit(members, [member.last - prefix for member in members], max(0, token_budget - prefix))
    return [_Block(prefix if len(lot) > 1 else 0, tuple(sorted(lot, key=lambda m: m.index))) for lot in lots]


def _first_fit(items: Sequence[T], sizes: Sequence[int], room: int) -> list[list[T]]:
    """First-fit-decreasing bin packing. What is larger than `room` gets a bin of its own."""
    bins: list[list[T]] = []
    left: list[int] = []
    for index in sorted(range(len(items)), key=lambda i: -sizes[i]):
        chosen = next((b for b, free in enumerate(left) if sizes[index] <= free), None)
        if chosen is None:
            bins.append([])
            left.append(room)
            chosen = len(bins) - 1
        bins[chosen].append(items[index])
        left[chosen] -= sizes[index]
    return bins


def _lay_out(sequences: Sequence[TokenSequence], blocks: Sequence[_Block]) -> PackedRow:
    """Write blocks one after the other into a row."""
    token_ids: list[Ids] = []
    position_ids: list[Indices] = []
    segments: list[Segment] = []
    predictor: list[Indices] = []
    offset: list[Indices] = []
    order: list[int] = []
    length = 0

    def append(tokens: Ids, position: int, prefix: int | None) -> None:
        nonlocal length
        if len(tokens):
            token_ids.append(tokens)
            position_ids.append(np.arange(position, position + len(tokens)))
            segments.append(Segment(length, length + len(tokens), prefix))
            length += len(tokens)

    for block in blocks:
        prefix, prefix_start = None, length
        if block.prefix:
            append(sequences[block.members[0].index].token_ids[: block.prefix], 0, None)
            prefix = len(segments) - 1
        for member in block.members:
            own_start = length
            append(sequences[member.index].token_ids[block.prefix : member.last], block.prefix, prefix)
            trained = np.flatnonzero(sequences[member.index].trained)
            before = trained - 1
            in_prefix = before < block.prefix
            predictor.append(np.where(in_prefix, prefix_start + before, own_start + before - block.prefix))
            offset.append(trained)
            order.append(member.index)

    def per_token(values: Sequence[float]) -> Floats:
        return np.repeat(np.asarray(values, dtype=np.float32), [len(trained) for trained in offset])

    return PackedRow(
        token_ids=np.concatenate(token_ids).astype(np.int64),
        position_ids=np.concatenate(position_ids).astype(np.int64),
        segments=tuple(segments),
        predictor=np.concatenate(predictor),
        target=np.concatenate([sequences[i].token_ids[at] for i, at in zip(order, offset, strict=True)]).astype(
            np.int64
        ),
        behaviour=np.concatenate([sequences[i].behaviour[at] for i, at in zip(order, offset, strict=True)]).astype(
            np.float32
        ),
        advantage=per_token([sequences[i].advantage for i in order]),
        weight=per_token([sequences[i].weight for i in order]),
        staleness=np.concatenate([_staleness(sequences[i], at) for i, at in zip(order, offset, strict=True)]),
        sequence=np.repeat(np.asarray(order, dtype=np.int64), [len(trained) for trained in offset]),
        offset=np.concatenate(offset),
    )


def _staleness(sequence: TokenSequence, at: Indices) -> Indices:
    return np.zeros_like(at) if sequence.staleness is None else sequence.staleness[at].astype(np.int64)


def tiles(row: PackedRow, limit: int) -> list[Tile]:
    """Cut a row's attention into tiles of whole segments, at most `limit` tokens each unless one segment is longer.

    Attention over a whole row would cost its length squared, nearly all of it masked out. Over tiles it costs the
    length times `limit`, and short segments still share a call.
    """
    segments = row.segments
    families = Counter({index: len(segment) for index, segment in enumerate(segments)})
    for segment in segments:
        if segment.prefix is not None:
            families[segment.prefix] += len(segment)
    starts = [0]
    for index, segment in enumerate(segments[1:], start=1):
        wanted = families[index] if families[index] <= limit else len(segment)
        if segment.start + wanted - segments[starts[-1]].start > limit:
            starts.append(index)

    cut: list[Tile] = []
    for first, after in zip(starts, [*starts[1:], len(segments)], strict=True):
        # A family is contiguous, so all of a tile's segments whose prefix stands before it have the same prefix.
        outside = segments[first].prefix
        queries = np.arange(segments[first].start, segments[after - 1].stop)
        held = np.arange(0) if outside is None else np.arange(segments[outside].start, segments[outside].stop)
        keys = np.concatenate([held, queries])
        cut.append(Tile(queries, keys, _visible(segments, range(first, after), outside)))
    return cut


def _visible(segments: Sequence[Segment], chosen: range, outside: int | None) -> npt.NDArray[np.bool_]:
    """What the `chosen` segments see: bool [their tokens, tokens of segment `outside` (if any) + their tokens]."""
    start, stop = segments[chosen[0]].start, segments[chosen[-1]].stop
    held = 0 if outside is None else len(segments[outside])
    mask = np.zeros((stop - start, held + stop - start), dtype=np.bool_)
    for index in chosen:
        segment = segments[index]
        own = slice(segment.start - start, segment.stop - start)
        mask[own, held + own.start : held + own.stop] = np.tri(len(segment), dtype=np.bool_)
        if segment.prefix is None:
            continue
        if segment.prefix == outside:
            mask[own, :held] = True
        else:
            prefix = segments[segment.prefix]
            mask[own, held + prefix.start - start : held + prefix.stop - start] = True
    return mask
