"""An adapter that another tool trained, as the first version of a run: checked before anything is claimed.

What cannot be served and trained as it is, is refused with the reason and what to write instead. Read without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import save

from broker.adapters import CONFIG_KEY
from broker.errors import ConfigError
from broker.models import ModelFiles
from broker.runspec import LoraSection

CHANGES = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
)
"""Fields of a PEFT configuration that make more of an adapter than `x + alpha / rank * B A x` on linear layers."""

PREFIX = "base_model.model."
SIDES = (".lora_A.weight", ".lora_B.weight")


def read_adapter(directory: Path, lora: LoraSection, model: ModelFiles) -> bytes:
    """The PEFT adapter in `directory` as a blob (see `broker.adapters`), in float32, for a run of `model` with `lora`.

    Raises ConfigError when it is no such adapter, when no engine could serve it as it is, or when it is not of the
    shape that `lora` describes.
    """
    config = _config(directory)
    if reasons := _unservable(config):
        raise ConfigError(
            f"--adapter {directory}: it sets {', '.join(reasons)}; plain LoRA on linear layers is what is trained and "
            "served. Train it without, or merge it into the base model"
        )
    for key, ours, theirs in (("rank", lora.rank, config.get("r")), ("alpha", lora.alpha, config.get("lora_alpha"))):
        if ours != theirs:
            raise ConfigError(f"--adapter {directory}: it has {key} {theirs}, lora.{key} is {ours}; write {theirs}")
    tensors = _tensors(directory)
    shapes = _linear_shapes(model.directory)
    _check_targets(directory, tensors, lora, shapes)
    _check_shapes(directory, tensors, lora.rank, shapes)
    config |= {"base_model_name_or_path": model.public_name, "inference_mode": True}
    data: bytes = save(tensors, {CONFIG_KEY: json.dumps(config, indent=2, sort_keys=True)})
    return data


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "adapter_config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--adapter {directory}: {path.name} cannot be read ({error}); expected a directory that PEFT's "
            "save_pretrained wrote"
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ConfigError(f"--adapter {directory}: expected a LoRA adapter, found {kind or 'none'}")
    return config


def _unservable(config: dict[str, Any]) -> list[str]:
    found = [name for name in CHANGES if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"bias={config['bias']!r}")
    return found


def _tensors(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    path = directory / "adapter_model.safetensors"
    try:
        entries = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except OSError:
        raise ConfigError(
            f"--adapter {directory}: it has no {path.name}; save it with save_pretrained(..., safe_serialization=True)"
        ) from None
    except safetensors.SafetensorError as error:
        raise ConfigError(f"--adapter {directory}: {path.name} is damaged ({error})") from None
    found = {name: _as_float32(entry, f"--adapter {directory}: {name}") for name, entry in entries}
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise ConfigError(f"--adapter {directory}: {name} holds values that are not finite")
    return found


def _as_float32(entry: dict[str, Any], what: str) -> npt.NDArray[np.float32]:
    raw, shape = bytes(entry["data"]), tuple(entry["shape"])
    match entry["dtype"]:
        case "F32":
            values = np.frombuffer(raw, "<f4")
        case "F16":
            values = np.frombuffer(raw, "<f2").astype(np.float32)
        case "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        case other:
            raise ConfigError(f"{what} is of type {other}; expected F32, F16 or BF16")
    return values.reshape(shape).astype(np.float32)


def _linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer in the model's blocks, by name, from the headers of its weight files."""
    found: dict[str, tuple[int, int]] = {}
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            parts = name.split(".")
            inside = any(part.isdecimal() for part in parts)
            if inside and parts[-1] == "weight" and len(entry.get("shape", ())) == 2:
                found[name.removesuffix(".weight")] = (entry["shape"][0], entry["shape"][1])
    return found


def _check_targets(
    directory: Path,
    tensors: dict[str, npt.NDArray[np.float32]],
    lora: LoraSection,
    shapes: dict[str, tuple[int, int]],
) -> None:
    adapted = {_stem(name, directory).rpartition(".")[2] for name in tensors}
    wanted = set(lora.targets) or {name.rpartition(".")[2] for name in shapes}
    if adapted != wanted:
        ours = ", ".join(lora.targets) or "empty, which means every linear layer"
        raise ConfigError(
            f"--adapter {directory}: it adapts {', '.join(sorted(adapted))}; lora.targets is {ours}. "
            f"Write targets = {json.dumps(sorted(adapted))}"
        )


def _check_shapes(
    directory: Path, tensors: dict[str, npt.NDArray[np.float32]], rank: int, shapes: dict[str, tuple[int, int]]
) -> None:
    for name, values in tensors.items():
        stem = _stem(name, directory)
        if stem not in shapes:
            raise ConfigError(f"--adapter {directory}: it adapts {stem}, which is no linear layer of the base model")
        expected = (rank, shapes[stem][1]) if name.endswith(SIDES[0]) else (shapes[stem][0], rank)
        if values.shape != expected:
            raise ConfigError(
                f"--adapter {directory}: {name} has the shape {values.shape}, this base model and lora.rank need "
                f"{expected}; was it trained on another model?"
            )
        other = PREFIX + stem + (SIDES[1] if name.endswith(SIDES[0]) else SIDES[0])
        if other not in tensors:
            raise ConfigError(f"--adapter {directory}: {other} is missing")


def _stem(name: str, directory: Path) -> str:
    """The module that a tensor adapts."""
    side = next((side for side in SIDES if name.endswith(side)), None)
    if side is None or not name.startswith(PREFIX):
        raise ConfigError(f"--adapter {directory}: {name} is no weight of a LoRA adapter as PEFT saves it")
    return name.removeprefix(PREFIX).removesuffix(side)
