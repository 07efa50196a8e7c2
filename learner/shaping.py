"""The soft punishment of overlong replies: the reward falls where a reply comes near the longest that is possible.

DAPO, arXiv:2503.14476, equation 13. With L the longest possible completion, B the buffer before it, and n tokens:

    0                   n <= L - B
    (L - B - n) / B     L - B < n <= L

times the penalty. A cut-off alone would punish sound reasoning for its length, all at once.
"""

from __future__ import annotations


def overlong_punishment(tokens: int, *, longest: int, buffer: int, penalty: float) -> float:
    """What is added to the reward of a completion of `tokens` tokens: 0 down to -penalty. `buffer` 0: nothing."""
    if buffer == 0:
        return 0.0
    return penalty * max(-1.0, min(0.0, (longest - buffer - tokens) / buffer))
