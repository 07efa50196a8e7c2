"""Making a run's probe: what its replicas must reproduce before they serve it (see `broker.probe`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np

from broker import names
from broker.errors import RunFailed
from broker.messages import AdapterRef, BlobRef, ProbeRef, pack_floats, pack_ids
from broker.probe import Probe
from learner.truth import tolerance_of

if TYPE_CHECKING:
    from broker.messages import Head
    from broker.runspec import RunSpec
    from learner.model import Policy

Put = Callable[[str, bytes], Awaitable[BlobRef]]

LENGTHS = (6, 11, 17, 24, 33, 64)
"""Tokens of the prompts: across the sizes in which engines keep their caches. Each begins with all of the one before,
so that the later ones meet cached blocks."""

SCALES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Standard deviations of B that are tried, the smallest first: a probe must change the model, not break it."""

CHANGE = 1.0
"""By how much a probe must change the logprobs, in nats, on average."""

WORST_OVER_MEAN = 10.0
"""How far one token's difference may exceed the bound on the mean of many. In bfloat16 a probe's tokens were off by up
to 0.31 where the bound is 0.8."""

CHANGE_OVER_WORST = 4.0
"""By how much the change must exceed the largest difference that counts as rounding."""


def make_probe(policy: Policy, *, run: str, tolerance: float, seed: int) -> tuple[bytes, Probe]:
    """The probe adapter and what `policy` computes under it. Blocking; the policy's weights and random state stay.

    `tolerance` bounds the mean difference of logprobs. Where that is wider than what any weights change, the probe is
    as strict as it takes to tell them. Raises RunFailed when no weights change the model.
    """
    worst = WORST_OVER_MEAN * tolerance
    change = max(CHANGE, CHANGE_OVER_WORST * worst)
    random = np.random.default_rng(seed)
    sequence = random.integers(0, policy.vocabulary, max(LENGTHS)).astype(np.int32)
    prompts = [sequence[:length] for length in LENGTHS]
    base = policy.next_logprobs(prompts, None)
    found, best, adapted = b"", 0.0, base
    for scale in SCALES:
        adapter = policy.random_adapter_bytes(scale, seed)
        table = policy.next_logprobs(prompts, adapter)
        changed = float(np.abs(table - base).mean(axis=1).min()) if np.isfinite(table).all() else 0.0
        if changed > best:
            found, best, adapted = adapter, changed, table
        if best >= change:
            break
    if best >= CHANGE:
        return found, Probe(
            run=run,
            prompts=[pack_ids(prompt) for prompt in prompts],
            base=pack_floats(base),
            adapted=pack_floats(adapted),
            temperature=policy.temperature,
            tolerance=min(worst, best / CHANGE_OVER_WORST),
            dtype=policy.dtype_name,
        )
    raise RunFailed(
        "no probe could be made: even large random adapter weights do not change what the model says. "
        "Check lora.targets: the modules must take part in the computation"
    )


async def store_probe(put: Put, head: Head, adapter: bytes, probe: Probe) -> ProbeRef:
    """Store a probe where the replicas find it: `put` stores bytes under a prefix. Raises what that raises."""
    prefix = names.probe_prefix(head.run, head.incarnation)
    weights = await put(f"{prefix}/adapter", adapter)
    expected = await put(f"{prefix}/expected", probe.encode())
    name = names.probe_name(head.run, weights.sha256)
    return ProbeRef(AdapterRef(0, name, weights.key, weights.size, weights.sha256), expected)


def probe_of(policy: Policy, spec: RunSpec) -> tuple[bytes, Probe]:
    """The probe of the run that `spec` describes."""
    tolerance = tolerance_of(spec.algorithm, policy.dtype_name)
    return make_probe(policy, run=spec.run.name, tolerance=tolerance, seed=spec.run.seed)
