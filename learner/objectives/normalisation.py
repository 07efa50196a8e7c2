"""How much each token of a step counts. Decided for the whole step, before it is split into rows.

A step's loss is the sum over all of its tokens of weight_t * loss_t. With N trained tokens, S sequences, |i| trained
tokens in sequence i, and L tokens that a sequence may have at most:

    token       1 / N               DAPO, arXiv:2503.14476, equation 8
    sequence    1 / (S * |i|)       GRPO, arXiv:2402.03300, equation 3
    constant    1 / (S * L)         Dr. GRPO, arXiv:2503.20783, section 3.2

Since no weight depends on a row, neither does the gradient. The rows into which a conversation was forked are one
sequence here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Normalisation = Literal["token", "sequence", "constant"]


def token_weights(
    tokens: Sequence[int], episodes: Sequence[str], normalisation: Normalisation, length: int | None
) -> npt.NDArray[np.float64]:
    """What each trained token of each sequence counts, float64 [sequences].

    `tokens` are the trained tokens of each, `episodes` which of them are one sequence, `length` is L (for "constant").
    Sequences without trained tokens do not count. Raises ValueError when "constant" comes without a length.
    """
    count: Counter[str] = Counter()
    for episode, number in zip(episodes, tokens, strict=True):
        count[episode] += number
    sequences = sum(number > 0 for number in count.values())
    match normalisation:
        case "token":
            weights = [1 / max(1, sum(tokens))] * len(tokens)
        case "sequence":
            weights = [1 / (sequences * count[episode]) if count[episode] else 0.0 for episode in episodes]
        case "constant":
            if not length:
                raise ValueError('normalisation "constant" needs the length of the longest possible sequence')
            weights = [1 / (max(1, sequences) * length)] * len(tokens)
    return np.asarray(weights, dtype=np.float64)
