"""One process of a node in a test: trains two steps as torchrun's processes do, and writes what it has.

python -m tests.node_worker MODEL DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from broker.messages import unpack_floats
from broker.runspec import AlgorithmSection, LoraSection, OptimizerSection
from broker.trajectories import Row
from learner.model import Policy
from learner.node import LeadingPolicy, follow
from learner.packing import TokenSequence
from learner.probe import make_probe
from learner.sharding import Shards

ALGORITHM = AlgorithmSection(objective="gspo", kl_coef=0.1)
BUDGET = 150
"""Five rows, so that of two processes one has a row less."""


def sequences(seed: int) -> list[TokenSequence]:
    random = np.random.default_rng(seed)
    made = []
    for group in range(5):
        prompt = random.integers(3, 259, 40)
        for _ in range(4):
            ids = np.concatenate([prompt, random.integers(3, 259, 25)]).astype(np.int32)
            trained = np.arange(len(ids)) >= 40
            behaviour = np.where(trained, random.normal(-4, 0.1, len(ids)), 0).astype(np.float32)
            made.append(TokenSequence(ids, behaviour, trained, float(random.normal()), f"g{group}"))
    return made


SETTINGS = {
    "model_name": "tiny",
    "lora": LoraSection(rank=4, alpha=8),
    "optimizer": OptimizerSection(lr=1e-2, max_grad_norm=1e6),
    "temperature": 0.8,
    "threads": 1,
}


def train(policy: Policy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two steps and a score; the gradients of the second step, and everything else that can be compared."""
    gradients: dict[str, Any] = {}

    def keep(label: str) -> None:
        if label == "after_backward":
            gradients.update({name: p.grad.clone() for name, p in policy._weights.items() if p.grad is not None})

    _, probe = make_probe(policy, run="r", tolerance=1e-3, seed=0)
    policy.train_step(sequences(1), token_budget=BUDGET, algorithm=ALGORITHM)
    first = policy.adapter_bytes()
    stats = policy.train_step(sequences(2), token_budget=BUDGET, algorithm=ALGORITHM, progress=keep)
    rows = [Row.of(s.token_ids, s.behaviour, s.trained, np.where(s.trained, 1, -1)) for s in sequences(3)]
    scores = [score.tolist() for score in policy.score(rows, first)]
    return gradients, {"stats": stats, "scores": scores, "probe": unpack_floats(probe.adapted)}


def main() -> None:
    model, directory = Path(sys.argv[1]), Path(sys.argv[2])
    shards = Shards.join()
    if shards.rank == 0:
        leading = LeadingPolicy(model, shards=shards, **SETTINGS)
        gradients, found = train(leading)
        stats = found["stats"]
        figures = {name: getattr(stats, name) for name in ("loss", "kl", "k3")}
        np.savez(directory / "figures.npz", scores=np.asarray(found["scores"]), probe=found["probe"], **figures)
        safetensors.torch.save_file(gradients, directory / "gradients")  # type: ignore[arg-type]
        (directory / "state-0").write_bytes(leading.adapter_bytes() + leading.optimizer_bytes())
        (directory / "local").write_text(str(sharded_share(leading)))
        leading.close()
    else:
        policy = Policy(model, shards=shards, **SETTINGS)  # type: ignore[arg-type]
        follow(policy, shards)
        (directory / f"state-{shards.rank}").write_bytes(policy.adapter_bytes() + policy.optimizer_bytes())
    shards.leave()


def sharded_share(policy: Policy) -> float:
    """The share of the layers' frozen parameters that this process holds."""
    layers: Any = policy._decoder.layers
    frozen = [parameter for parameter in layers.parameters() if not parameter.requires_grad]
    return sum(part.to_local().numel() for part in frozen) / sum(whole.numel() for whole in frozen)


if __name__ == "__main__":
    main()
