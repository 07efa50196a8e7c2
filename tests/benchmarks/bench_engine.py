"""The embedded engine beside `model.generate` on the same requests: `python -m tests.benchmarks.bench_engine`.

Two workloads on SmolLM2-135M-Instruct with one LoRA adapter loaded (rank 8, all linear layers), every request served
by it, EOS ignored on both sides:

- unrelated: 16 requests of 10 to 120 tokens that share nothing, 32 new tokens each;
- groups: 8 prompts of about 44 tokens, each sampled 8 times, 16 new tokens.

Both sides run in this process on the same threads. `generate` gets the whole batch at once, left-padded, as PEFT
serves it. Each side is measured three times in alternating order after one warm-up, and the medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engines.base import Sampling
from actors.engines.embedded import EmbeddedEngine
from broker.models import resolve

MODEL = "smollm2-135m-instruct"
ADAPTER = "bench-v000001-00000000"
REPEATS = 3
TARGETS = {"unrelated": 1.0, "groups": 2.0}

Prompt = np.ndarray[Any, np.dtype[np.int32]]


def run(threads: int | None = None) -> list[tuple[str, float, float, float]]:
    """Measure; for each workload its name, the engine's tokens/s, `generate`'s tokens/s and their ratio.

    Both sides use `threads` CPU threads (None: torch's choice). Where other work keeps the cores busy, 1 is both
    faster and steadier: threads that wait for one another lose their turns.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    directory = resolve(MODEL).directory
    with tempfile.TemporaryDirectory() as scratch:
        raw = _peft_model(directory, Path(scratch))
        return asyncio.run(_compare(directory, Path(scratch), raw, threads))


async def _compare(
    directory: Path, adapter: Path, raw: Any, threads: int | None
) -> list[tuple[str, float, float, float]]:
    workloads = [("unrelated", _unrelated, 32), ("groups", lambda seed: _groups(directory, seed), 16)]
    rows = []
    for name, prompts_of, new_tokens in workloads:
        engine = EmbeddedEngine(directory, threads=threads)
        await engine.start()
        await engine.load_adapter(ADAPTER, adapter)
        await _time_ours(engine, prompts_of(0)[:4], 4)
        _time_raw(raw, prompts_of(0)[:4], 4)
        ours, theirs = [], []
        for repeat in range(REPEATS):
            # New prompts each time: what the engine's prefix store kept from one repetition must not help the next.
            prompts = prompts_of(repeat + 1)
            tokens = len(prompts) * new_tokens
            if repeat % 2:
                theirs.append(tokens / _time_raw(raw, prompts, new_tokens))
            ours.append(tokens / await _time_ours(engine, prompts, new_tokens))
            if not repeat % 2:
                theirs.append(tokens / _time_raw(raw, prompts, new_tokens))
        await engine.close()
        mine, other = statistics.median(ours), statistics.median(theirs)
        rows.append((name, mine, other, mine / other))
    return rows


async def _time_ours(engine: EmbeddedEngine, prompts: list[Prompt], new_tokens: int) -> float:
    started = time.perf_counter()
    sampling = Sampling(max_new_tokens=new_tokens)
    results = await asyncio.gather(
        *(engine.generate(f"request-{index}", ADAPTER, prompt, sampling) for index, prompt in enumerate(prompts))
    )
    seconds = time.perf_counter() - started
    assert all(len(result.token_ids) == new_tokens for result in results)
    return seconds


def _time_raw(model: Any, prompts: list[Prompt], new_tokens: int) -> float:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, width - len(prompt) :] = 1
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - started
    assert output.shape == (len(prompts), width + new_tokens)
    return seconds


def _unrelated(seed: int) -> list[Prompt]:
    random = np.random.default_rng(seed)
    return [random.integers(100, 49000, size, dtype=np.int32) for size in np.linspace(10, 120, 16).astype(int)]


def _groups(directory: Path, seed: int) -> list[Prompt]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    random = np.random.default_rng(seed)
    prompts = []
    for first, second in random.integers(10, 50, (8, 2)):
        question = f"What is {first} + {second}? Answer with just the number."
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        text = (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompts += [np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)] * 8
    return prompts


def _peft_model(directory: Path, adapter: Path) -> Any:
    """The base model under PEFT with a random adapter, which is saved to `adapter` for the engine."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped: Any = get_peft_model(model, config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    wrapped.save_pretrained(adapter)
    wrapped.generation_config.eos_token_id = None
    return wrapped


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The embedded engine beside model.generate, tokens per second.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--threads", type=int, help="CPU threads for both sides (default: torch's choice)")
    arguments = parser.parse_args()
    rows = run(arguments.threads)
    if arguments.json:
        print(json.dumps({name: {"ours": ours, "raw": raw, "ratio": ratio} for name, ours, raw, ratio in rows}))
        return
    print(f"{'workload':<12}{'engine tok/s':>14}{'generate tok/s':>16}{'ratio':>8}{'target':>8}")
    for name, ours, raw, ratio in rows:
        print(f"{name:<12}{ours:>14.0f}{raw:>16.0f}{ratio:>8.2f}{TARGETS[name]:>8.1f}")


if __name__ == "__main__":
    main()
