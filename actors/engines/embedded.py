"""The embedded engine: continuous batching with LoRA adapters on transformers, in the actor's own process.

From transformers come the model (any causal one whose attention goes through `AttentionInterface`), its rotary
embeddings and kernels; from PEFT the reading of adapters. transformers' own continuous batching manager was measured
first: 31-51 tokens a second on the CPU where `generate` makes 90-140, without adapters and without a way to hand it
logprobs of the sampled distribution. So written here, each in a file of its own: the schedule (`batcher`), the rows
of KV cache (`rows`), attention over a flat batch without padding (`attention`), the prefix store (`prefixes`), LoRA
by slices of that batch (`lora`) and sampling (`sampler`).

All torch work runs in one thread, which owns every tensor and all state of the batch. The event loop only puts
commands into its queue and awaits futures, so it never waits for a forward, and nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from actors.engines.base import EngineHealth, Generation, Sampling
from actors.engines.batcher import Batcher, Sequence, promise
from actors.engines.model import PolicyModel
from broker.errors import GenerationError, PromptTooLong

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK = 512
"""Prompt tokens computed beside one decode step: half a second of a small model on two CPU cores, the longest that a
running request then waits for its next token; and enough for matrix products at full speed."""

CUDA_CHUNK = 2048
"""The same on a GPU, which needs more tokens to be busy and computes them in a tenth of the time."""

UNHEALTHY_AFTER = 3
"""Steps that fail one after the other until the engine calls itself unhealthy: one may be the fault of a request."""


class EmbeddedEngine:
    """An `Engine` (see `base`) on transformers and PEFT, on the GPU when there is one.

    `dtype` "auto" is bfloat16 on a GPU and float32 on a CPU. At most `max_batch` requests run at once, together using
    at most `cache_tokens` tokens of KV cache; others wait. The store of prefixes holds as many tokens again. `threads`
    is how many CPU threads torch may use (None: torch's choice). `context` shortens the model's own; a request that
    needs more than `cache_tokens` never fits, so that shortens it as well.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        adapter_slots: int = 4,
        max_batch: int = 64,
        cache_tokens: int = 32768,
        threads: int | None = None,
        context: int | None = None,
    ) -> None:
        self._model_dir, self._dtype, self._threads = model_dir, dtype, threads
        self._adapter_slots, self._max_batch, self._cache_tokens = adapter_slots, max_batch, cache_tokens
        self._context = context
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = False
        self._in_flight: set[str] = set()
        self._model: PolicyModel
        self._batcher: Batcher

    async def start(self) -> None:
        """Load the base model. Raises ModelError."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before; make a new one")
        started: Future[None] = promise()
        self._thread = threading.Thread(target=self._work, args=(started,), name="embedded-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(started)
        self._open = True

    async def close(self) -> None:
        """Cancel what runs, end the thread and free the model. May be called twice."""
        if self._open:
            self._open = False
            self._commands.put(self._stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load the PEFT adapter in `directory` under `name`. Raises AdapterError.

        It is read beside the running batch; only putting it in place happens between two steps.
        """
        what = f"loading adapter {name}"
        if await self._between_steps(what, lambda: self._batcher.stay(name)):
            return
        weights = await asyncio.to_thread(self._model.reader.read, directory)
        await self._between_steps(what, lambda: self._batcher.install(name, weights))

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name` from now on; returns once the last has ended and everything is forgotten."""
        if not self._open:
            return
        removed: Future[None] = promise()
        self._commands.put(lambda: self._batcher.remove(name, removed))
        await asyncio.wrap_future(removed)

    async def generate(
        self, request_id: str, adapter: str | None, prompt: npt.NDArray[np.int32], sampling: Sampling
    ) -> Generation:
        """Sample one continuation of `prompt` (token ids, int32 [n]) under `adapter` (None: the base model).

        Samples fewer than `max_new_tokens` where the context ends. If the awaiting task is cancelled, so is the
        request. Raises AdapterNotLoaded, PromptTooLong, or GenerationError.
        """
        self._require_open(f"request {request_id}")
        limit = self._check(request_id, prompt, sampling)
        sequence = Sequence(request_id, adapter, np.array(prompt, dtype=np.int32), limit, sampling)
        self._in_flight.add(request_id)
        self._commands.put(lambda: self._batcher.submit(sequence))
        try:
            return await asyncio.wrap_future(sequence.future)
        except asyncio.CancelledError:
            self._commands.put(lambda: self._batcher.cancel(request_id))
            raise
        finally:
            self._in_flight.discard(request_id)

    async def cancel(self, request_id: str) -> None:
        """End `request_id` now: its `generate` returns what was sampled so far, finish "cancelled"."""
        if self._open:
            await self._between_steps(f"cancelling {request_id}", lambda: self._batcher.cancel(request_id))

    async def health(self) -> EngineHealth:
        """What the engine is doing; not ok when it is not running or its last steps all failed."""
        alive = self._open and self._thread is not None and self._thread.is_alive()
        detail = "running" if alive else "closed" if self._thread is not None else "not started"
        if not alive:
            return EngineHealth(False, detail, (), self._adapter_slots, 0, 0, 0, self._cache_tokens, 0, 0)
        batcher = self._batcher
        running = batcher.active
        if batcher.last_failure is not None:
            detail = f"running; the last failed step: {batcher.last_failure}"
        return EngineHealth(
            ok=batcher.failed_steps < UNHEALTHY_AFTER,
            detail=detail,
            adapters=self._model.adapters.names,
            adapter_slots=self._adapter_slots,
            running=running,
            waiting=max(0, len(self._in_flight) - running),
            context=self._context_tokens,
            cache_tokens=self._cache_tokens,
            generated_tokens=batcher.generated_tokens,
            prefilled_tokens=batcher.prefilled_tokens,
        )

    @property
    def _context_tokens(self) -> int:
        return min(self._model.context, self._cache_tokens, self._context or self._model.context)

    def _require_open(self, what: str) -> None:
        if not self._open:
            raise GenerationError(f"{what}: the engine is not running (start() it, or it was closed)")

    def _check(self, request_id: str, prompt: npt.NDArray[np.int32], sampling: Sampling) -> int:
        """Refuse what cannot be sampled; returns how many tokens may be."""
        problem = None
        if prompt.ndim != 1 or len(prompt) == 0:
            problem = f"a prompt has at least one token in one dimension, this one has the shape {prompt.shape}"
        elif prompt.min() < 0 or prompt.max() >= self._model.vocabulary:
            problem = (
                f"token ids are 0 to {self._model.vocabulary - 1}, the prompt has {prompt.min()} to {prompt.max()}"
            )
        elif (
            sampling.max_new_tokens < 1 or sampling.temperature < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1
        ):
            problem = f"max_new_tokens >= 1, temperature >= 0, top_k >= 0 and 0 < top_p <= 1 are needed: {sampling}"
        elif request_id in self._in_flight:
            problem = "a request of this id is in flight already"
        if problem is not None:
            raise GenerationError(f"request {request_id}: {problem}", retryable=False)
        room = self._context_tokens - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"request {request_id}: the prompt's {len(prompt)} tokens leave no room in a context of "
                f"{self._context_tokens}"
            )
        return min(sampling.max_new_tokens, room)

    async def _between_steps(self, what: str, command: Callable[[], T]) -> T:
        """Run `command` in the engine's thread before its next step."""
        self._require_open(what)
        done: Future[T] = promise()

        def run() -> None:
            try:
                done.set_result(command())
            except Exception as error:  # noqa: BLE001 - whoever awaits the command handles its errors
                done.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(done)

    # What follows runs in the engine's thread.

    def _work(self, started: Future[None]) -> None:
        with torch.inference_mode():
            try:
                self._load()
            except Exception as error:  # noqa: BLE001 - `start` raises it
                started.set_exception(error)
                return
            started.set_result(None)
            try:
                self._serve()
            except _Stopped:
                self._batcher.cancel_all()
            except Exception as error:
                logger.exception("the embedded engine's thread ended")
                self._open = False
                while not self._commands.empty():
                    self._commands.get()()
                self._batcher.fail_all(f"the engine's thread ended: {error}")
        del self._batcher, self._model

    def _load(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._model = PolicyModel(self._model_dir, dtype=self._dtype, adapter_slots=self._adapter_slots)
        chunk = CHUNK if self._model.device.type == "cpu" else CUDA_CHUNK
        self._batcher = Batcher(self._model, max_batch=self._max_batch, cache_tokens=self._cache_tokens, chunk=chunk)

    def _serve(self) -> None:
        """Obey commands between steps, and sleep while there is neither. Ends by `_Stopped`."""
        while True:
            if not self._batcher.active and not self._batcher.waiting:
                self._commands.get()()
            while not self._commands.empty():
                self._commands.get()()
            self._batcher.tick()

    def _stop(self) -> None:
        raise _Stopped


class _Stopped(Exception):
    """Ends the engine's thread."""
