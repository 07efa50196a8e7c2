"""What TRL's own code computes on a small fixed batch: advantages, losses, and their gradients.

    python -m tests.references.trl_reference --write FILE     record
    python -m tests.references.trl_reference --check FILE     compute anew and compare with what is recorded

Runs where TRL is installed (`make trl-reference`), needs none of Farflung, and is what `test_objectives.py` and
`test_advantages.py` compare with. TRL's trainers are built for real, on a tiny random model; only the generation and
the model's logprobs are replaced by the batch's, in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.rewards import get_soft_overlong_punishment

from tests.tiny import build_tiny_model

GROUPS, SIZE, LONGEST = 2, 3, 9
TOLERANCE = 1e-9
"""A recorded value and one computed anew differ by rounding at most; advantages are float32 in TRL."""


def make_batch() -> dict[str, Any]:
    """Two groups of three completions of unequal length, with logprobs under four policies."""
    random = np.random.default_rng(7)
    lengths = [9, 4, 6, 1, 7, 3]
    mask = np.arange(LONGEST) < np.array(lengths)[:, None]
    shape = mask.shape
    logprobs = random.uniform(-4, -0.2, shape)
    batch = {
        "mask": mask.astype(int),
        "logprobs": logprobs,
        "behaviour": logprobs - random.normal(0, 0.5, shape),
        "reference": logprobs + random.normal(0, 0.3, shape),
        "teacher": random.uniform(-3, -0.2, shape),
        "rewards": np.array([1.0, 0.25, 0.0, 0.1, 0.9, 0.5]),
        "advantages": random.normal(0, 1, len(lengths)),
    }
    # Ratios far beyond every bound, on tokens that are rewarded and on tokens that are punished.
    batch["behaviour"][0, :2] = logprobs[0, :2] + [2.0, -2.0]
    batch["behaviour"][4, :2] = logprobs[4, :2] + [1.5, -2.5]
    return {name: values.tolist() for name, values in batch.items()}


def lists(rows: list[list[float]], mask: list[list[int]]) -> list[list[float]]:
    """Padded rows as lists of unequal length."""
    return [row[: sum(kept)] for row, kept in zip(rows, mask, strict=True)]


class Logprobs:
    """Stands in for the model's forward pass: the batch's logprobs, those of the policy with a gradient."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.current = torch.tensor(batch["logprobs"], requires_grad=True)
        self.reference = torch.tensor(batch["reference"])
        self.is_reference: Any = None

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        values = self.reference if model is self.is_reference else self.current
        values = values if torch.is_grad_enabled() else values.detach()
        return values, torch.zeros_like(values), None


def trainer_of(kind: Any, config: Any, batch: dict[str, Any], model: Path, scratch: Path, **settings: Any) -> Any:
    """One of TRL's trainers, on the CPU, whose completions and logprobs are the batch's."""
    rewards = iter(batch["rewards"] * 1000)
    made = kind(
        model=str(model),
        reward_funcs=lambda completions, **columns: [next(rewards) for _ in completions],
        args=config(
            output_dir=str(scratch),
            per_device_train_batch_size=GROUPS * SIZE,
            num_generations=SIZE,
            max_completion_length=16,
            report_to=[],
            use_cpu=True,
            bf16=False,
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    completions = [[5] * sum(kept) for kept in batch["mask"]]
    prompts = [[3, 4]] * len(completions)
    texts = ["x"] * len(completions)
    behaviour = lists(batch["behaviour"], batch["mask"])
    if kind is GRPOTrainer:
        made._generate = lambda prompts_: (prompts, completions, None, texts, behaviour, {}, None, None)
    else:
        made._generate = lambda prompts_: (prompts, completions, texts)
    made._get_per_token_logps_and_entropies = Logprobs(batch)
    return made


INPUTS = [{"prompt": prompt} for prompt in "aaabbb"]


def advantages(batch: dict[str, Any], model: Path, scratch: Path) -> dict[str, list[float]]:
    """TRL's advantages of the batch's rewards."""
    found = {}
    for name, kind, config, settings in (
        ("grpo", GRPOTrainer, GRPOConfig, {"scale_rewards": "group"}),
        ("grpo_no_std", GRPOTrainer, GRPOConfig, {"scale_rewards": "none"}),
        ("dr_grpo", GRPOTrainer, GRPOConfig, {"scale_rewards": "none", "loss_type": "dr_grpo"}),
        ("rloo", RLOOTrainer, RLOOConfig, {"normalize_advantages": False, "beta": 0.0}),
    ):
        trainer = trainer_of(kind, config, batch, model, scratch, **settings)
        with torch.no_grad():
            found[name] = trainer._generate_and_score_completions(INPUTS)["advantages"].tolist()
    return found


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # name, TRL's settings, ours
    ("ppo_clip", {"loss_type": "dapo", "delta": 3.0}, {"objective": "ppo_clip"}),
    (
        "ppo_clip, by sequence",
        {"loss_type": "grpo", "delta": 3.0},
        {"objective": "ppo_clip", "normalisation": "sequence"},
    ),
    ("ppo_clip, k3", {"loss_type": "dapo", "delta": 3.0, "beta": 0.3}, {"objective": "ppo_clip", "kl_coef": 0.3}),
    ("grpo", {"loss_type": "grpo"}, {"objective": "ppo_clip", "dual_clip": 0, "normalisation": "sequence"}),
    ("dapo", {"loss_type": "dapo"}, {"objective": "dapo"}),
    ("bnpo", {"loss_type": "bnpo"}, {"objective": "dapo"}),
    (
        "dr_grpo",
        {"loss_type": "dr_grpo"},
        {"objective": "dapo", "normalisation": "constant", "normalisation_length": 16},
    ),
    (
        "gspo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
        {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.08},
    ),
    ("cispo", {"loss_type": "cispo", "epsilon_high": 2.0}, {"objective": "cispo", "ratio_max": 2.0}),
    (
        "importance sampling",
        {"loss_type": "dapo", "epsilon": 1e9, "epsilon_high": 1e9},
        {"objective": "importance_sampling"},
    ),
]

CORRECTIONS: list[tuple[str, str, float | None, float, dict[str, Any]]] = [
    # name, TRL's mode, bounds, ours
    ("truncated, tokens", "token_truncate", None, 1.5, {"objective": "truncated_is", "ratio_max": 1.5}),
    (
        "truncated, sequences",
        "sequence_truncate",
        None,
        1.2,
        {"objective": "truncated_is", "ratio_max": 1.2, "importance_level": "sequence"},
    ),
    ("masked, tokens", "token_mask", 0.5, 1.5, {"objective": "masked_is", "ratio_min": 0.5, "ratio_max": 1.5}),
    (
        "masked, sequences",
        "sequence_mask",
        0.2,
        3.0,
        {"objective": "masked_is", "ratio_min": 0.2, "ratio_max": 3.0, "importance_level": "sequence"},
    ),
]


def losses(batch: dict[str, Any], model: Path, scratch: Path) -> list[dict[str, Any]]:
    """TRL's losses and their gradients with respect to the tokens' logprobs."""
    cases = []
    for name, settings, ours in CASES:
        plain = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0} | settings
        trainer = trainer_of(GRPOTrainer, GRPOConfig, batch, model, scratch, **plain)
        logprobs = trainer._get_per_token_logps_and_entropies
        logprobs.is_reference = trainer.ref_model
        with torch.no_grad():
            inputs = trainer._generate_and_score_completions(INPUTS)
        inputs["old_per_token_logps"] = torch.tensor(batch["behaviour"])
        cases.append(case(name, trainer, inputs, logprobs, batch, ours))
    for name, mode, low, high, ours in CORRECTIONS:
        trainer = trainer_of(GRPOTrainer, GRPOConfig, batch, model, scratch, loss_type="dapo", beta=0.0)
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer.vllm_importance_sampling_mode = mode
        trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = low, high
        logprobs = trainer._get_per_token_logps_and_entropies
        with torch.no_grad():
            inputs = trainer._generate_and_score_completions(INPUTS)
        cases.append(case(name, trainer, inputs, logprobs, batch, ours))
    return [*cases, distillation(batch)]


def case(
    name: str, trainer: Any, inputs: dict[str, Any], logprobs: Logprobs, batch: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    inputs["advantages"] = torch.tensor(batch["advantages"])
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert logprobs.current.grad is not None
    return {
        "name": name,
        "algorithm": ours,
        "on_policy": False,
        "loss": loss.item(),
        "gradient": logprobs.current.grad.tolist(),
    }


def distillation(batch: dict[str, Any]) -> dict[str, Any]:
    """TRL's on-policy distillation without its weights by position, from logits of a vocabulary of two."""
    trainer = IWOPDTrainer.__new__(IWOPDTrainer)
    trainer.temperature, trainer.iw_opd_gamma, trainer.iw_opd_epsilon = 1.0, 0.0, 1e-8
    trainer.model = torch.nn.Identity()
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    mask = torch.tensor(batch["mask"]).bool()
    current = torch.tensor(batch["logprobs"], requires_grad=True)
    loss = trainer._compute_iw_opd_loss(
        student_logits=torch.stack([current, torch.log1p(-current.exp())], dim=-1),
        completion_tokens=torch.zeros(mask.shape, dtype=torch.int64),
        labels=torch.where(mask, 0, -100),
        teacher_actual_logprobs=torch.tensor(batch["teacher"]),
        num_items_in_batch=mask.sum(),
    )
    loss.backward()
    assert current.grad is not None
    ours = {"objective": "distillation", "teacher": "teacher"}
    return {
        "name": "distillation",
        "algorithm": ours,
        "on_policy": True,
        "loss": loss.item(),
        "gradient": current.grad.tolist(),
    }


def overlong() -> dict[str, Any]:
    lengths = [0, 50, 80, 81, 90, 99, 100]
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    return {"longest": 100, "buffer": 20, "lengths": lengths, "punishment": punish([[1] * n for n in lengths])}


def compute() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as scratch:
        model = build_tiny_model(Path(scratch) / "tiny")
        batch = make_batch()
        return {
            "made_by": "tests/references/trl_reference.py with TRL 1.16",
            "batch": batch,
            "advantages": advantages(batch, model, Path(scratch)),
            "losses": losses(batch, model, Path(scratch)),
            "overlong": overlong(),
        }


def differences(recorded: Any, found: Any, path: str = "") -> list[str]:
    """Where two results differ by more than rounding."""
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        return [line for key in recorded for line in differences(recorded[key], found[key], f"{path}/{key}")]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        return [
            line
            for index, pair in enumerate(zip(recorded, found, strict=True))
            for line in differences(*pair, f"{path}/{index}")
        ]
    if isinstance(recorded, float) and isinstance(found, float):
        return [] if abs(recorded - found) <= TOLERANCE * max(1, abs(recorded)) else [f"{path}: {recorded} != {found}"]
    return [] if recorded == found else [f"{path}: {recorded!r} != {found!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    options = parser.parse_args()
    found = json.loads(json.dumps(compute()))
    if options.write:
        options.write.write_text(json.dumps(found) + "\n")
    if options.check:
        lines = differences(json.loads(options.check.read_text()), found)
        print("\n".join(lines) or f"TRL computes what {options.check} records ({len(found['losses'])} losses)")
        raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
