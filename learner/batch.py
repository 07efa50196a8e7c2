"""What a step is made from: groups in, token sequences with advantages out, and the figures people look at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from broker.runspec import RunSpec
from broker.trajectories import Group
from learner.advantages import group_advantages, has_signal
from learner.buffer import Held
from learner.ledger import Outcome
from learner.packing import TokenSequence
from learner.shaping import overlong_punishment


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of one step's groups. Staleness is in versions; lengths in sampled tokens."""

    reward: float
    reward_std: float
    staleness_mean: float
    staleness_max: int
    length_mean: float
    truncated: float
    sampled_tokens: int
    episodes: int
    signal_groups: int


def rewards_of(group: Group, spec: RunSpec) -> list[float]:
    """The rewards that a group's episodes are trained on: the environment's, less what overlong replies lose."""
    algorithm = spec.algorithm
    return [
        episode.reward
        + overlong_punishment(
            episode.sampled_tokens,
            longest=spec.max_completion_tokens,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )
        for episode in group.episodes
    ]


def teaches(group: Group, spec: RunSpec) -> bool:
    """Whether a step can learn anything from `group`."""
    return not spec.algorithm.needs_signal or has_signal(rewards_of(group, spec))


def sequences_of(groups: Sequence[Group], spec: RunSpec, head: int) -> list[TokenSequence]:
    """Every row of every episode of groups that teach, with its episode's advantage, for a step from version `head`.

    The supervised objective imitates: it gets only the episodes that were better than their siblings.
    """
    found = []
    for group in groups:
        if not teaches(group, spec):
            continue
        values = group_advantages(rewards_of(group, spec), spec.algorithm.advantage)
        for episode, value in zip(group.episodes, values, strict=True):
            if spec.algorithm.objective == "cross_entropy" and value <= 0:
                continue
            found += [
                TokenSequence(
                    row.ids,
                    row.behaviour,
                    row.trained,
                    float(value),
                    group.group,
                    staleness=np.where(row.trained, head - row.served_by, 0),
                    episode=f"{group.group}/{episode.index}",
                )
                for row in episode.rows
                if row.trained.any()
            ]
    return found


def outcomes_of(batch: Sequence[Held], spec: RunSpec) -> list[tuple[str, Outcome]]:
    """How a step closes each of its groups: trained, or skipped since they teach nothing."""
    return [(held.id, "trained" if teaches(held.group, spec) else "skipped") for held in batch]


def figures_of(batch: Sequence[Held], head: int) -> BatchFigures:
    """The figures of `batch` at a step that starts from version `head`. All groups count, those without signal too."""
    episodes = [episode for held in batch for episode in held.group.episodes]
    rewards = np.asarray([episode.reward for episode in episodes])
    lengths = np.asarray([episode.sampled_tokens for episode in episodes])
    versions = np.concatenate([row.served_by[row.trained] for episode in episodes for row in episode.rows])
    staleness = head - versions if len(versions) else np.zeros(1, dtype=np.int64)
    return BatchFigures(
        reward=float(rewards.mean()),
        reward_std=float(rewards.std()),
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        length_mean=float(lengths.mean()),
        truncated=float(np.mean([episode.truncated for episode in episodes])),
        sampled_tokens=int(lengths.sum()),
        episodes=len(episodes),
        signal_groups=sum(has_signal(held.group.rewards) for held in batch),
    )
