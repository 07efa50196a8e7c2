"""Learner speed: training steps against a bare PEFT forward and backward, and what packing gains.

Run with `python -m tests.benchmarks.bench_learner`. Ours packs, computes logprobs, entropy and the clipped objective,
clips the gradient and makes an AdamW step. The bare side has the same model and adapter, the same number of computed
tokens as a batch of plain causal sequences, cross-entropy on the same number of targets, and no optimizer. Both take
turns on the same machine; figures are medians of three.

    train_step vs bare PEFT       8 groups of 8, 44-token prompts, 16 new tokens
    full rows vs bare PEFT        a full row of lognormal prompts and replies; what it computes twice does not count
    shared vs unshared prompts    the first shape, with the prompt computed once a group and once a reply
    gain at L new tokens          8 replies on a 400-token prompt: the speed-up by sharing over its ideal,
                                  (3200 + 8 L) / (400 + 8 L)
    rows filled                   128 groups of 8 with lognormal lengths, rows of 8,192 tokens
    peak memory                   what a step of full rows takes beside the model, bare and ours, in MB

`--peak ours` and `--peak bare` print the last in a process of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM

from broker.models import PACKAGED, resolve
from broker.runspec import AlgorithmSection, LoraSection, OptimizerSection
from learner.model import Policy
from learner.packing import TokenSequence, pack
from tests.benchmarks.measure import Row

TOKEN_BUDGET = OptimizerSection().token_budget
UNLIMITED = 1 << 40

LONG_PROMPT, COMPLETIONS, REPLIES = 400, 8, (64, 256)
FILL_GROUPS, FILL_BUDGET = 128, 8192


def run() -> list[Row]:
    directory = resolve(PACKAGED, print).directory
    lora = LoraSection()
    policy = Policy(directory, model_name=PACKAGED, lora=lora, optimizer=OptimizerSection(), temperature=1.0)

    def step(sequences: list[TokenSequence], budget: int = TOKEN_BUDGET) -> Callable[[], object]:
        return lambda: policy.train_step(sequences, token_budget=budget, algorithm=AlgorithmSection())

    rows = []
    small = groups(8, 8, prompt=44, reply=16)
    full = full_row(TOKEN_BUDGET)
    for name, sequences, target in (("train_step vs bare PEFT", small, 0.8), ("full rows vs bare PEFT", full, 0.9)):
        computed, useful = pack(sequences, TOKEN_BUDGET).computed_tokens, pack(sequences, UNLIMITED).computed_tokens
        targets = sum(int(sequence.trained.sum()) for sequence in sequences)
        bare = bare_step(directory, lora, tokens=computed, targets=targets)
        ours, raw = _medians(step(sequences), bare, rounds=3)
        speeds = useful / ours, computed / raw
        rows.append(Row(f"learner: {name}", *speeds, speeds[0] / speeds[1], "tokens/s", target))
    whole = sum(len(sequence.token_ids) for sequence in small)
    ours, one_by_one = _medians(step(small), step(alone(small)), rounds=1)
    rows.append(
        Row("learner: shared vs unshared prompts", whole / ours, whole / one_by_one, one_by_one / ours, "tokens/s", 2.0)
    )
    for reply in REPLIES:
        shared = groups(1, COMPLETIONS, prompt=LONG_PROMPT, reply=reply)
        ours, one_by_one = _medians(step(shared), step(alone(shared)), rounds=1)
        ideal = COMPLETIONS * (LONG_PROMPT + reply) / (LONG_PROMPT + COMPLETIONS * reply)
        gain = one_by_one / ours
        rows.append(Row(f"learner: gain at {reply} new tokens, of the ideal", gain, ideal, gain / ideal, "x", 0.8))
    fill = pack(realistic(FILL_GROUPS, seed=0), FILL_BUDGET).fill
    rows.append(Row("learner: rows filled", fill, 1.0, fill, "share", 0.97))
    command = [sys.executable, "-m", "tests.benchmarks.bench_learner", "--peak"]
    ours, raw = (float(subprocess.check_output([*command, who])) for who in ("ours", "bare"))
    rows.append(Row("learner: peak memory beside the model (bare over ours)", ours, raw, raw / ours, "MB", 0.0))
    return rows


def _medians(*steps: Callable[[], object], rounds: int) -> list[float]:
    """Median seconds of each, of `rounds` in which they take turns, after one round to warm up."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, times in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in taken]


def made(prompt: npt.NDArray[np.int64], length: int, group: str, random: np.random.Generator) -> TokenSequence:
    ids = np.concatenate([prompt, random.integers(100, 40_000, length)]).astype(np.int32)
    trained = np.arange(len(ids)) >= len(prompt)
    behaviour = np.where(trained, -10.0, 0.0).astype(np.float32)
    return TokenSequence(ids, behaviour, trained, float(random.normal()), group)


def groups(count: int, size: int, *, prompt: int, reply: int) -> list[TokenSequence]:
    """`count` groups of `size` replies, all of one length."""
    random = np.random.default_rng(0)
    prompts = [random.integers(100, 40_000, prompt) for _ in range(count)]
    return [made(tokens, reply, f"{group}", random) for group, tokens in enumerate(prompts) for _ in range(size)]


def realistic(count: int, seed: int) -> list[TokenSequence]:
    """`count` groups of 8: prompts of about 120 tokens and replies of about 250, lognormal, cut at 480 and 1,024."""
    random = np.random.default_rng(seed)
    sequences = []
    for group in range(count):
        prompt = random.integers(100, 40_000, int(np.clip(random.lognormal(np.log(120), 0.5), 20, 480)))
        for _ in range(8):
            length = int(np.clip(random.lognormal(np.log(250), 0.7), 8, 1024))
            sequences.append(made(prompt, length, f"{group}", random))
    return sequences


def full_row(budget: int) -> list[TokenSequence]:
    """Sequences of the realistic step that make one row of it, the fullest."""
    sequences = realistic(16, seed=0)
    row = max(pack(sequences, budget).rows, key=len)
    return [sequences[index] for index in np.unique(row.sequence)]


def alone(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """The same, each a group of its own, so that nothing is shared."""
    return [
        TokenSequence(s.token_ids, s.behaviour, s.trained, s.advantage, f"{index}") for index, s in enumerate(sequences)
    ]


def bare_step(directory: Path, lora: LoraSection, *, tokens: int, targets: int) -> Callable[[], None]:
    """Forward and backward as one writes them by hand: a batch of 8 causal sequences, `tokens` in all."""
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear")
    )
    causal = model.base_model.model
    length = tokens // 8
    ids = torch.randint(100, 40_000, (8, length), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(100, 40_000, (min(targets, 8 * length),), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        hidden = causal.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        logits = causal.get_output_embeddings()(hidden.flatten(0, 1)[: len(labels)])
        functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    return step


def peak(who: str) -> float:
    """MB that one step of full rows takes at most, beside the model."""
    directory = resolve(PACKAGED, print).directory
    sequences = full_row(TOKEN_BUDGET)
    if who == "ours":
        policy = Policy(
            directory, model_name=PACKAGED, lora=LoraSection(), optimizer=OptimizerSection(), temperature=1.0
        )
        before = _forget_peak()
        policy.train_step(sequences, token_budget=TOKEN_BUDGET, algorithm=AlgorithmSection())
    else:
        targets = sum(int(sequence.trained.sum()) for sequence in sequences)
        tokens = pack(sequences, TOKEN_BUDGET).computed_tokens
        step = bare_step(directory, LoraSection(), tokens=tokens, targets=targets)
        before = _forget_peak()
        step()
    return (_resident("VmHWM") - before) / 1e6


def _forget_peak() -> int:
    """Bytes resident now; the highest so far counts from here (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", choices=["ours", "bare"])
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak))
        return
    for row in run():
        print(f"{row.name} ({row.unit}): {row.ours:.2f} / {row.raw:.2f} = {row.ratio:.2f}, target {row.target:.2f}")


if __name__ == "__main__":
    main()
