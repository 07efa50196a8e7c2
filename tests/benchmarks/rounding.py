"""How far an engine's logprobs are from the learner's where both are right: `python -m tests.benchmarks.rounding`.

SmolLM2-135M-Instruct in bfloat16 (`--dtype float32`: the other). The base model and adapters of random weights on every
linear layer, small as a few steps leave them and large as the probe's, sample 24 x 16 tokens each at temperature 1, by
the embedded engine and by vLLM where FARFLUNG_VLLM_PYTHON names one. The learner scores the same tokens under the same
adapter, and, to show what the bounds must tell apart, under the base. The bounds of `learner.truth` come from here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actors.engines import VllmOptions, create_vllm
from actors.engines.base import Engine, Sampling
from actors.engines.embedded import EmbeddedEngine
from broker.adapters import write_adapter_directory
from broker.models import PACKAGED, resolve
from broker.runspec import LoraSection, OptimizerSection
from broker.trajectories import Row
from learner.model import Policy

SCALES = (0.003, 0.01, 0.03)
"""Standard deviations of B; A keeps the size of what it multiplies, and the adapters' factor is alpha / rank = 2."""

SEQUENCES, PROMPT, CONTINUATION = 24, 44, 16

Differences = npt.NDArray[np.float64]


Sampled = tuple[list[Row], Differences]
"""Rows for the learner, and the logprobs of all their sampled tokens."""


async def sampled(engine: Engine, adapter: str | None) -> Sampled:
    prompts = np.random.default_rng(0).integers(100, 10_000, (SEQUENCES, PROMPT)).astype(np.int32)
    results = await asyncio.gather(
        *(
            engine.generate(f"{adapter}.{number}", adapter, prompt, Sampling(CONTINUATION))
            for number, prompt in enumerate(prompts)
        )
    )
    rows = []
    for prompt, result in zip(prompts, results, strict=True):
        ids = np.concatenate([prompt, result.token_ids])
        mask = np.arange(len(ids)) >= PROMPT
        logprobs = np.zeros(len(ids))
        logprobs[mask] = result.logprobs
        rows.append(Row.of(ids, logprobs, mask, np.where(mask, 0, -1)))
    return rows, np.concatenate([result.logprobs for result in results]).astype(np.float64)


def differences(policy: Policy, sampled: Sampled, adapter: bytes | None) -> Differences:
    """Of each sampled token: recorded less recomputed under `adapter` (None: the base), without the sign."""
    rows, recorded = sampled
    found: Differences = np.abs(np.concatenate(policy.score(rows, adapter)) - recorded)
    return found


def show(what: str, found: Differences, under_base: Differences | None) -> None:
    line = f"{what:28}{found.mean():>10.6f}{np.percentile(found, 99):>10.6f}{found.max():>10.6f}"
    print(line + (f"{under_base.mean():>14.4f}" if under_base is not None else ""), flush=True)


async def measure(name: str, engine: Engine, policy: Policy, directory: Path) -> None:
    await engine.start()
    try:
        print(f"\n{name:28}{'mean':>10}{'99th':>10}{'largest':>10}{'under base':>14}")
        show("base", differences(policy, await sampled(engine, None), None), None)
        for number, scale in enumerate(SCALES):
            adapter, data = f"scale-v{number:06d}-00000000", policy.random_adapter_bytes(scale, number)
            write_adapter_directory(data, directory / f"{name}-{adapter}")
            await engine.load_adapter(adapter, directory / f"{name}-{adapter}")
            found = await sampled(engine, adapter)
            show(f"adapter, B at {scale}", differences(policy, found, data), differences(policy, found, None))
            await engine.unload_adapter(adapter)
    finally:
        await engine.close()


async def _main(dtype: str, directory: Path) -> None:
    files = resolve(PACKAGED, print)
    policy = Policy(
        files.directory, model_name=PACKAGED, lora=LoraSection(), optimizer=OptimizerSection(), temperature=1.0,
        dtype=dtype,
    )  # fmt: skip
    if python := os.environ.get("FARFLUNG_VLLM_PYTHON"):
        options = VllmOptions(python=python, extra=["--enforce-eager"], dtype=dtype)
        vllm = create_vllm(
            files, rank=8, slots=2, context=512, options=options, scratch=directory / "scratch",
            log_file=directory / "vllm.log",
        )  # fmt: skip
        await measure("vLLM", vllm, policy, directory)
    await measure("embedded", EmbeddedEngine(files.directory, dtype=dtype), policy, directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_main(parser.parse_args().dtype, Path(scratch)))
