"""An adapter that does nothing: it adapts one linear layer with zeros. Pure numpy, no torch.

It shows whether a server loads adapters of a rank; and the base model is sampled from under it. Beside requests under
adapters, vLLM on a CPU (0.32) computes a request without one under the adapter in its last slot: it marks "none" by the
index -1, and takes that as an index. Under zeros there is no such request.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PROJECTION = re.compile(r"^(.*layers?\.0\..*\b(?:q_proj|qkv_proj|o_proj|up_proj|down_proj))\.weight$")
"""Weights of linear layers that every server adapts, by the names that most models give them."""


def write_zero_adapter(model: Path, rank: int, directory: Path) -> bool:
    """Write an adapter of `rank` for `model` to `directory`; False when no layer is known to be adaptable."""
    found = _projection(model)
    if found is None:
        return False
    name, (out_features, in_features) = found
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            f"base_model.model.{name}.lora_A.weight": np.zeros((rank, in_features), np.float32),
            f"base_model.model.{name}.lora_B.weight": np.zeros((out_features, rank), np.float32),
        },
        directory / "adapter_model.safetensors",
    )
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.rpartition(".")[2]],
        "base_model_name_or_path": "",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return True


def _projection(model: Path) -> tuple[str, tuple[int, int]] | None:
    """The name and shape of a linear layer of `model`, from the headers of its weight files."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for tensor, entry in sorted(header.items()):
            match = PROJECTION.match(tensor)
            if match and len(entry.get("shape", ())) == 2:
                return match[1], (entry["shape"][0], entry["shape"][1])
    return None
