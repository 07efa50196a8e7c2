"""What a busy replica notices of versions that are published: `python -m tests.benchmarks.while_publishing`.

CLIENTS requests at a time are kept at one replica, each under the version that is active when it begins, for stretches
of SECONDS: nothing is published in every other one, and in those between a version of the demo model's adapter (rank 8)
every PAUSE seconds from the end of the one before. Learner's end, activator, replica and engine are the product's, on a
real nats-server and a real S3 server. The engine is the embedded one, and then vLLM where FARFLUNG_VLLM_PYTHON names
one.

Tokens are counted by the engine; a thread reads the counter, so that a busy event loop hides nothing. A gap is a time
in which it stood still. Everything runs on the same cores: what publishing costs in tokens/s is mostly the work of the
learner's end and of the servers, which stand elsewhere in earnest; a pause in generation would show as a long gap. On a
machine that other work keeps busy, `--tiny` measures the tests' tiny model, and the embedded engine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from actors.engines import VllmOptions, create_vllm
from actors.engines.base import Engine, Sampling
from actors.engines.embedded import EmbeddedEngine
from actors.engines.vllm import wire
from actors.engines.vllm.engine import VllmEngine
from broker.ending import end
from broker.errors import AdapterNotLoaded
from broker.models import PACKAGED, ModelFiles, resolve
from tests.benchmarks import measure
from tests.benchmarks.bench_sync import Fleet, connected, tensors_of
from tests.tiny import build_tiny_model

CLIENTS = 8
PROMPT, CONTINUATION = 44, 64
SECONDS = 20.0
PAUSE = 2.0
ROUNDS = 4
"""Stretches of each kind."""

TARGET = 0.8
"""Throughput while versions are published over that without. There is none for the gap, which is printed."""


@dataclass(frozen=True)
class Stretch:
    """What was seen in one stretch. Seconds; `gap` is the longest without a token, `typical` the median one."""

    tokens_per_second: float
    gap: float
    typical: float
    versions: int


class Counter:
    """Reads a counter in a thread of its own, and notes when it changed."""

    def __init__(self, read: Callable[[], float], pause: float) -> None:
        self._read, self._pause = read, pause
        self._changes: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Counter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(self._pause):
            count = self._read()
            if not self._changes or count != self._changes[-1][1]:
                self._changes.append((time.perf_counter(), count))

    def stretch(self, versions: int) -> Stretch:
        """What was counted from the first change to the last."""
        (began, first), (ended, last) = self._changes[0], self._changes[-1]
        gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self._changes)]
        return Stretch((last - first) / (ended - began), max(gaps), statistics.median(gaps), versions)


def counter_of(engine: Engine) -> Counter:
    """The tokens that an engine has sampled so far."""
    if isinstance(engine, EmbeddedEngine):
        return Counter(lambda: engine._batcher.generated_tokens, 0.001)
    assert isinstance(engine, VllmEngine)
    request = urllib.request.Request(engine._client.url + "/metrics", headers=engine._client._headers)

    def read() -> float:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return wire.counter(answer.read().decode(), "vllm:generation_tokens_total") or 0.0

    return Counter(read, 0.02)


async def ask_on(engine: Engine, fleet: Fleet, client: int) -> None:
    """One request after the other, each under the active version."""
    prompts = np.random.default_rng(client)
    for number in itertools.count():
        prompt = prompts.integers(20, 250, PROMPT).astype(np.int32)
        with contextlib.suppress(AdapterNotLoaded):  # it was retired between the look and the request
            await engine.generate(f"{client}.{number}", fleet.adapter, prompt, Sampling(CONTINUATION))


async def publish_on(fleet: Fleet, tensors: dict[str, torch.Tensor]) -> None:
    """One version after the other."""
    while True:
        await asyncio.sleep(PAUSE)
        for tensor in tensors.values():
            tensor.view(-1)[0] = fleet.version / 1e6  # each version has bytes of its own
        await fleet.publish(tensors)


async def stretch(engine: Engine, fleet: Fleet, tensors: dict[str, torch.Tensor] | None) -> Stretch:
    """One stretch; `tensors` are what is published, None: nothing."""
    before = fleet.version
    with counter_of(engine) as counter:
        publishing = asyncio.create_task(publish_on(fleet, tensors)) if tensors is not None else None
        await asyncio.sleep(SECONDS)
        if publishing is not None:
            await end(publishing)
    return counter.stretch(fleet.version - before)


async def _measure(name: str, engine: Engine, files: ModelFiles, directory: Path) -> list[measure.Row]:
    tensors = {name: 0.01 * tensor for name, tensor in tensors_of("rank", 8, files).items()}
    async with connected(directory) as (bus, store), Fleet(bus, store, files, directory, 1, engine).running() as fleet:
        await fleet.publish(tensors)
        clients = [asyncio.create_task(ask_on(engine, fleet, number)) for number in range(CLIENTS)]
        await stretch(engine, fleet, None)
        pairs = [(await stretch(engine, fleet, None), await stretch(engine, fleet, tensors)) for _ in range(ROUNDS)]
        await end(*clients)
    print(f"\n{name:30}{'tokens/s':>12}{'median gap, ms':>16}{'longest gap, ms':>17}{'versions':>10}")
    for what, side in (("nothing is published", 0), ("versions are published", 1)):
        found = [pair[side] for pair in pairs]
        print(
            f"  {what:28}{statistics.median(one.tokens_per_second for one in found):>12.1f}"
            f"{1000 * statistics.median(one.typical for one in found):>16.0f}"
            f"{1000 * max(one.gap for one in found):>17.0f}{sum(one.versions for one in found):>10}",
            flush=True,
        )
    calm, busy = (statistics.median(pair[side].tokens_per_second for pair in pairs) for side in (0, 1))
    ratio = statistics.median(busy.tokens_per_second / calm.tokens_per_second for calm, busy in pairs)
    return [measure.Row(f"{name}, while versions are published", busy, calm, ratio, "tokens/s", TARGET)]


async def _main(directory: Path, tiny: bool) -> list[measure.Row]:
    files = resolve(str(build_tiny_model(directory / "tiny")) if tiny else PACKAGED, print)
    rows = []
    embedded = EmbeddedEngine(files.directory, dtype="float32", threads=1)
    await embedded.start()
    try:
        rows += await _measure("embedded", embedded, files, directory / "embedded")
    finally:
        await embedded.close()
    if tiny:
        return rows
    if python := os.environ.get("FARFLUNG_VLLM_PYTHON"):
        options = VllmOptions(python=python, extra=["--enforce-eager"], dtype="float32", threads=1)
        vllm = create_vllm(
            files, rank=8, slots=4, context=512, options=options, scratch=directory / "scratch",
            log_file=directory / "vllm.log",
        )  # fmt: skip
        try:
            await vllm.start()
            rows += await _measure("vLLM", vllm, files, directory / "vllm")
        finally:
            await vllm.close()
    else:
        print("vLLM is measured where FARFLUNG_VLLM_PYTHON names a Python that has it")
    return rows


def run(tiny: bool = False) -> list[measure.Row]:
    """Measure the embedded engine, and vLLM where there is one."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_main(Path(directory), tiny))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on the embedded engine")
    print(measure.show(run(parser.parse_args().tiny)))
