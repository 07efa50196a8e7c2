"""Which of the waiting groups a step takes first. Each is a sort key of a held group: the smallest goes first.

Oldest first is the only order in which nothing grows stale while something newer is used, and the one that the credit
window is made for. Under any other the groups that wait longest may be dropped as too stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from learner.buffer import Held

Priority = Callable[["Held"], Any]


def oldest(held: Held) -> tuple[int, int]:
    """The oldest version first, then the earliest task."""
    return held.version, held.ready.index


def reward_variance(held: Held) -> tuple[float, int, int]:
    """The group whose rewards differ most first: half right, half wrong is the most to learn from."""
    return -float(np.var(held.group.rewards)), held.version, held.ready.index


PRIORITIES: dict[str, Priority] = {"oldest": oldest, "reward_variance": reward_variance}
"""By the name that a run's `algorithm.priority` gives."""
