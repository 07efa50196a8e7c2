"""How a vLLM server is started for a fleet's runs, and what a running one lacks. Pure: facts in, flags out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.errors import ConfigError
from broker.messages import Head

OLDEST = (0, 11)
"""The oldest version accepted: older ones lack processed logprobs, or token ids in the replies of /v1/completions."""

TESTED = "0.32.0"
"""The version that `make test-vllm` runs."""

SCALE_OUT = (0, 32)
"""From here on `/inference/v1/generate` is there when `--enable-scale-out` is given."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be."""

DEFAULT_RANK = 32
DEFAULT_SLOTS = 8

EVENTS = (0, 32)
"""From here on the KV-cache events are known to name adapters and salts, without which blocks cannot be told apart."""

OURS = re.compile(r"^[a-z0-9][a-z0-9-]*-(v[0-9]{6,}|probe)-[0-9a-f]{8}$|^farflung-base$")
"""Names of adapters that a replica loads; on an engine that nobody drives they are left over."""

ZERO = "farflung-base"
"""The adapter of zeros under which the base model is sampled (see `check`). It takes a slot of its own."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the runs of a fleet need of an engine: the largest rank, adapter slots in all, context in tokens."""

    rank: int
    slots: int
    context: int


def needs(
    heads: Iterable[Head], fleet: str, *, context: int, rank: int | None = None, slots: int | None = None
) -> Needs:
    """What the fleet's running runs need together; `rank` and `slots`, where given, decide instead.

    With no run to go by: DEFAULT_RANK and DEFAULT_SLOTS.
    """
    running = [head for head in heads if head.fleet == fleet and head.state == "running"]
    ranks = [int(head.spec.get("lora", {}).get("rank", 0)) for head in running]
    held = [head.adapter_slots for head in running]
    return Needs(
        rank=rank or max([number for number in ranks if number], default=DEFAULT_RANK),
        slots=slots or (sum(held) if held else DEFAULT_SLOTS),
        context=context,
    )


def lora_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` that takes adapters of `rank`. Raises ConfigError above the largest."""
    for allowed in RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(f"lora.rank {rank}: vLLM takes at most {RANKS[-1]}; lower it, or use the embedded engine")


def parse_version(text: str) -> tuple[int, ...]:
    """(0, 32, 0) of "0.32.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def refuse_version(text: str) -> str | None:
    """Why this version will not do, None when it will."""
    if parse_version(text) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return f"vLLM {text or 'of an unknown version'}: expected {oldest} or newer (tested with {TESTED}); upgrade it"


def command(
    python: str,
    model: Path,
    name: str,
    *,
    needs: Needs,
    version: str,
    dtype: str,
    port: int,
    events: str = "",
    extra: Collection[str] = (),
) -> list[str]:
    """The command that starts a server on loopback. `extra` flags come last, so that they win.

    `events`: where it publishes KV-cache events, an `ipc://` address; empty: nowhere.
    """
    flags = [
        "--model", str(model), "--served-model-name", name,
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--max-model-len", str(needs.context),
        "--enable-lora", "--max-loras", str(needs.slots + 1), "--max-lora-rank", str(lora_rank(needs.rank)),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if parse_version(version) >= SCALE_OUT:
        flags.append("--enable-scale-out")
    if events:
        publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
        flags += ["--kv-events-config", json.dumps(publisher)]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *flags, *extra]


def publishes_events(version: str, extra: Iterable[str]) -> bool:
    """Whether a server that is started with `extra` flags is to publish KV-cache events for one reader.

    Not where the flags say otherwise, and not where it has a cache for each of several data-parallel ranks.
    """
    own = ("--kv-events-config", "--data-parallel", "-dp", "--no-enable-prefix-caching")
    return parse_version(version) >= EVENTS and not any(flag.startswith(own) for flag in extra)


def environment(*, key: str, cpu: bool, threads: int | None, cache_bytes: int) -> dict[str, str]:
    """What a server needs beside its flags. `key` guards its API; on a CPU the size of the cache stands here."""
    found = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    if cpu:
        found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(cache_bytes / 2**30)))
        if threads is not None:
            found |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return found


def cache_bytes(config: Mapping[str, Any], tokens: int, dtype: str) -> int:
    """Bytes that the keys and values of `tokens` tokens take in a model of this config.json."""
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 1)
    size = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    per_layer = 2 * int(text.get("num_key_value_heads") or heads) * size * (4 if dtype == "float32" else 2)
    return tokens * per_layer * int(text.get("num_hidden_layers") or 0)


def foreign(on_engine: Mapping[str, str], ours: Collection[str]) -> list[str]:
    """Adapters on the engine that a replica loaded once and this one did not: to be unloaded."""
    return sorted(name for name in on_engine if name not in ours and OURS.match(name))


def strangers(on_engine: Mapping[str, str]) -> list[str]:
    """Adapters on the engine that no replica ever loads. They are left alone, and take slots."""
    return sorted(name for name in on_engine if not OURS.match(name))


@dataclass(frozen=True, slots=True)
class Found:
    """What a running server was found to be, by asking it and by what it did.

    `load_problem` is what it said to loading an adapter of the rank that is needed (None: it took it), `slots` None
    when it does not tell, `occupied` those that adapters of others take, `greedy_logprob` the logprob it gave to a
    token that was the only one allowed.
    """

    version: str
    context: int
    lora_routes: bool
    load_problem: str | None
    slots: int | None
    occupied: int
    greedy_logprob: float


def missing(found: Found, needs: Needs) -> list[str]:
    """What a running server lacks, each with the flag that gives it; empty when it will do."""
    wrong = []
    if reason := refuse_version(found.version):
        wrong.append(reason)
    if found.context < needs.context:
        wrong.append(
            f"its context is {found.context} tokens, {needs.context} are needed: --max-model-len {needs.context}"
        )
    if not found.lora_routes:
        wrong.append("it loads no adapters at run time: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
    elif found.load_problem is not None:
        wrong.append(_flag_for(found.load_problem, needs))
    total = needs.slots + 1 + found.occupied
    if found.slots is not None and found.slots < total:
        others = f" + {found.occupied} for adapters of others" if found.occupied else ""
        wrong.append(
            f"it holds {found.slots} adapters, {needs.slots} for the runs + 1 for the base model{others} are needed: "
            f"--max-loras {total}"
        )
    if abs(found.greedy_logprob) > 1e-3:
        wrong.append(
            "its logprobs are not those of the distribution it samples from: --logprobs-mode processed_logprobs"
        )
    return wrong


def _flag_for(problem: str, needs: Needs) -> str:
    if "not enabled" in problem or "enable-lora" in problem:
        return f"LoRA is off: --enable-lora --max-loras {needs.slots + 1} --max-lora-rank {lora_rank(needs.rank)}"
    if "max_lora_rank" in problem:
        return f"it takes no adapter of rank {needs.rank}: --max-lora-rank {lora_rank(needs.rank)}"
    return f"it does not load an adapter: {problem}"


FINAL = (
    "max_lora_rank",
    "target modules",
    "not supported",
    "not yet support",
    "not enabled",
    "only supports",
    "deserializing",
    "configuration fields",
)
"""Words in vLLM's answer to a load that put the blame on the adapter or on the server's flags: no retry helps."""


def at_fault(problem: str) -> bool:
    """Whether an adapter was refused for what it is; otherwise the engine is in trouble."""
    return any(word in problem for word in FINAL)
