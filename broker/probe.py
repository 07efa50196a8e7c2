"""The probe: by which a replica proves, before it serves a run, that it computes what the run's learner computes.

The learner makes an adapter of large random weights in the shape of the run's own, and writes down the logprobs of
every token that may follow a few prompts, under the base model and under that adapter. A replica samples one token
after each prompt, under both, and compares the logprobs it gets. That one comparison finds another base model, a wrong
temperature or logprob, an adapter that is not applied, applied by half, or with a wrong scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from broker.errors import MalformedMessage
from broker.messages import Floats, Ids, Message, unpack_floats, unpack_ids


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """What a learner computes: after prompt i, token t has logprob `base[i, t]`, or `adapted[i, t]` under the probe."""

    run: str
    prompts: list[bytes]
    base: bytes
    adapted: bytes
    temperature: float
    tolerance: float
    """The largest difference of one logprob that is still rounding, in nats."""
    dtype: str
    """What the learner computes in."""

    @property
    def prompt_ids(self) -> list[Ids]:
        """int32 [n] each"""
        return [unpack_ids(prompt) for prompt in self.prompts]

    def table(self, under: bytes) -> npt.NDArray[np.float32]:
        """`base` or `adapted` as float32 [prompts, vocabulary]. Raises MalformedMessage."""
        values = unpack_floats(under)
        if not self.prompts or len(values) % len(self.prompts):
            raise MalformedMessage(f"a probe's table must have a row for each of its {len(self.prompts)} prompts")
        return values.reshape(len(self.prompts), -1)


def verdict(probe: Probe, base: Sequence[tuple[Ids, Floats]], adapted: Sequence[tuple[Ids, Floats]]) -> str | None:
    """None when what a replica sampled is what the learner computes; else what is wrong and what to look for.

    `base` and `adapted` are the sampled tokens [1] and their logprobs [1], one of each for every prompt.
    """
    off_base = _distance(probe.table(probe.base), base)
    if not off_base <= probe.tolerance:
        return (
            f"its base model is not the learner's: logprobs differ by up to {off_base:.2g}, {probe.tolerance:.2g} is "
            f"allowed in {probe.dtype}. Look for other weights, another dtype, or logprobs that are not those of the "
            f"distribution at temperature {probe.temperature:g} that is sampled from"
        )
    off = _distance(probe.table(probe.adapted), adapted)
    if not off <= probe.tolerance:
        if _distance(probe.table(probe.base), adapted) <= probe.tolerance:
            return "it serves the base model in an adapter's name"
        return (
            f"it does not apply adapters as they are: under the probe adapter logprobs differ from the learner's by up "
            f"to {off:.2g}, {probe.tolerance:.2g} is allowed in {probe.dtype}. Look for modules that it leaves out, or "
            "a rank or alpha that it misreads"
        )
    return None


def _distance(table: npt.NDArray[np.float32], sampled: Sequence[tuple[Ids, Floats]]) -> float:
    """The largest difference; infinite when a token is none of the vocabulary's."""
    worst = 0.0
    for row, (tokens, logprobs) in zip(table, sampled, strict=True):
        if len(tokens) != 1 or len(logprobs) != 1 or not 0 <= int(tokens[0]) < len(row):
            return float("inf")
        difference = abs(float(logprobs[0]) - float(row[int(tokens[0])]))
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst
