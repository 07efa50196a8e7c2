"""Inference engines behind one small protocol (`base.Engine`).

`embedded` runs transformers and PEFT in the actor's own process. An engine that drives another server takes its
place beside it and is named in `create`.
"""

from __future__ import annotations

from pathlib import Path

from actors.engines.base import Engine
from broker.errors import ConfigError


def create(
    kind: str,
    model_dir: Path,
    *,
    dtype: str = "auto",
    adapter_slots: int = 4,
    max_batch: int = 64,
    cache_tokens: int = 32768,
    threads: int | None = None,
    context: int | None = None,
) -> Engine:
    """The engine called `kind` ("embedded") for the model in `model_dir`; `start()` it before use.

    The other arguments mean what they mean to `embedded.EmbeddedEngine`. Loads torch here, not at import. Raises
    ConfigError.
    """
    if kind != "embedded":
        raise ConfigError(f"engine {kind!r}: expected 'embedded'")
    try:
        from actors.engines.embedded import EmbeddedEngine
    except ImportError as error:
        raise ConfigError(f"the embedded engine needs `pip install 'farflung[train]'`: {error}") from error
    return EmbeddedEngine(
        model_dir,
        dtype=dtype,
        adapter_slots=adapter_slots,
        max_batch=max_batch,
        cache_tokens=cache_tokens,
        threads=threads,
        context=context,
    )
