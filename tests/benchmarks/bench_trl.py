"""Farflung beside TRL's AsyncGRPOTrainer: the same model, tasks, batch, staleness and sampling on the same cores.

    make bench-trl        python -m tests.benchmarks.bench_trl [--steps N] [--engines NAME ...] [--json FILE]

The addition task with SmolLM2-135M-Instruct: 8 prompts of 8 samples a step, 16 new tokens, LoRA of rank 8, float32.
TRL runs in its own environment against a vLLM server in another (`trl_peer`); Farflung with the embedded engine, and
against vLLM where that engine is there. Neither is timed during its first two steps. The ceiling is measured in the
same run, with nothing around it: prefill of the 8 prompts, 16 decode steps of 64 sequences, and a plain PEFT forward
and backward of as many tokens as a packed step has, one after the other.

`--trl-python` and `--vllm-python` (or FARFLUNG_TRL_PYTHON, FARFLUNG_VLLM_PYTHON) name the two environments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import typing
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache

from broker.models import PACKAGED, resolve
from broker.runspec import FleetSection, LoraSection
from deploy.servers import free_port
from learner.packing import pack
from learner.readings import STEP_LOG
from tests.benchmarks.bench_learner import TOKEN_BUDGET, bare_step, groups
from tests.command_line import to_toml

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS, SIZE, NEW_TOKENS, PROMPT_TOKENS, RANK, LR = 8, 8, 16, 44, 8, 3e-4
MAX_STALENESS = 1
SKIPPED = 2
"""First steps that are not counted: everything is compiled, loaded and filled then."""

FASTER_EMBEDDED, OF_CEILING, FASTER_VLLM = 3.0, 0.8, 1.5


@dataclass(frozen=True)
class Speed:
    """What a run came to, over the steps that count."""

    name: str
    samples_per_second: float
    tokens_per_second: float
    """Sampled tokens."""
    step_seconds: float
    wait_seconds: float
    """Of a step: for rollouts."""
    train_seconds: float
    reward: float
    """Mean of the last five steps."""


def ours(directory: Path, engine: str, steps: int) -> Speed:
    """A run of `farflung up`."""
    plain = tomllib.loads((EXAMPLES / "addition.toml").read_text())
    plain["run"] |= {"name": f"bench-{engine}", "steps": steps, "target_reward": 2.0}
    plain["tasks"]["source"] = f"{EXAMPLES / 'addition.py'}:Tasks"
    plain["environment"]["rewards"] = [f"{EXAMPLES / 'addition.py'}:reward"]
    plain["sampling"] = {"max_new_tokens": NEW_TOKENS}
    plain["algorithm"] = {"group_size": SIZE, "groups_per_step": PROMPTS, "max_staleness": MAX_STALENESS}
    plain["optimizer"]["lr"], plain["lora"] = LR, {"rank": RANK, "alpha": 2 * RANK}
    plain["fleet"] = {"actors": 1, "engine": engine}
    config = directory / f"{engine}.toml"
    config.write_text(to_toml(plain))
    out = directory / engine
    command = [sys.executable, "-m", "deploy.cli", "up", str(config), "--dir", str(out), "--json"]
    subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (out / STEP_LOG).read_text().splitlines()]
    times = [record["time"] for record in records]
    counted = records[SKIPPED:]
    seconds = times[-1] - times[SKIPPED - 1]
    return Speed(
        name=f"Farflung, {engine} engine",
        samples_per_second=sum(record["episodes"] for record in counted) / seconds,
        tokens_per_second=sum(record["sampled_tokens"] for record in counted) / seconds,
        step_seconds=seconds / len(counted),
        wait_seconds=statistics.mean(record["seconds_wait"] for record in counted),
        train_seconds=statistics.mean(record["seconds_train"] for record in counted),
        reward=statistics.mean(record["reward"] for record in records[-5:]),
    )


@contextmanager
def vllm_server(python: str, model: Path, log: Path) -> typing.Iterator[str]:
    """A vLLM server on the CPU that takes adapters, as TRL asks for; yields its address."""
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--enable-lora",
        "--max-loras", str(MAX_STALENESS + 2), "--max-lora-rank", str(RANK), "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm",
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment.pop("PYTHONPATH", None)
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(address + "/health", server, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path, within: float = 400) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"the vLLM server is not ready: {log.read_text()[-2000:]}")


def theirs(directory: Path, model: Path, trl: str, vllm: str, steps: int) -> Speed:
    """A run of TRL's trainer."""
    out = directory / "trl.jsonl"
    with vllm_server(vllm, model, directory / "vllm.log") as address:
        settings = {
            "model": str(model), "server": address, "out": str(out), "prompts": PROMPTS, "group_size": SIZE,
            "new_tokens": NEW_TOKENS, "steps": steps, "max_staleness": MAX_STALENESS, "lr": LR, "rank": RANK,
            "micro_batch": 16,
        }  # fmt: skip
        (directory / "trl.json").write_text(json.dumps(settings))
        root = Path(__file__).parents[2]
        command = [trl, "-m", "tests.benchmarks.trl_peer", str(directory / "trl.json")]
        with (directory / "trl.log").open("w") as log:
            code = subprocess.run(
                command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stdout=log, stderr=log
            ).returncode
        if code != 0:
            raise SystemExit(f"TRL ended with {code}: {(directory / 'trl.log').read_text()[-3000:]}")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    steps_made = [record for record in records if "batch/samples_per_step" in record]
    counted = steps_made[SKIPPED:]
    seconds = steps_made[-1]["time"] - steps_made[SKIPPED - 1]["time"]
    return Speed(
        name="TRL, vLLM engine",
        samples_per_second=sum(record["batch/samples_per_step"] for record in counted) / seconds,
        tokens_per_second=sum(record["batch/trained_tokens_per_step"] for record in counted) / seconds,
        step_seconds=seconds / len(counted),
        wait_seconds=statistics.mean(record.get("perf/rollout_wait_s", 0.0) for record in counted),
        train_seconds=statistics.mean(record["perf/fwd_bwd_s"] for record in counted),
        reward=statistics.mean(record["reward"] for record in steps_made[-5:] if "reward" in record),
    )


def ceiling(model: Path, rounds: int = 3) -> Speed:
    """A step with nothing around it: shared prefill, decoding, forward and backward."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    lora = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    policy = get_peft_model(base, lora).eval()
    prompts = torch.randint(100, 40_000, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    tokens = pack(groups(PROMPTS, SIZE, prompt=PROMPT_TOKENS, reply=NEW_TOKENS), TOKEN_BUDGET).computed_tokens
    train = bare_step(model, LoraSection(rank=RANK), tokens=tokens, targets=PROMPTS * SIZE * NEW_TOKENS)

    @torch.inference_mode()
    def generate() -> None:
        cache = DynamicCache()
        logits = policy(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(SIZE)
        logits = logits.repeat_interleave(SIZE, 0)
        for _ in range(NEW_TOKENS - 1):
            chosen = torch.multinomial(logits.softmax(-1), 1)
            logits = policy(input_ids=chosen, past_key_values=cache, use_cache=True).logits[:, -1]
        torch.multinomial(logits.softmax(-1), 1)

    seconds: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        generate()
        between = time.perf_counter()
        train()
        seconds.append((between - began, time.perf_counter() - between))
    generating, training = (statistics.median(part) for part in zip(*seconds[1:], strict=True))
    whole = generating + training
    samples = PROMPTS * SIZE
    return Speed("ceiling", samples / whole, samples * NEW_TOKENS / whole, whole, generating, training, float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    there = [name for name in typing.get_args(_engine_type()) if isinstance(name, str)]
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engines", nargs="*", default=there, choices=there)
    parser.add_argument("--trl-python", default=os.environ.get("FARFLUNG_TRL_PYTHON", ""))
    parser.add_argument("--vllm-python", default=os.environ.get("FARFLUNG_VLLM_PYTHON", ""))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.steps <= SKIPPED:
        parser.error(f"--steps: at least {SKIPPED + 1}, since the first {SKIPPED} are not counted")
    model = resolve(PACKAGED, print).directory
    with tempfile.TemporaryDirectory() as scratch:
        speeds = [ceiling(model)]
        for engine in options.engines:
            print(f"measuring Farflung with the {engine} engine ...", flush=True)
            speeds.append(ours(Path(scratch), engine, options.steps))
        if options.trl_python and options.vllm_python:
            print("measuring TRL ...", flush=True)
            speeds.append(theirs(Path(scratch), model, options.trl_python, options.vllm_python, options.steps))
        else:
            print("TRL is left out: name its environment with --trl-python, and vLLM's with --vllm-python")
    print(show(speeds))
    if options.json:
        options.json.write_text(json.dumps([asdict(speed) for speed in speeds], indent=1) + "\n")


def _engine_type() -> Any:
    hint = typing.get_type_hints(FleetSection, include_extras=True)["engine"]
    return typing.get_args(hint)[0]


def show(speeds: list[Speed]) -> str:
    """The table, and how far each target is met."""
    lines = [f"{'':28} {'samples/s':>10} {'tokens/s':>9} {'step s':>8} {'waiting':>8} {'training':>9} {'reward':>7}"]
    lines += [
        f"{speed.name:28} {speed.samples_per_second:>10.2f} {speed.tokens_per_second:>9.1f} {speed.step_seconds:>8.2f}"
        f" {speed.wait_seconds:>8.2f} {speed.train_seconds:>9.2f} {speed.reward:>7.2f}"
        for speed in speeds
    ]
    by_name = {speed.name: speed.samples_per_second for speed in speeds}
    top, peer = by_name["ceiling"], by_name.get("TRL, vLLM engine")
    if (embedded := by_name.get("Farflung, embedded engine")) is not None:
        lines.append(f"embedded over the ceiling: {embedded / top:.2f} (target {OF_CEILING})")
        if peer:
            lines.append(f"embedded over TRL: {embedded / peer:.2f} (target {FASTER_EMBEDDED})")
    if (vllm := by_name.get("Farflung, vllm engine")) is not None and peer:
        lines.append(f"both on vLLM, over TRL: {vllm / peer:.2f} (target {FASTER_VLLM})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
