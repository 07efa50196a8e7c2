"""Learner speed: one training step against a bare PEFT forward and backward of the same shape.

Run with `python -m tests.benchmarks.bench_learner`. Ours packs 8 groups of 8 (44-token prompts, 16 new tokens),
computes logprobs, entropy and the clipped objective, clips the gradient and makes an AdamW step. The bare side has the
same model and adapter, the same number of computed tokens as a batch of plain causal sequences, cross-entropy on the
same number of targets, and no optimizer. Both take turns on the same machine; figures are medians of three. The step
without shared prompts is timed once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM

from broker.models import PACKAGED, resolve
from broker.runspec import AlgorithmSection, LoraSection, OptimizerSection
from learner.model import Policy
from learner.packing import TokenSequence, pack

GROUPS, GROUP_SIZE, PROMPT, REPLY = 8, 8, 44, 16

AGAINST_BARE, AGAINST_UNSHARED = "train_step vs bare PEFT", "shared vs unshared prompts"
TARGETS = {AGAINST_BARE: 0.8, AGAINST_UNSHARED: 2.0}
"""The second: of the 2.8 times fewer tokens, most must show in the time."""
TOKEN_BUDGET = OptimizerSection().token_budget


def run() -> list[tuple[str, float, float, float]]:
    """(name, ours, raw, ratio): computed tokens/s against bare PEFT, and useful tokens/s shared against unshared."""
    directory = resolve(PACKAGED, print).directory
    lora = LoraSection()
    policy = Policy(directory, model_name=PACKAGED, lora=lora, optimizer=OptimizerSection(), temperature=1.0)
    shared = _sequences(share_prompts=True)
    unshared = _sequences(share_prompts=False)
    computed = pack(shared, TOKEN_BUDGET).computed_tokens
    useful = sum(len(sequence.token_ids) for sequence in shared)
    bare = _bare_step(directory, lora, tokens=computed, targets=GROUPS * GROUP_SIZE * REPLY)

    def step(sequences: list[TokenSequence]) -> Callable[[], object]:
        return lambda: policy.train_step(sequences, token_budget=TOKEN_BUDGET, algorithm=AlgorithmSection())

    ours, raw = _medians(step(shared), bare, rounds=3)
    (one_by_one,) = _medians(step(unshared), rounds=1)
    return [
        (AGAINST_BARE, computed / ours, computed / raw, raw / ours),
        (AGAINST_UNSHARED, useful / ours, useful / one_by_one, one_by_one / ours),
    ]


def _medians(*steps: Callable[[], object], rounds: int) -> list[float]:
    """Median seconds of each, of `rounds` in which they take turns, after one round to warm up."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, times in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in taken]


def _sequences(*, share_prompts: bool) -> list[TokenSequence]:
    """8 groups of 8; each member counts as a group of its own when prompts are not to be shared."""
    random = np.random.default_rng(0)
    sequences = []
    for group in range(GROUPS):
        prompt = random.integers(100, 40_000, PROMPT)
        for member in range(GROUP_SIZE):
            ids = np.concatenate([prompt, random.integers(100, 40_000, REPLY)]).astype(np.int32)
            trained = np.arange(len(ids)) >= PROMPT
            behaviour = np.where(trained, -10.0, 0.0).astype(np.float32)
            key = f"{group}" if share_prompts else f"{group}.{member}"
            sequences.append(TokenSequence(ids, behaviour, trained, float(random.normal()), key))
    return sequences


def _bare_step(directory: Path, lora: LoraSection, *, tokens: int, targets: int) -> Callable[[], None]:
    """Forward and backward as one writes them by hand: a batch of GROUPS causal sequences, `tokens` in all."""
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear")
    )
    causal = model.base_model.model
    ids = torch.randint(100, 40_000, (GROUPS, tokens // GROUPS), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(100, 40_000, (targets,), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        hidden = causal.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        logits = causal.get_output_embeddings()(hidden.flatten(0, 1)[:targets])
        functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    return step


def main() -> None:
    for name, ours, raw, ratio in run():
        print(f"{name}: {ours:.0f} / {raw:.0f} = {ratio:.2f}")


if __name__ == "__main__":
    main()
