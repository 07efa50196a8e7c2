"""What a step is made from: groups in, token sequences with advantages out, and the figures people look at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from broker.trajectories import Group
from learner.advantages import group_advantages, has_signal
from learner.buffer import Held
from learner.ledger import Outcome
from learner.packing import TokenSequence


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


def sequences_of(groups: Sequence[Group], advantage: Literal["grpo", "dr_grpo"]) -> list[TokenSequence]:
    """Every row of every episode of groups that have signal, with its episode's advantage."""
    found = []
    for group in groups:
        if not has_signal(group.rewards):
            continue
        values = group_advantages(group.rewards, advantage)
        for episode, value in zip(group.episodes, values, strict=True):
            found += [
                TokenSequence(row.ids, row.behaviour, row.trained, float(value), group.group)
                for row in episode.rows
                if row.trained.any()
            ]
    return found


def outcomes_of(batch: Sequence[Held]) -> list[tuple[str, Outcome]]:
    """How a step closes each of its groups: trained, or skipped for want of signal."""
    return [(held.id, "trained" if has_signal(held.group.rewards) else "skipped") for held in batch]


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
