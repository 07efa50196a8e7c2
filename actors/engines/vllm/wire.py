"""What is said to a vLLM server and what it answers. Pure: JSON values in, our types out.

Two ways to sample with token ids in and out: `/inference/v1/generate`, and for servers without it `/v1/completions`
with a prompt of token ids. In both a reply names the model that served it, and what does not add up is refused: a
reply that is not certainly what was asked for is worth less than none.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actors.engines.base import FinishReason, Generation, Sampling
from broker.errors import EngineError

Dialect = Literal["generate", "completions"]

PATHS: Mapping[Dialect, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}

NO_LOGPROB = -9999.0
"""What vLLM writes for a logprob that is not a number or missing."""

FINISHES: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says it serves: its base model, and its adapters with the directory each was loaded from."""

    base: str
    root: str
    context: int
    adapters: Mapping[str, str]


def served(answer: Any) -> Served:
    """Read `/v1/models`. Raises EngineError."""
    try:
        cards = answer["data"]
        base = next(card for card in cards if card.get("parent") is None)
        return Served(
            base=str(base["id"]),
            root=str(base.get("root") or base["id"]),
            context=int(base["max_model_len"]),
            adapters={str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent") is not None},
        )
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise EngineError(f"the engine's list of models cannot be read ({error!r}): {_shown(answer)}") from None


def salt(name: str, path: str) -> str:
    """What keys the prefix cache for the adapter that was loaded from `path` as `name`: few letters, and no slash."""
    return hashlib.sha256(f"{name} {path}".encode()).hexdigest()[:32]


def request(
    dialect: Dialect, model: str, prompt: npt.NDArray[np.int32], sampling: Sampling, *, salt: str, id: str
) -> dict[str, Any]:
    """The body that asks for one continuation of `prompt` by `model`.

    `salt` goes into the keys of the prefix cache; empty: none. vLLM keys blocks by an adapter's name alone, and a name
    may have meant other bytes before. End-of-sequence tokens count only where `stop_token_ids` names them.
    """
    body: dict[str, Any] = {"model": model, "request_id": id}
    if salt:
        body["cache_salt"] = salt
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
    }
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    if dialect == "generate":
        return {**body, "token_ids": prompt.tolist(), "sampling_params": {**parameters, "detokenize": False}}
    return {**body, "prompt": prompt.tolist(), **parameters, "return_token_ids": True}


def generation(dialect: Dialect, answer: Any, *, model: str, adapter: str | None) -> Generation:
    """Read a reply. `model` is the name that was asked for, `adapter` ours for it.

    Raises EngineError for a reply of another model, or whose tokens and logprobs do not fit each other.
    """
    try:
        by = str(answer["model"])
        (choice,) = answer["choices"]
        tokens = [int(token) for token in choice["token_ids"]]
        if dialect == "generate":
            logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
            named = [int(entry["token_id"]) for entry in choice["logprobs"]["content"]]
        else:
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            named = tokens
        finish = FINISHES[choice["finish_reason"]]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engine's reply cannot be read ({error!r}): {_shown(answer)}") from None
    if by != model:
        raise EngineError(f"the engine answered as {by} where {model} was asked")
    if len(tokens) != len(logprobs) or named != tokens or (not tokens and finish != "cancelled"):
        raise EngineError(f"the engine's reply has {len(tokens)} tokens and {len(logprobs)} logprobs")
    if any(not math.isfinite(value) or value > 1e-3 or value <= NO_LOGPROB for value in logprobs):
        raise EngineError(f"the engine's reply has a logprob that is none: {_shown(logprobs)}")
    return Generation(
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        finish=finish,
        adapter=adapter,
        cached_tokens=cached,
    )


def problem(answer: Any) -> str:
    """What an error reply says."""
    if isinstance(answer, dict):
        inner = answer.get("error")
        if isinstance(inner, dict) and inner.get("message"):
            return str(inner["message"])
        for key in ("message", "detail"):
            if answer.get(key):
                return str(answer[key])
    return _shown(answer)


def counter(metrics: str, name: str) -> float | None:
    """The sum of a counter or gauge over its labels in Prometheus' text format, None when it is not there."""
    found = [float(match[1]) for match in re.finditer(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", metrics, re.M)]
    return sum(found) if found else None


def label(metrics: str, name: str, key: str) -> str | None:
    """The first value of a label of a metric, None when there is none."""
    match = re.search(rf'^{re.escape(name)}{{[^}}]*\b{re.escape(key)}="([^"]*)"', metrics, re.M)
    return match[1] if match else None


def _shown(answer: Any) -> str:
    text = " ".join(str(answer).split())
    return text[:300]
