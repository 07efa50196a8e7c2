"""The protocol every inference engine follows. Token ids in, token ids and logprobs out; text never enters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from broker.messages import CacheEvent

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one continuation.

    `temperature` 0 is greedy. `top_p` below 1 and `top_k` above 0 are for serving people: training uses neither,
    because the learner scores under the full distribution. `seed` makes one request's draw reproducible whatever
    else shares its batch. Sampling ends after one of `stop_token_ids` (kept as the last token) or after
    `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished continuation.

    `token_ids` int32 [n] are the sampled tokens, the stop token included; `logprobs` float32 [n] are theirs under
    the distribution they were drawn from (after temperature, top_k and top_p). `adapter` is the name of the adapter
    that computed them, None for the base model. `cached_tokens` counts the prompt tokens whose KV was reused.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish: FinishReason
    adapter: str | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What an engine says of itself.

    `context` is the longest prompt plus continuation, in tokens. `cache_tokens` is how many tokens of KV it can hold
    for prefix reuse. `adapter_slots` is how many adapters fit at once.
    """

    ok: bool
    detail: str
    adapters: tuple[str, ...]
    adapter_slots: int
    running: int
    waiting: int
    context: int
    cache_tokens: int
    generated_tokens: int
    """Tokens sampled since the start."""
    prefilled_tokens: int
    """Prompt tokens computed since the start (cached ones not counted)."""
    block: int = 16
    """Tokens in a block of the prefix cache."""
    incarnation: int = 0
    """Another number than before: the engine was started anew, or lost adapters. Whatever it held is to be loaded
    and proven again."""
    max_rank: int = 0
    """The largest LoRA rank it takes; 0: any."""


class Engine(Protocol):
    """An inference engine that serves one base model and several LoRA adapters at once."""

    async def start(self) -> None:
        """Load the base model. Raises ModelError, ConfigError, or ServerError."""

    async def close(self) -> None:
        """Cancel what runs and free everything."""

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load the PEFT adapter in `directory` under `name`.

        Loading a name that is loaded already does nothing: a name always means the same bytes. Requests in flight go
        on meanwhile. The directory stays as it is while the adapter is loaded. Raises AdapterError (unreadable, wrong
        shapes, no slot left), or EngineError when the engine cannot be asked now.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget `name` and every KV block computed under it, once no request uses it. Unknown names are ignored.

        Raises EngineError when the engine cannot be asked now.
        """

    async def generate(
        self, request_id: str, adapter: str | None, prompt: npt.NDArray[np.int32], sampling: Sampling
    ) -> Generation:
        """Sample one continuation of `prompt` (token ids, int32 [n]) under `adapter` (None: the base model).

        Raises AdapterNotLoaded, PromptTooLong, or GenerationError (empty prompt, engine closed).
        """

    async def cancel(self, request_id: str) -> None:
        """End `request_id` now: its `generate` returns what was sampled so far, finish "cancelled"."""

    async def health(self) -> EngineHealth: ...


@runtime_checkable
class PublishesCache(Protocol):
    """An engine that says what its prefix cache holds. Optional: routers guess it where an engine does not."""

    def cache_events(self) -> list[CacheEvent]:
        """What has changed since the last call, in order."""
