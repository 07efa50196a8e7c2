"""The exact record of a group of episodes, and how it is stored.

A group is one object in the store, under a key that ends in the object's sha256. What the model sampled is kept as
it was sampled: token ids, the behaviour policy's logprobs, the version that served each token. Nothing is ever
tokenized again from text.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from broker.errors import MalformedMessage
from broker.messages import Floats, Ids, Message, decode, pack_floats, pack_ids, unpack_floats, unpack_ids

NO_VERSION = -1
"""The version of a token that no policy sampled (prompt and environment tokens)."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence to train on. An episode is one row, unless its history was rewritten and it forked.

    All four arrays have one entry per token. A token with `mask` 1 was sampled by the policy and is trained on;
    `logprobs` is its logprob when it was sampled, 0 elsewhere; `versions` the policy version that served it,
    NO_VERSION elsewhere.
    """

    token_ids: bytes
    logprobs: bytes
    mask: bytes
    versions: bytes

    @classmethod
    def of(cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, mask: npt.ArrayLike, versions: npt.ArrayLike) -> Row:
        """Build a row from arrays of one length."""
        return cls(
            token_ids=pack_ids(token_ids),
            logprobs=pack_floats(logprobs),
            mask=np.asarray(mask, dtype=np.uint8).tobytes(),
            versions=pack_ids(versions),
        )

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @property
    def ids(self) -> Ids:
        """int32 [n]"""
        return unpack_ids(self.token_ids)

    @property
    def behaviour(self) -> Floats:
        """float32 [n], the logprobs under the policy that sampled"""
        return unpack_floats(self.logprobs)

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """bool [n], which tokens the policy sampled"""
        return np.frombuffer(self.mask, dtype=np.uint8).astype(np.bool_)

    @property
    def served_by(self) -> Ids:
        """int32 [n], the version that served each token"""
        return unpack_ids(self.versions)

    @property
    def prompt_length(self) -> int:
        """How many tokens stand before the first sampled one."""
        sampled = np.flatnonzero(np.frombuffer(self.mask, dtype=np.uint8))
        return int(sampled[0]) if len(sampled) else len(self)

    def check(self) -> None:
        """Raise MalformedMessage unless the arrays fit each other."""
        lengths = {len(self.token_ids) / 4, len(self.logprobs) / 4, len(self.mask) / 1, len(self.versions) / 4}
        if len(lengths) != 1 or len(self) == 0:
            raise MalformedMessage(f"a row's ids, logprobs, mask and versions must have one length, got {lengths}")
        trained = self.trained
        if trained[0]:
            raise MalformedMessage("a row's first token cannot be sampled: nothing stands before it")
        if not np.isfinite(self.behaviour).all():
            raise MalformedMessage("a row holds a logprob that is not finite")
        if (self.served_by[trained] < 0).any():
            raise MalformedMessage("a sampled token has no version")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of an episode's conversation, as text for people."""

    role: str
    content: str


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task."""

    index: int
    """0 .. group_size - 1"""
    rows: list[Row]
    reward: float
    parts: dict[str, float]
    """Each reward function's value, before weighting."""
    turns: list[Turn]
    truncated: bool
    """It was cut by a token or turn limit: a valid sample, not an error."""
    replicas: list[str]
    """Which replicas served it, in order of turns."""
    extensions: int = 0
    """Turns whose prompt extended the stored tokens."""
    forks: int = 0
    """Turns that had to start a new row."""
    seconds: dict[str, float] = {}
    metrics: dict[str, float] = {}
    """What the environment wants logged."""

    @property
    def sampled_tokens(self) -> int:
        return sum(int(np.frombuffer(row.mask, dtype=np.uint8).sum()) for row in self.rows)


class Group(Message, frozen=True, kw_only=True, tag="group"):
    """The episodes of one task, all begun under one version."""

    run: str
    incarnation: str
    group: str
    index: int
    version: int
    adapter: str | None
    episodes: Annotated[list[Episode], msgspec.Meta(min_length=1)]
    columns: dict[str, object] = {}

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @staticmethod
    def from_blob(data: bytes) -> Group:
        """Decode and check a stored group. Raises MalformedMessage."""
        group = decode(data, Group)
        for episode in group.episodes:
            if not np.isfinite(episode.reward):
                raise MalformedMessage(f"episode {episode.index} of {group.group} has the reward {episode.reward}")
            for row in episode.rows:
                row.check()
        return group
