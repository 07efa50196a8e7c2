"""Inference engines behind one small protocol (`base.Engine`).

`embedded` runs transformers and PEFT in the actor's own process; `vllm` drives a vLLM server. Both are made here, so
that nothing else knows which it has.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.engines.base import Engine
from broker.errors import ConfigError
from broker.models import ModelFiles

log = logging.getLogger(__name__)

LONGEST_SOCKET = 100
"""Bytes that the path of a Unix socket may have, with some to spare: Linux takes 107, macOS 103."""


def create_embedded(
    model_dir: Path,
    *,
    dtype: str = "auto",
    adapter_slots: int = 4,
    max_batch: int = 64,
    cache_tokens: int = 32768,
    threads: int | None = None,
    context: int | None = None,
) -> Engine:
    """The embedded engine for the model in `model_dir`; `start()` it before use.

    The arguments mean what they mean to `embedded.EmbeddedEngine`. Loads torch here, not at import. Raises
    ConfigError.
    """
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


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to get a vLLM server: at `url` (with `key`, if it wants one), or started by `python` with `extra` flags.

    `events`: a ZMQ address at which it publishes KV-cache events. Empty: a server that is started here is told to.
    """

    url: str = ""
    key: str = ""
    events: str = ""
    python: str = ""
    extra: Sequence[str] = ()
    dtype: str = "auto"
    cache_tokens: int = 16384
    threads: int | None = None


def create_vllm(
    files: ModelFiles, *, rank: int, slots: int, context: int, options: VllmOptions, scratch: Path, log_file: Path
) -> Engine:
    """A vLLM server as an engine that takes `slots` adapters up to `rank`; `start()` it before use.

    `scratch` is a directory of this process that the server can read; a server that is started here writes to
    `log_file`. Raises ConfigError.
    """
    from actors.engines.vllm import flags
    from actors.engines.vllm.engine import VllmEngine
    from actors.engines.vllm.process import Attached, Home, Supervised, find_program

    needs = flags.Needs(rank=rank, slots=slots, context=context)
    seeds = False
    events = options.events
    if events and not _has_zmq():
        raise ConfigError("--engine-events needs `pip install 'farflung[events]'`")
    flags.lora_rank(rank)
    if options.url:
        home: Home = Attached(options.url, key=options.key)
    else:
        program = find_program(options.python or sys.executable)
        if reason := flags.refuse_version(program.version):
            raise ConfigError(reason)
        dtype = options.dtype if options.dtype != "auto" else "float32" if program.cpu else "bfloat16"
        config = json.loads((files.directory / "config.json").read_text())
        seeds = not program.cpu
        space = flags.cache_bytes(config, options.cache_tokens, dtype)
        publish = ""
        if not events and flags.publishes_events(program.version, options.extra):
            publish = events = _events_address(scratch)
        log.info("starting vLLM %s in %s: adapters up to rank %d, %d slots", program.version, dtype, rank, slots)
        home = Supervised(
            lambda port: flags.command(
                program.python,
                files.directory,
                files.public_name,
                needs=needs,
                version=program.version,
                dtype=dtype,
                port=port,
                events=publish,
                extra=options.extra,
            ),
            lambda key: flags.environment(key=key, cpu=program.cpu, threads=options.threads, cache_bytes=space),
            log_file,
        )
    return VllmEngine(home, files, needs, scratch, seeds=seeds, events=events)


def _has_zmq() -> bool:
    return importlib.util.find_spec("zmq") is not None


def _events_address(scratch: Path) -> str:
    """A socket in `scratch` for the KV-cache events, which hold prompts: no other user can read there as on a port.

    Empty where events cannot be had: they only make placement better.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    address = scratch / "events"
    if not _has_zmq():
        log.info("no KV-cache events: `pip install 'farflung[events]'`")
    elif len(str(address).encode()) > LONGEST_SOCKET:
        log.info("no KV-cache events: the path %s is too long for a socket; set FARFLUNG_CACHE to a shorter", address)
    else:
        return f"ipc://{address}"
    return ""
