"""Continuous batching: which tokens the next forward computes, and what becomes of the logits.

Synchronous and without a thread of its own: `submit`, `cancel`, `install` and `remove` change the state, `tick` runs
one step. The invariant: every submitted sequence's future is resolved exactly once, with a Generation or an error,
whatever fails.

A step holds one token of every running sequence and, beside them, up to `chunk` tokens of prompts, so that a long
prompt delays the running ones by a bounded amount. A prompt starts from the longest prefix in the store; one whose
larger part another prompt in progress is computing waits for that; and those identical to it when it is done sample
from its logits and start from its cache, so that a group's prompt is computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engines.attention import BandPart, Part, PromptPart, Step
from actors.engines.base import FinishReason, Generation, Sampling
from actors.engines.lora import AdapterWeights
from actors.engines.model import PolicyModel
from actors.engines.prefixes import PrefixStore, Tokens, common_prefix
from actors.engines.rows import Row, Rows
from actors.engines.sampler import sample
from broker.errors import AdapterNotLoaded, GenerationError

logger = logging.getLogger(__name__)


def promise() -> Future[Any]:
    """A future that whoever awaits it cannot cancel, so that it can always be resolved."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False, slots=True)
class Sequence:
    """One request: waiting, then computing its prompt (`cache`), then running (`row`).

    `limit` is the most tokens it may sample.
    """

    request_id: str
    adapter: str | None
    prompt: Tokens
    limit: int
    sampling: Sampling
    future: Future[Generation] = field(default_factory=promise)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    cache: Tensor | None = None
    computed: int = 0
    """Prompt tokens whose keys and values are in `cache`."""
    row: Row | None = None
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.generator = np.random.default_rng(None if seed is None else seed % 2**64)

    @property
    def reach(self) -> int:
        """The most tokens of cache it may come to need."""
        return len(self.prompt) + self.limit

    def same_prompt(self, other: Sequence) -> bool:
        return self.adapter == other.adapter and np.array_equal(self.prompt, other.prompt)


@dataclass(slots=True)
class _Plan:
    """A step, with the chunk that each prompt computes in it and the sequences that sample from the kept logits."""

    step: Step
    chunks: list[tuple[Sequence, int]]
    sampling: list[Sequence]
    source: list[int]
    """For each of `sampling` its row of the kept logits."""


class Batcher:
    """The running batch of one model.

    At most `max_batch` sequences run at once, and together they need at most `cache_tokens` tokens of cache; the
    prefix store holds as many again.
    """

    def __init__(self, model: PolicyModel, *, max_batch: int, cache_tokens: int, chunk: int) -> None:
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.failed_steps = 0
        """Steps that failed since one last succeeded."""
        self.last_failure: str | None = None
        self._model = model
        self._max_batch, self._cache_tokens, self._chunk = max_batch, cache_tokens, chunk
        self._rows = Rows(model.shape, cache_tokens)
        self._prefixes = PrefixStore(cache_tokens)
        self._waiting: dict[str, Sequence] = {}
        self._prompts: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._leaving: dict[str, list[Future[None]]] = {}

    @property
    def active(self) -> int:
        """How many sequences compute their prompt or run."""
        return len(self._prompts) + len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queue `sequence`; its future is resolved when it ends."""
        if sequence.adapter not in self._model.adapters or sequence.adapter in self._leaving:
            message = f"adapter {sequence.adapter} is not loaded; loaded are {list(self._model.adapters.names)}"
            sequence.future.set_exception(AdapterNotLoaded(message))
        else:
            self._waiting[sequence.request_id] = sequence

    def cancel(self, request_id: str) -> None:
        """End `request_id` with what it has sampled so far. Unknown requests are ignored."""
        if (sequence := self._waiting.get(request_id)) or (sequence := self._prompts.get(request_id)):
            self._release([sequence])
            self._resolve(sequence, "cancelled")
        elif sequence := self._running.get(request_id):
            self._end([(sequence, "cancelled")])
        self._let_go()

    def cancel_all(self) -> None:
        for request_id in [*self._waiting, *self._prompts, *self._running]:
            self.cancel(request_id)

    def fail_all(self, reason: str) -> None:
        for sequence in [*self._waiting.values(), *self._prompts.values(), *self._running.values()]:
            self._fail(sequence, reason)
        self._let_go()

    def stay(self, name: str) -> bool:
        """Whether `name` is served; if it was about to leave, it stays."""
        for removed in self._leaving.pop(name, []):
            removed.set_result(None)
        return name in self._model.adapters

    def install(self, name: str, weights: AdapterWeights) -> None:
        """Serve `weights` as `name`. Raises AdapterError when no slot is left."""
        self.stay(name)
        self._model.adapters.install(name, weights)

    def remove(self, name: str, removed: Future[None]) -> None:
        """Refuse new requests for `name`, and forget it, with its prefixes, when none uses it any more."""
        self._leaving.setdefault(name, []).append(removed)
        self._let_go()

    def tick(self) -> None:
        """Run one step. A failure ends the sequences that were in it and leaves the others alone."""
        self._admit()
        plan: _Plan | None = None
        try:
            plan = self._plan()
            if plan is None:
                return
            picked, logprobs = self._sample(plan, self._model.logits(plan.step))
            self._advance(plan, picked, logprobs)
            self.failed_steps = 0
        except Exception as error:
            self.failed_steps += 1
            self.last_failure = f"{type(error).__name__}: {error}"
            computing = list(self._prompts.values()) if plan is None else [sequence for sequence, _ in plan.chunks]
            concerned = {*self._running.values(), *computing} & {*self._running.values(), *self._prompts.values()}
            logger.exception("a step of %d sequences failed", len(concerned))
            for sequence in concerned:
                self._fail(sequence, f"the engine's forward failed: {self.last_failure}")
        self._let_go()

    def _admit(self) -> None:
        """Start the prompts of waiting sequences, first come first served, as long as they fit."""
        expected = 0
        for sequence in list(self._waiting.values()):
            if self.active + expected >= self._max_batch or not self._fits(sequence):
                return
            pieces = self._prefixes.match(sequence.adapter, sequence.prompt[:-1])
            cached = sum(piece.shape[2] for piece in pieces)
            if self._worth_waiting(sequence, cached):
                expected += 1
                continue
            try:
                cache = self._model.shape.tokens(len(sequence.prompt))
            except RuntimeError as error:
                self._fail(sequence, f"no memory for a prompt of {len(sequence.prompt)} tokens: {error}")
                continue
            at = 0
            for piece in pieces:
                cache[:, :, at : at + piece.shape[2]] = piece
                at += piece.shape[2]
            sequence.cache, sequence.cached, sequence.computed = cache, cached, cached
            del self._waiting[sequence.request_id]
            self._prompts[sequence.request_id] = sequence

    def _fits(self, sequence: Sequence) -> bool:
        if self.active >= self._max_batch:
            return False
        reserved = sum(other.reach for other in (*self._prompts.values(), *self._running.values()))
        return reserved + sequence.reach <= self._cache_tokens

    def _worth_waiting(self, sequence: Sequence, cached: int) -> bool:
        """Whether a prompt in progress computes at least half of what `sequence` would have to compute itself."""
        missing = len(sequence.prompt) - cached
        return any(
            2 * (common_prefix(other.prompt, sequence.prompt) - cached) >= missing
            for other in self._prompts.values()
            if other.adapter == sequence.adapter
        )

    def _plan(self) -> _Plan | None:
        """The next step; None when there is nothing to compute."""
        self._rows.make_room(sequence.row for sequence in self._running.values() if sequence.row)
        chunks, left = [], self._chunk
        for sequence in self._prompts.values():
            if count := min(left, len(sequence.prompt) - sequence.computed):
                chunks.append((sequence, count))
                left -= count
        if not chunks and not self._running:
            return None
        return self._lay_out(chunks)

    def _lay_out(self, chunks: list[tuple[Sequence, int]]) -> _Plan:
        """Put the tokens beside each other: sorted by adapter, running sequences before prompts."""
        step = Step([], [], [], [], [])
        plan = _Plan(step, chunks, [], [])
        places: dict[int, list[int]] = {id(band): [0] * len(band.rows) for band in self._rows.bands}
        for adapter in sorted({s.adapter for s in (*self._running.values(), *(s for s, _ in chunks))}, key=str):
            first = len(step.token_ids)
            running = [s for s in self._running.values() if s.adapter == adapter]
            for sequence in sorted(running, key=_place):
                assert sequence.row is not None
                places[id(sequence.row.band)][sequence.row.index] = len(step.token_ids)
                self._keep(plan, sequence, len(step.token_ids))
                step.token_ids.append(sequence.tokens[-1])
                step.positions.append(sequence.row.length)
            for sequence, count in chunks:
                if sequence.adapter == adapter:
                    step.parts.append(self._lay_out_chunk(plan, sequence, count))
            step.segments.append((first, len(step.token_ids), adapter))
        bands: list[Part] = [
            BandPart(band, [row.length for row in band.rows], _as_slice(places[id(band)], self._model.device))
            for band in self._rows.bands
        ]
        step.parts.extend(bands)
        return plan

    def _lay_out_chunk(self, plan: _Plan, sequence: Sequence, count: int) -> Part:
        assert sequence.cache is not None
        start, end, at = sequence.computed, sequence.computed + count, len(plan.step.token_ids)
        plan.step.token_ids.extend(sequence.prompt[start:end].tolist())
        plan.step.positions.extend(range(start, end))
        if end == len(sequence.prompt):
            self._keep(plan, sequence, at + count - 1)
        return PromptPart(sequence.cache, start, count, slice(at, at + count))

    def _keep(self, plan: _Plan, sequence: Sequence, token: int) -> None:
        plan.sampling.append(sequence)
        plan.source.append(len(plan.step.keep))
        plan.step.keep.append(token)

    def _sample(self, plan: _Plan, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw for each sampling sequence, and for the waiting ones whose prompt has just been computed for another."""
        for sequence, source in list(zip(plan.sampling, plan.source, strict=True)):
            if sequence.cache is not None:
                for twin in [other for other in self._waiting.values() if other.same_prompt(sequence)]:
                    if not self._fits(twin):
                        break
                    twin.cache, twin.cached, twin.computed = sequence.cache, len(twin.prompt), len(twin.prompt)
                    del self._waiting[twin.request_id]
                    self._prompts[twin.request_id] = twin
                    plan.chunks.append((twin, 0))
                    plan.sampling.append(twin)
                    plan.source.append(source)
        if len(plan.source) > len(plan.step.keep):
            logits = logits[torch.tensor(plan.source, device=logits.device)]
        return sample(logits, [s.sampling for s in plan.sampling], [s.generator for s in plan.sampling])

    def _advance(self, plan: _Plan, picked: list[int], logprobs: list[float]) -> None:
        """Take in what the step computed: caches grow, tokens are added, prompts become rows, the finished end."""
        for sequence, count in plan.chunks:
            sequence.computed += count
            self.prefilled_tokens += count
        for sequence in self._running.values():
            if sequence.row is not None:
                sequence.row.length += 1
        ended: list[tuple[Sequence, FinishReason]] = []
        for sequence, token, logprob in zip(plan.sampling, picked, logprobs, strict=True):
            if not np.isfinite(logprob):
                self._fail(sequence, f"adapter {sequence.adapter} gave logits that are not finite")
                continue
            if sequence.cache is not None and sequence.cached < len(sequence.prompt):
                self._prefixes.insert(sequence.adapter, sequence.prompt, sequence.cache)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            self.generated_tokens += 1
            if token in sequence.sampling.stop_token_ids:
                ended.append((sequence, "stop"))
            elif len(sequence.tokens) >= sequence.limit:
                ended.append((sequence, "length"))
            elif sequence.cache is not None:
                sequence.row = self._rows.add(sequence.cache, sequence.limit)
                sequence.cache = None
                self._running[sequence.request_id] = self._prompts.pop(sequence.request_id)
        self._end(ended)

    def _end(self, ended: list[tuple[Sequence, FinishReason]]) -> None:
        """Keep the caches of sequences that sampled for their next turn, free their rows, answer."""
        for sequence, _ in ended:
            if sequence.row is not None:
                known = np.concatenate([sequence.prompt, np.asarray(sequence.tokens[:-1], dtype=np.int32)])
                self._prefixes.insert(sequence.adapter, known, sequence.row.band.tokens(sequence.row))
        self._release([sequence for sequence, _ in ended])
        for sequence, finish in ended:
            self._resolve(sequence, finish)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        if sequence.row is not None:
            sequence.row.band.clear(sequence.row)
        self._release([sequence])
        sequence.future.set_exception(GenerationError(f"request {sequence.request_id}: {reason}"))

    def _release(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        self._rows.remove(sequence.row for sequence in sequences if sequence.row)
        for sequence in sequences:
            for where in (self._waiting, self._prompts, self._running):
                where.pop(sequence.request_id, None)
            sequence.row = sequence.cache = None

    def _resolve(self, sequence: Sequence, finish: FinishReason) -> None:
        sequence.future.set_result(
            Generation(
                token_ids=np.asarray(sequence.tokens, dtype=np.int32),
                logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
                finish=finish,
                adapter=sequence.adapter,
                cached_tokens=sequence.cached,
            )
        )

    def _let_go(self) -> None:
        """Forget the adapters that are to leave and that no sequence uses any more."""
        if not self._leaving:
            return
        everywhere = (*self._waiting.values(), *self._prompts.values(), *self._running.values())
        used = {sequence.adapter for sequence in everywhere}
        for name in [name for name in self._leaving if name not in used]:
            self._model.adapters.remove(name)
            self._prefixes.drop(name)
            for removed in self._leaving.pop(name):
                removed.set_result(None)


def _place(sequence: Sequence) -> tuple[int, int]:
    assert sequence.row is not None
    return sequence.row.band.capacity, sequence.row.index


def _as_slice(places: list[int], device: torch.device) -> slice | Tensor:
    """`places` as a slice where they follow each other, which saves a gather in every layer."""
    first = places[0]
    if places == list(range(first, first + len(places))):
        return slice(first, first + len(places))
    return torch.tensor(places, device=device)
