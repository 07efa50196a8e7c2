"""TRL's AsyncGRPOTrainer on a machine without a GPU, on the addition task: the peer of `bench_trl`.

    python -m tests.benchmarks.trl_peer SETTINGS.json

Runs in TRL's environment against a vLLM server. The settings: model, server, out (where each step's figures go, one
JSON object a line), prompts, group_size, new_tokens, steps, max_staleness, lr, rank. TRL's code is used as it is but
for what it takes from a GPU: the device's peak FLOPs are unknown, its tree attention (FlashAttention 3) is computed by
SDPA with the same mask, and vLLM, which runs in another process and another environment, is only claimed to be
importable.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM = "0.31.0"
"""The version that TRL is told; the newest it knows."""


def claim_vllm() -> None:
    """Make `import vllm` and its version succeed, with what TRL imports and never calls when it syncs adapters."""
    for name, members in {
        "vllm": (),
        "vllm.utils": (),
        "vllm.utils.network_utils": ("get_ip", "get_open_port"),
        "vllm.distributed": (),
        "vllm.distributed.weight_transfer": (),
        "vllm.distributed.weight_transfer.nccl_common": ("trainer_init",),
        "vllm.distributed.weight_transfer.packed_tensor": ("packed_nccl_broadcast_producer",),
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = VLLM  # type: ignore[attr-defined]
        for member in members:
            setattr(module, member, None)
        sys.modules[name] = module


claim_vllm()
sys.path.insert(0, str(EXAMPLES))

import torch
from addition import Tasks, reward
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing


def dense_tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What TRL's tree attention computes, by one SDPA call with a dense mask. Shapes as in `transformers`."""
    length = query.shape[2]
    visible = torch.zeros(length, length, dtype=torch.bool)
    for segment in range(len(tree_cu_seqlens_q) - 1):
        first, last = int(tree_cu_seqlens_q[segment]), int(tree_cu_seqlens_q[segment + 1])
        seen = tree_kv_index[int(tree_cu_seqlens_k[segment]) : int(tree_cu_seqlens_k[segment + 1])]
        above = seen[: len(seen) - (last - first)]
        visible[first:last, above] = True
        visible[first:last, first:last] = torch.ones(last - first, last - first, dtype=torch.bool).tril()
    grouped = key.shape[1] != query.shape[1]
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=grouped)
    return mixed.transpose(1, 2).contiguous(), None


class Figures(TrainerCallback):
    """Appends what TRL logs of each step to a file."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        record = {"step": state.global_step, "time": time.time(), **(logs or {})}
        with self._out.open("a") as file:
            file.write(json.dumps({name: value for name, value in record.items() if value is not None}) + "\n")


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    packing.tree_attention = dense_tree_attention
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    tasks = Tasks()
    rows = [tasks[index] for index in torch.randperm(len(tasks), generator=torch.Generator().manual_seed(0)).tolist()]
    config = AsyncGRPOConfig(
        output_dir=settings["out"] + ".trl",
        vllm_server_base_url=settings["server"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["prompts"] * settings["group_size"] // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["new_tokens"],
        max_steps=settings["steps"],
        max_staleness=settings["max_staleness"],
        learning_rate=settings["lr"],
        token_budget=-1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = AsyncGRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        peft_config=LoraConfig(r=settings["rank"], lora_alpha=2 * settings["rank"], target_modules="all-linear"),
        callbacks=[Figures(Path(settings["out"]))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
