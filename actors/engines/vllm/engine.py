"""vLLM as an `Engine`: a server that is started or attached to, checked, watched, and followed through its deaths.

Invariants: a reply is handed on only when the server named the adapter that was asked for, and that adapter is the
directory that was loaded under its name; blocks of the prefix cache are salted with that directory, so that a reused
name never meets old blocks; a server that was started anew, or that lost an adapter, counts up `incarnation`, and what
it held is gone until it is loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.engines.base import EngineHealth, Generation, Sampling
from actors.engines.cache_events import CacheFeed
from actors.engines.vllm import flags, wire
from actors.engines.vllm.check import write_zero_adapter
from actors.engines.vllm.client import EngineClient, Refused
from actors.engines.vllm.flags import ZERO, Found, Needs
from actors.engines.vllm.process import Home
from actors.engines.vllm.wire import Dialect, Served
from broker.ending import end
from broker.errors import (
    AdapterError,
    AdapterNotLoaded,
    ConfigError,
    EngineError,
    FarflungError,
    GenerationError,
    PromptTooLong,
    ServerError,
)
from broker.messages import CacheEvent
from broker.models import ModelFiles, fingerprint_of

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""How often a server is looked at when nothing is suspected."""

QUIET_SECONDS = 10.0
"""A server that showed no sign of life for this long is asked for one."""

HANG_SECONDS = 240.0
"""A server that shows none for this long after that hangs. Its longest step must fit in: on a CPU that others kept busy
the prompts of 32 requests took more than a minute."""

FIRST_SECONDS = 600.0
"""How long the first request after a start may take: kernels are made for it."""

DEFAULT_BLOCK = 16
"""Tokens in a block of the prefix cache where the server does not tell."""

TOO_LONG = ("context length", "max_model_len", "longer than")
"""Words in vLLM's answer to a prompt that does not fit."""

BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts to get a server back."""


class VllmEngine:
    """An `Engine` (see `base`) over a vLLM server for the model in `files`.

    `home` is where the server comes from, `needs` what it must be able to do, `scratch` a directory of this process
    that the server can read. `seeds`: pass on each request's seed. On a CPU it must not be: vLLM 0.32 dies there of a
    seeded request whose prompt is computed in more than one step. `events`: the ZMQ address at which the server
    publishes KV-cache events, empty: it does not. `start` raises ConfigError with every flag that a server lacks.
    """

    def __init__(
        self,
        home: Home,
        files: ModelFiles,
        needs: Needs,
        scratch: Path,
        *,
        seeds: bool = False,
        events: str = "",
        quiet_seconds: float = QUIET_SECONDS,
        hang_seconds: float = HANG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._files = files
        self._needs = needs
        self._scratch = scratch
        self._seeds = seeds
        self._quiet_seconds, self._hang_seconds = quiet_seconds, hang_seconds
        self._clock = clock
        self._client: EngineClient
        self._served: Served
        self._dialect: Dialect = "generate"
        self._ok = False
        self._detail = "not started"
        self._incarnation = 0
        self._slots = needs.slots
        self._cache_tokens, self._block = 0, DEFAULT_BLOCK
        self._loaded: dict[str, str] = {}
        """The directory of each adapter that is confirmed to be on the server."""
        self._base = ""
        """The model that is asked for when the base is wanted: the adapter of zeros, where there is one."""
        self._loading: set[str] = set()
        self._leaving: set[str] = set()
        self._in_flight: dict[str, asyncio.Task[Any]] = {}
        self._cancelled: set[str] = set()
        self._using: Counter[str] = Counter()
        self._idle = asyncio.Condition()
        self._adapters = asyncio.Lock()
        self._suspected = asyncio.Event()
        self._alive_at = 0.0
        self._counted: float | None = None
        self._canary: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._generated = 0
        self._prefilled = 0
        self._feed = CacheFeed(events, owner=self._owner) if events else None
        self._following: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Get the server, check it, clean it. Raises ConfigError (flags it lacks), ServerError (it did not start)."""
        self._detail = "starting"
        try:
            self._client = await self._home.open()
        except EngineError as error:
            raise ServerError(f"{error}. Is the server running, and is its URL right?") from error
        try:
            await self._admit()
        except EngineError as error:
            await self.close()
            raise ServerError(f"the engine at {self._client.url} cannot be used: {error}") from error
        except BaseException:
            await self.close()
            raise
        await self._begin()
        self._watching = asyncio.create_task(self._watch(), name="watch-vllm")

    async def close(self) -> None:
        """Cancel what runs and leave the server as it was found, or end it if it is ours. May be called twice."""
        watching, self._watching = self._watching, None
        if watching is not None:
            await end(watching)
        self._ok, self._detail = False, "closed"
        ending = (self._canary, self._following, *self._in_flight.values())
        await end(*(task for task in ending if task is not None))
        if not self._home.restarts:
            for name in (*self._loaded, *([ZERO] if self._base == ZERO else [])):
                with contextlib.suppress(EngineError):
                    await self._client.unload(name)
        self._loaded.clear()
        await self._home.end()
        if hasattr(self, "_client"):
            await self._client.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _begin(self) -> None:
        self._incarnation += 1
        self._loaded.clear()
        if self._feed is not None:
            if self._following is not None:
                await end(self._following)  # with what its socket still holds of the server that ended
            self._feed.restart(self._block)
            self._following = asyncio.create_task(self._follow(self._feed), name="follow-cache")
        self._alive_at, self._counted = self._clock(), None
        self._ok, self._detail = True, "running"

    async def _admit(self) -> None:
        """Find out what the server is and can do. Raises ConfigError with all that it lacks, EngineError."""
        client = self._client
        version = await client.version()
        self._served = await client.served()
        self._refuse_other_model()
        for name in flags.foreign(self._served.adapters, ()):
            log.info("unloading %s, left on the engine by another replica", name)
            await client.unload(name)
        self._dialect = await self._find_dialect()
        only = await self._ask_for_one(self._served.base, only=True)
        routes, problem = await self._load_zero()
        metrics = await client.metrics()
        slots = wire.label(metrics, "vllm:lora_requests_info", "max_lora")
        occupied = len(flags.strangers(self._served.adapters))
        found = Found(
            version=version,
            context=self._served.context,
            lora_routes=routes,
            load_problem=problem,
            slots=int(slots) if slots else None,
            occupied=occupied,
            greedy_logprob=float(only.logprobs[0]),
        )
        if lacking := flags.missing(found, self._needs):
            raise ConfigError(f"the vLLM server at {client.url} will not do: {'; '.join(lacking)}")
        self._slots = int(slots) - occupied - 1 if slots else self._needs.slots
        self._cache_tokens = _cache_tokens(metrics)
        block = wire.label(metrics, "vllm:cache_config_info", "block_size")
        self._block = int(block) if block and block.isdecimal() and int(block) > 0 else DEFAULT_BLOCK
        log.info("vLLM %s at %s: %d adapters, %s", version, client.url, self._slots, wire.PATHS[self._dialect])

    def _refuse_other_model(self) -> None:
        """Raise ConfigError when the server's model lies on this machine and is another one."""
        root = Path(self._served.root)
        if root.is_dir() and (theirs := fingerprint_of(root)) != self._files.fingerprint:
            raise ConfigError(
                f"the vLLM server at {self._client.url} serves {root} (fingerprint {theirs}), this fleet's base model "
                f"is {self._files.directory} ({self._files.fingerprint}); start it with "
                f"--model {self._files.directory}"
            )

    async def _find_dialect(self) -> Dialect:
        """The better way of sampling that the server offers."""
        for dialect in ("generate", "completions"):
            self._dialect = dialect
            try:
                await self._ask_for_one(self._served.base, only=True)
            except Refused as error:
                if error.status not in (403, 404) or dialect == "completions":  # 403: built in, and switched off
                    raise
                continue
            return dialect
        raise AssertionError("unreachable")

    async def _load_zero(self) -> tuple[bool, str | None]:
        """Load the adapter of zeros, of the needed rank, and sample under it: whether that may be done, and what is
        said to it.
        """
        directory = self._scratch / "zero"
        if not await asyncio.to_thread(write_zero_adapter, self._files.directory, self._needs.rank, directory):
            self._base = self._served.base
            return True, None
        try:
            await self._client.load(ZERO, str(directory))
        except Refused as error:
            if error.status == 404 and error.said == "Not Found":
                return False, None
            return True, error.said
        self._base = ZERO
        await self._ask_for_one(ZERO, only=True)
        return True, None

    async def _ask_for_one(self, model: str, *, only: bool = False) -> Generation:
        """One token after a short prompt; `only`: allow one alone.

        `top_k` 1 by itself allows all that share the first place, which in bfloat16 are often two.
        """
        sampling = Sampling(max_new_tokens=1, top_k=1, top_p=1e-6) if only else Sampling(max_new_tokens=1)
        prompt = np.arange(3, 11, dtype=np.int32)
        body = wire.request(self._dialect, model, prompt, sampling, salt="", id=f"check-{secrets.token_hex(4)}")
        answer = await self._client.generate(self._dialect, body, timeout=FIRST_SECONDS)
        return wire.generation(self._dialect, answer, model=model, adapter=None)

    # ----------------------------------------------------------------------------------------------------- adapters

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load the PEFT adapter in `directory` under `name` and see that the server lists it so.

        A name that the server holds with other bytes is unloaded first. Raises AdapterError, EngineError.
        """
        async with self._adapters:
            self._require_running()
            if name in self._loaded:
                return
            if len(self._loaded) >= self._slots:
                raise AdapterError(
                    f"no slot left for adapter {name}: all {self._slots} are taken "
                    f"({', '.join(sorted(self._loaded))}). Unload one, or start the actor with more --adapter-slots"
                )
            incarnation, path = self._incarnation, str(directory)
            self._loading.add(name)
            try:
                await self._load(name, path)
                if (await self._client.served()).adapters.get(name) != path:
                    raise EngineError(f"the engine does not list {name} as loaded from {path}")
                if incarnation != self._incarnation or not self._ok:
                    raise EngineError(f"the engine was started anew while {name} was loaded")
                self._loaded[name] = path
            except EngineError:
                self._suspected.set()
                raise
            finally:
                self._loading.discard(name)

    async def _load(self, name: str, path: str) -> None:
        for attempt in (1, 2):
            try:
                await self._client.load(name, path)
                return
            except Refused as error:
                already = error.status == 400 and "already" in error.said
                if already and (await self._client.served()).adapters.get(name) == path:
                    return
                if already and attempt == 1:
                    log.warning("the engine holds %s with other bytes; it is unloaded first", name)
                    await self._client.unload(name)
                    continue
                if error.status == 404:
                    raise AdapterError(
                        f"the engine at {self._client.url} finds no adapter in {path} ({error.said}). An engine on "
                        "another machine or in a container must see the actor's cache at the same path (FARFLUNG_CACHE)"
                    ) from error
                if error.status < 500 or flags.at_fault(error.said):
                    raise AdapterError(f"the engine refuses adapter {name}: {error.said}") from error
                raise

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name` from now on; returns once the last has ended and the server forgot it.

        A server that cannot be asked now forgets it later: what it holds and nobody loaded is unloaded when it is seen.
        """
        if name not in self._loaded:
            return
        self._leaving.add(name)
        try:
            async with self._idle:
                await self._idle.wait_for(lambda: not self._using[name] or name not in self._loaded)
            async with self._adapters:
                if self._loaded.pop(name, None) is not None:
                    try:
                        await self._client.unload(name)
                    except EngineError as error:
                        log.info("%s is unloaded later: %s", name, error)
                        self._suspected.set()
        finally:
            self._leaving.discard(name)

    # --------------------------------------------------------------------------------------------------- generation

    async def generate(
        self, request_id: str, adapter: str | None, prompt: npt.NDArray[np.int32], sampling: Sampling
    ) -> Generation:
        """Sample one continuation of `prompt` (token ids, int32 [n]) under `adapter` (None: the base model).

        Raises AdapterNotLoaded, PromptTooLong, or GenerationError.
        """
        if not self._ok:
            raise GenerationError(f"request {request_id}: the engine is not running ({self._detail})")
        limit = self._check(request_id, prompt, sampling)
        if adapter is not None and (adapter not in self._loaded or adapter in self._leaving):
            raise AdapterNotLoaded(f"request {request_id}: adapter {adapter} is not loaded")
        model, salt = (adapter, wire.salt(adapter, self._loaded[adapter])) if adapter else (self._base, "")
        sampling = Sampling(
            max_new_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed if self._seeds else None,
            stop_token_ids=sampling.stop_token_ids,
        )
        body = wire.request(self._dialect, model, prompt, sampling, salt=salt, id=request_id)
        task = asyncio.create_task(self._client.generate(self._dialect, body))
        self._in_flight[request_id] = task
        self._using[adapter or ""] += 1
        try:
            result = await self._outcome(request_id, task, model, adapter)
        finally:
            await self._let_go(request_id, task, adapter or "")
        self._alive_at = self._clock()
        self._generated += len(result.token_ids)
        self._prefilled += max(0, len(prompt) - result.cached_tokens)
        return result

    async def _outcome(self, id: str, task: asyncio.Task[Any], model: str, adapter: str | None) -> Generation:
        await asyncio.wait({task})
        if task.cancelled():
            if id in self._cancelled:
                return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "cancelled", adapter, 0)
            raise GenerationError(f"request {id}: the engine {self._detail}")
        try:
            return wire.generation(self._dialect, task.result(), model=model, adapter=adapter)
        except Refused as error:
            self._alive_at = self._clock()
            raise self._meaning(id, error, adapter) from error
        except EngineError as error:
            self._suspected.set()
            raise GenerationError(f"request {id}: {error}") from error

    def _meaning(self, id: str, error: Refused, adapter: str | None) -> FarflungError:
        """What a refused request means."""
        if error.status == 404 and adapter is not None:
            self._suspected.set()
            if self._loaded.pop(adapter, None) is not None:
                log.warning("the engine has lost %s", adapter)
                self._incarnation += 1
            return AdapterNotLoaded(f"request {id}: the engine has no adapter {adapter} any more")
        if error.status == 400 and any(words in error.said for words in TOO_LONG):
            return PromptTooLong(f"request {id}: {error.said}")
        if error.status in (400, 401, 403, 422):
            return GenerationError(f"request {id}: {error}", retryable=False)
        self._suspected.set()
        return GenerationError(f"request {id}: {error}")

    async def _let_go(self, id: str, task: asyncio.Task[Any], adapter: str) -> None:
        task.cancel()
        self._in_flight.pop(id, None)
        self._cancelled.discard(id)
        self._using[adapter] -= 1
        async with self._idle:
            self._idle.notify_all()

    def _check(self, id: str, prompt: npt.NDArray[np.int32], sampling: Sampling) -> int:
        """Refuse what cannot be sampled; returns how many tokens may be."""
        if prompt.ndim != 1 or len(prompt) == 0:
            raise GenerationError(f"request {id}: a prompt has at least one token", retryable=False)
        if id in self._in_flight:
            raise GenerationError(f"request {id}: a request of this id is in flight already", retryable=False)
        room = self._served.context - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"request {id}: the prompt's {len(prompt)} tokens leave no room in a context of {self._served.context}"
            )
        return min(sampling.max_new_tokens, room)

    async def cancel(self, request_id: str) -> None:
        """End `request_id` now: its `generate` returns nothing sampled, finish "cancelled".

        vLLM's reply comes whole or not at all, so what was sampled so far is not known.
        """
        task = self._in_flight.get(request_id)
        if task is not None and not task.done():
            self._cancelled.add(request_id)
            task.cancel()

    async def health(self) -> EngineHealth:
        """What the engine is doing; not ok while the server is away."""
        return EngineHealth(
            ok=self._ok,
            detail=self._detail,
            adapters=tuple(self._loaded),
            adapter_slots=max(0, self._slots),
            running=len(self._in_flight),
            waiting=0,
            context=self._served.context if hasattr(self, "_served") else 0,
            cache_tokens=self._cache_tokens,
            block=self._block,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            incarnation=self._incarnation,
            max_rank=flags.lora_rank(self._needs.rank),
        )

    def _require_running(self) -> None:
        if not self._ok:
            raise EngineError(f"the engine is not running ({self._detail})")

    # -------------------------------------------------------------------------------------------------- prefix cache

    def cache_events(self) -> list[CacheEvent]:
        """What has changed in the server's prefix cache since the last call; nothing where it does not say."""
        return self._feed.cache_events() if self._feed is not None else []

    async def _follow(self, feed: CacheFeed) -> None:
        try:
            await feed.run()
        except EngineError as error:
            log.error("%s; routers guess what is cached", error)

    def _owner(self, name: str | None, salt: str) -> str | None:
        """Whose prompts meet the server's blocks under `name` and `salt`. Raises LookupError when none of ours do."""
        if not salt and name == (ZERO if self._base == ZERO else None):
            return None
        if name is not None and name in self._loaded and salt == wire.salt(name, self._loaded[name]):
            return name
        raise LookupError(f"{name} with salt {salt!r}")

    # ----------------------------------------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        """See that the server lives, and get it back when it does not.

        Nothing ends this but being cancelled: without it, no death would ever be noticed again.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._suspected.wait()
            self._suspected.clear()
            try:
                if why := await self._look():
                    await self._recover(why)
            except Exception:
                log.exception("looking after the vLLM server failed, going on")

    async def _look(self) -> str | None:
        """Why the server is lost, None while it is not."""
        if how := self._home.ended():
            return how
        try:
            await self._tidy(await self._client.served())
        except EngineError as error:
            if (how := self._home.ended()) or not self._home.restarts:
                return how or f"does not answer ({error})"
        return await self._listen()

    async def _tidy(self, served: Served) -> None:
        """Notice adapters that the server lost, and unload those that nobody loaded. Raises EngineError."""
        async with self._adapters:
            lost = [name for name, path in self._loaded.items() if served.adapters.get(name) != path]
            if lost and (await self._client.served()).adapters.keys().isdisjoint(lost):
                log.warning("the engine has lost %s", ", ".join(lost))
                for name in lost:
                    del self._loaded[name]
                self._incarnation += 1
                async with self._idle:
                    self._idle.notify_all()
            if self._base == ZERO and ZERO not in served.adapters:
                log.warning("the engine has lost the adapter of zeros")
                with contextlib.suppress(EngineError):
                    await self._client.load(ZERO, str(self._scratch / "zero"))
            for name in flags.foreign(served.adapters, {*self._loaded, *self._loading, ZERO}):
                log.info("unloading %s, which no run wants", name)
                with contextlib.suppress(EngineError):
                    await self._client.unload(name)

    async def _listen(self) -> str | None:
        """Look for signs of life: an answer, or tokens that are counted. Why the server is lost when there are none."""
        quiet = self._clock() - self._alive_at
        if quiet < self._quiet_seconds:
            return None
        if self._canary is None or self._canary.done():
            self._canary = asyncio.create_task(self._sing())
        with contextlib.suppress(EngineError):
            metrics = await self._client.metrics()
            counts = [wire.counter(metrics, f"vllm:{kind}_tokens_total") for kind in ("prompt", "generation")]
            counted = sum(count or 0.0 for count in counts)
            if self._counted is not None and counted != self._counted:
                self._alive_at = self._clock()
            self._counted = counted
        if self._clock() - self._alive_at < self._quiet_seconds + self._hang_seconds:
            return None
        return f"hangs: no sign of life for {quiet:.0f} s"

    async def _sing(self) -> None:
        """Ask for one token, for nothing but to hear something."""
        try:
            await self._ask_for_one(self._served.base)
        except EngineError as error:
            log.info("the engine gave no sign of life: %s", error)
        else:
            self._alive_at = self._clock()

    async def _recover(self, why: str) -> None:
        """Fail what is in flight, and do not rest until there is a server again that will do."""
        log.error("the vLLM server %s; getting it back", why)
        self._ok, self._detail = False, f"{why}; getting it back"
        self._loaded.clear()
        for task in (self._canary, *self._in_flight.values()):
            if task is not None:
                task.cancel()
        async with self._idle:
            self._idle.notify_all()
        attempt = 0
        while True:
            try:
                await self._client.close()
                await self._home.end(patience=0.0)
                self._client = await self._home.open()
                await self._admit()
            except Exception as error:  # a full disk, no memory: whatever it is, there is no server yet
                pause = BACKOFF[min(attempt, len(BACKOFF) - 1)]
                attempt += 1
                self._detail = f"{why}; attempt {attempt} to get it back failed: {error}"
                unforeseen = not isinstance(error, FarflungError | OSError)
                log.warning("%s; again in %.0f s", self._detail, pause, exc_info=unforeseen)
                await asyncio.sleep(pause)
                continue
            await self._begin()
            log.info("the vLLM server is back")
            return


def _cache_tokens(metrics: str) -> int:
    """The size of the KV cache in tokens, 0 when the server does not tell."""
    info = "vllm:cache_config_info"
    if size := wire.label(metrics, info, "kv_cache_size_tokens"):
        return int(size) if size.isdecimal() else 0
    blocks, block = wire.label(metrics, info, "num_gpu_blocks"), wire.label(metrics, info, "block_size")
    known = blocks and block and blocks.isdecimal() and block.isdecimal()
    return int(blocks) * int(block) if known and blocks and block else 0
