"""A LoRA adapter as one blob: safetensors with PEFT's tensor names, its adapter_config.json in the header.

One object, one sha256, one download, and nothing in it is executed. Read here without torch, so that every component
can check a blob or turn it into the directory that PEFT and vLLM load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from broker.errors import AdapterError

CONFIG_KEY = "adapter_config"
"""The metadata key that holds adapter_config.json. The blob has no other."""

HEADER_LIMIT = 100_000_000
"""safetensors' own bound on a header, in bytes."""


def adapter_config(data: bytes) -> dict[str, object]:
    """The PEFT configuration of an adapter blob. Raises AdapterError unless `data` is a whole one."""
    header = _header(data)
    text = header.get("__metadata__", {}).get(CONFIG_KEY)
    if not isinstance(text, str):
        raise AdapterError(f"the adapter has no {CONFIG_KEY!r} in its metadata; it was not written by a learner")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AdapterError(f"the adapter's configuration is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError("the adapter's configuration is not that of a LoRA adapter (peft_type LORA)")
    return config


def write_adapter_directory(data: bytes, directory: Path) -> None:
    """Write an adapter blob as the directory that `PeftModel.from_pretrained` loads. Raises AdapterError.

    adapter_model.safetensors holds the blob's own bytes, so its sha256 is the blob's.
    """
    config = adapter_config(data)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(data)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _header(data: bytes) -> dict[str, Any]:
    """Parse and check a safetensors header (8 bytes of little-endian length, JSON, then the tensors back to back)."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(HEADER_LIMIT, len(data) - 8):
        raise AdapterError(f"expected an adapter in safetensors format, got {len(data)} bytes that are none")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise AdapterError(f"the adapter's safetensors header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise AdapterError("the adapter's safetensors header is no map of tensors")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not tensors:
        raise AdapterError("the adapter holds no tensors")
    end = 0
    try:
        for start, stop in sorted(tuple(entry["data_offsets"]) for entry in tensors.values()):
            if start != end or stop < start:
                raise AdapterError("the adapter's tensors do not lie back to back")
            end = stop
    except (TypeError, KeyError, ValueError):
        raise AdapterError("the adapter's safetensors header has a tensor without offsets") from None
    if 8 + length + end != len(data):
        raise AdapterError(f"the adapter is cut short or padded: expected {8 + length + end} bytes, got {len(data)}")
    return header
