"""The truth check: whether the policy that was sampled is the policy that was recorded.

The mean ratio cannot see a wrong adapter, since its expectation is 1 for any two policies. So some of each step's
sequences are scored under their recorded version and compared with the behaviour logprobs, token by token. The check
is made for each (version, replica) pair, so that one wrong replica among many is not averaged away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.messages import Floats
from broker.runspec import AlgorithmSection
from broker.trajectories import Episode, Row

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.08}
"""Largest mean difference that is rounding, in nats, by the base model's type, where the configuration names none.

Measured on SmolLM2-135M, 384 tokens each: in float32 2e-6 to 2e-5 between learner and vLLM, and between learner and the
embedded engine; in bfloat16 0.032 to 0.036 for either engine, with or without an adapter, so that 0.08 is what the same
policy never reached and another one soon does. What differs by less than that, two neighbouring versions at a small
learning rate, cannot be told apart in bfloat16: there the probe alone speaks for the engine.
"""

TAILS = {"float32": 1.0, "bfloat16": 5.0}
"""How far the 99th percentile may exceed the bound on the mean: it was 0.17 to 0.24 in bfloat16, the largest 0.31."""


def tolerance_of(algorithm: AlgorithmSection, dtype: str) -> float:
    """The bound on the mean difference in a run whose base model computes in `dtype`."""
    return algorithm.truth_tolerance or TOLERANCES[dtype]


@dataclass(frozen=True, slots=True)
class Span:
    """The trained tokens of one row that one replica sampled under one version.

    `episode` and `row` are places in what `spans` was given; `tokens` [k] are places among the row's trained tokens.
    """

    episode: int
    row: int
    version: int
    replica: str
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Difference:
    """|recorded - recomputed| over `tokens` tokens, in nats."""

    mean: float
    percentile99: float
    tokens: int


@dataclass(frozen=True, slots=True)
class TruthReport:
    """The differences of a step: over all scored tokens, and for each (version, replica)."""

    overall: Difference
    pairs: dict[tuple[int, str], Difference]


def spans(episodes: Sequence[Episode]) -> list[Span]:
    """Who sampled what in `episodes`, in order.

    A turn is a run of sampled tokens, and `Episode.replicas` names one replica a turn. Where the two do not match in
    number, all of the episode's replicas share the blame under one joint name.
    """
    found: list[Span] = []
    for number, episode in enumerate(episodes):
        turns = [_turns(row) for row in episode.rows]
        count = sum(int(turn[-1]) + 1 for turn in turns if len(turn))
        joint = "+".join(dict.fromkeys(episode.replicas)) or "unknown"
        before = 0
        for place, (row, turn) in enumerate(zip(episode.rows, turns, strict=True)):
            served: dict[tuple[int, str], list[int]] = defaultdict(list)
            for token, version in enumerate(row.served_by[row.trained].tolist()):
                replica = episode.replicas[before + int(turn[token])] if len(episode.replicas) == count else joint
                served[version, replica].append(token)
            before += int(turn[-1]) + 1 if len(turn) else 0
            found += [
                Span(number, place, version, replica, np.asarray(tokens, dtype=np.int64))
                for (version, replica), tokens in served.items()
            ]
    return found


def _turns(row: Row) -> npt.NDArray[np.int64]:
    """The turn, counted from 0, of each trained token of a row."""
    at = np.flatnonzero(row.trained)
    return np.cumsum(np.diff(at, prepend=at[:1]) > 1).astype(np.int64)


def choose(episodes: Sequence[Episode], samples: int) -> list[Span]:
    """What to score of a step: one span of every (version, replica) pair, then more in turn up to `samples`.

    Deterministic. More than `samples` are chosen where there are more pairs than that.
    """
    by_pair: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans(episodes):
        by_pair[span.version, span.replica].append(span)
    waiting = [by_pair[pair] for pair in sorted(by_pair)]
    chosen = [pair.pop(0) for pair in waiting]
    while len(chosen) < samples and any(waiting):
        for pair in waiting:
            if pair and len(chosen) < samples:
                chosen.append(pair.pop(0))
    return chosen


def compare(
    recorded: Sequence[Floats], recomputed: Sequence[Floats], served_by: Sequence[tuple[int, str]]
) -> TruthReport:
    """Compare logprobs, span by span: float32 [k] each, with the (version, replica) that served it.

    Raises ValueError when two arrays that belong together differ in length.
    """
    differences: dict[tuple[int, str], list[npt.NDArray[np.float64]]] = defaultdict(list)
    for was, now, pair in zip(recorded, recomputed, served_by, strict=True):
        if was.shape != now.shape:
            raise ValueError(f"expected as many recomputed as recorded logprobs, got {now.shape} and {was.shape}")
        differences[pair].append(np.abs(was.astype(np.float64) - now.astype(np.float64)))
    pairs = {pair: np.concatenate(values) for pair, values in sorted(differences.items())}
    return TruthReport(
        overall=_summary(np.concatenate([np.zeros(0), *pairs.values()])),
        pairs={pair: _summary(values) for pair, values in pairs.items()},
    )


def _summary(differences: npt.NDArray[np.float64]) -> Difference:
    if not len(differences):
        return Difference(mean=0.0, percentile99=0.0, tokens=0)
    return Difference(
        mean=float(differences.mean()),
        percentile99=float(np.percentile(differences, 99)),
        tokens=len(differences),
    )


def verdict(report: TruthReport, tolerance: float, dtype: str) -> str | None:
    """None when the recorded policy is the sampled one; else what is wrong, with whom, and what to do.

    `tolerance` bounds a pair's mean difference. Its 99th percentile may reach the same in float32, and TAILS times
    that in a shorter `dtype`, whose rounding has a long tail. A difference that is not a number fails.
    """
    tail = TAILS[dtype] * tolerance
    wrong = [
        f"version {version} on replica {replica}: mean {difference.mean:.2g}, 99th percentile "
        f"{difference.percentile99:.2g} over {difference.tokens} tokens"
        for (version, replica), difference in report.pairs.items()
        if not (difference.mean <= tolerance and difference.percentile99 <= tail)
    ]
    if not wrong:
        return None
    everyone = len(wrong) == len(report.pairs) and len({replica for _, replica in report.pairs}) > 1
    advice = (
        "All replicas are wrong: look for a base model, dtype or temperature that differs between engine and learner"
        if everyone
        else "Restart that replica: it did not serve the version that it reported"
    )
    return (
        "the sampled policy is not the recorded one. Logprobs differ from the learner's by "
        f"{'; '.join(wrong)} (allowed: mean {tolerance:.2g}, 99th percentile {tail:.2g} in {dtype}). {advice}. "
        "Raise algorithm.truth_tolerance only if the difference is known to be rounding"
    )
