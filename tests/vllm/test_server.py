"""The engine on a real vLLM server: what it computes is what the learner computes, and it survives what may happen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from actors.engines import VllmOptions, create_vllm
from actors.engines.base import Generation, Sampling
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.flags import ZERO, Needs
from actors.engines.vllm.process import Attached, Supervised
from broker.adapters import write_adapter_directory
from broker.blocks import HASH, chain
from broker.ending import end
from broker.errors import AdapterError, AdapterNotLoaded, ConfigError, GenerationError
from broker.messages import CacheEvent
from broker.models import ModelFiles
from broker.probe import verdict
from broker.runspec import LoraSection, OptimizerSection
from broker.trajectories import Row
from learner.model import Policy
from learner.probe import make_probe
from router.placement import Placer, Request
from tests.vllm.conftest import PYTHON
from tests.waiting import until, until_true

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

NAMES = ["run-v000001-aaaaaaaa", "run-v000002-bbbbbbbb"]
TEMPERATURE = 0.8
NEEDS = Needs(rank=8, slots=3, context=512)
FEW_BLOCKS = ["--num-gpu-blocks-override=48"]
"""A prefix cache that a test can fill."""

BACK = 900.0
"""Seconds in which a server is back: half a minute on an idle machine, and many minutes on a busy one."""


def supervised(files: ModelFiles, scratch: Path, **options: Any) -> VllmEngine:
    made = create_vllm(
        files,
        rank=NEEDS.rank,
        slots=NEEDS.slots,
        context=NEEDS.context,
        options=VllmOptions(python=PYTHON, extra=["--enforce-eager", *FEW_BLOCKS], dtype="float32", threads=1),
        scratch=scratch,
        log_file=scratch.with_suffix(".log"),
    )
    assert isinstance(made, VllmEngine)
    for name, value in options.items():
        setattr(made, f"_{name}", value)
    return made


@pytest.fixture(scope="module")
def policy(files: ModelFiles) -> Policy:
    return Policy(
        files.directory, model_name="tiny", lora=LoraSection(), optimizer=OptimizerSection(), temperature=TEMPERATURE,
        threads=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def versions(policy: Policy) -> dict[str, bytes]:
    """Two adapters as two steps might have left them."""
    return {name: policy.random_adapter_bytes(0.01 * (number + 1), number) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def directories(versions: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for name, data in versions.items():
        write_adapter_directory(data, root / name)
    return {name: root / name for name in versions}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """Started and supervised here; quick to suspect a hang."""
    scratch = tmp_path_factory.mktemp("supervised")
    engine = supervised(files, scratch / "s", seeds=True, quiet_seconds=2.0, hang_seconds=20.0)
    await engine.start()
    yield engine
    await engine.close()


def prompts(count: int, length: int = 20, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    return list(np.random.default_rng(seed).integers(3, 259, (count, length)).astype(np.int32))


async def sample(engine: VllmEngine, name: str | None, prompt: Any, tokens: int = 24, **sampling: Any) -> Generation:
    id = f"{name}-{np.random.default_rng().integers(1 << 40)}"
    return await engine.generate(id, name, prompt, Sampling(tokens, temperature=TEMPERATURE, **sampling))


def row(prompt: Any, result: Generation) -> Row:
    ids = np.concatenate([prompt, result.token_ids])
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.zeros(len(ids))
    logprobs[mask] = result.logprobs
    return Row.of(ids, logprobs, mask, np.where(mask, 0, -1))


async def test_base_and_two_versions_at_once_have_the_learners_logprobs(
    engine: VllmEngine, policy: Policy, versions: dict[str, bytes], directories: dict[str, Path]
) -> None:
    for loaded in NAMES:
        await engine.load_adapter(loaded, directories[loaded])
    asked = [(name, prompt) for prompt in prompts(6) for name in (None, *NAMES)]
    results = await asyncio.gather(*(sample(engine, name, prompt) for name, prompt in asked))
    everyone: list[str | None] = [None, *NAMES]
    for name in everyone:
        mine = [(prompt, result) for (by, prompt), result in zip(asked, results, strict=True) if by == name]
        rows = [row(prompt, result) for prompt, result in mine]
        assert {result.adapter for _, result in mine} == {name}
        recorded = np.concatenate([result.logprobs for _, result in mine])
        under = {other: np.concatenate(policy.score(rows, versions.get(other or ""))) for other in (None, *NAMES)}
        off = {other: float(np.abs(scores - recorded).mean()) for other, scores in under.items()}
        assert off.pop(name) < 1e-4
        assert min(off.values()) > 0.05, "none of the others would have passed"


async def test_the_learners_probe_passes(engine: VllmEngine, policy: Policy, tmp_path: Path) -> None:
    adapter, probe = make_probe(policy, run="run", tolerance=1e-3, seed=1)
    write_adapter_directory(adapter, tmp_path / "probe")
    name = "run-probe-12345678"
    await engine.load_adapter(name, tmp_path / "probe")
    found = []
    for by in (None, name):
        replies = [await sample(engine, by, prompt, 1) for prompt in probe.prompt_ids]
        found.append([(reply.token_ids, reply.logprobs) for reply in replies])
    await engine.unload_adapter(name)
    assert verdict(probe, found[0], found[1]) is None
    assert "serves the base model" in str(verdict(probe, found[0], found[0]))


async def test_seeds_stop_tokens_and_prefixes_mean_what_they_mean_elsewhere(engine: VllmEngine) -> None:
    (prompt,) = prompts(1, length=300, seed=5)
    first = await sample(engine, None, prompt, seed=11)
    again = await sample(engine, None, prompt, seed=11)
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.cached_tokens == 0
    assert again.cached_tokens >= 128, "the second time the prompt is cached"
    stop = int(first.token_ids[5])
    where = first.token_ids.tolist().index(stop)
    stopped = await sample(engine, None, prompt, seed=11, stop_token_ids=(stop,))
    assert (stopped.finish, stopped.token_ids.tolist()) == ("stop", first.token_ids[: where + 1].tolist())


class Cached:
    """What an engine's events say that it holds: our hashes, and a router's mirror."""

    def __init__(self, engine: VllmEngine, block: int) -> None:
        self._engine, self.block = engine, block
        self._held: set[bytes] = set()
        self.placer = Placer()
        self.placer.update_replica("r", confirmed=NAMES, accepts=True, cache_tokens=1 << 20, block=block)

    def follow(self) -> None:
        for event in self._engine.cache_events():
            hashes = {event.blocks[at : at + HASH] for at in range(0, len(event.blocks), HASH)}
            if event.change == "stored":
                self._held |= hashes
                self.placer.cache_stored("r", event.adapter, event.blocks)
            elif event.change == "removed":
                self._held -= hashes
                self.placer.cache_removed("r", event.blocks)
            else:
                self._held.clear()
                self.placer.clear_cache("r")

    def tokens(self, adapter: str | None, prompt: Any) -> int:
        """How many of a prompt's leading tokens are held, now that all was followed."""
        self.follow()
        hashes = chain(adapter, prompt, block=self.block)
        count = 0
        while count * HASH < len(hashes) and hashes[count * HASH : (count + 1) * HASH] in self._held:
            count += 1
        return count * self.block


async def test_what_the_server_caches_and_evicts_is_told_in_our_hashes(
    engine: VllmEngine, directories: dict[str, Path]
) -> None:
    for loaded in NAMES:
        await engine.load_adapter(loaded, directories[loaded])
    cached = Cached(engine, (await engine.health()).block)
    (prompt,) = prompts(1, length=3 * cached.block + 10, seed=21)
    whole = 3 * cached.block
    for name in (None, NAMES[0]):
        result = await sample(engine, name, prompt, 4)
        assert result.cached_tokens == 0
        await until(lambda name=name: cached.tokens(name, prompt) == whole, within=60, what="the blocks are told")  # type: ignore[misc]
        placed = cached.placer.place(Request(str(name), prompt, 4, name), 0.0)
        assert placed is not None
        assert (placed.kind, placed.cached) == ("affinity", whole)
    assert cached.tokens(NAMES[1], prompt) == 0, "one adapter's blocks are not another's"
    assert (await sample(engine, NAMES[1], prompt, 4)).cached_tokens == 0
    assert (await sample(engine, NAMES[0], prompt, 4)).cached_tokens == whole
    for number in range(100):
        (other,) = prompts(1, length=3 * cached.block + 10, seed=1000 + number)
        await sample(engine, None, other, 4)
        if cached.tokens(None, prompt) == 0:
            break
    assert cached.tokens(None, prompt) == 0, "it was evicted, and that was told"
    assert (await sample(engine, None, prompt, 4)).cached_tokens == 0
    for name in NAMES:
        await engine.unload_adapter(name)


async def test_generation_goes_on_while_an_adapter_is_loaded(
    engine: VllmEngine, directories: dict[str, Path], tmp_path: Path
) -> None:
    (prompt,) = prompts(1)
    running = asyncio.create_task(sample(engine, None, prompt, tokens=480))
    await until(lambda: engine._in_flight)
    name = "run-v000003-cccccccc"
    await engine.load_adapter(name, shutil.copytree(directories[NAMES[0]], tmp_path / "third"))
    assert not running.done(), "loading did not wait for it"
    assert len((await running).token_ids) == 480
    await engine.unload_adapter(name)


async def test_what_vllm_cannot_serve_is_refused_with_its_reason(
    engine: VllmEngine, directories: dict[str, Path], tmp_path: Path
) -> None:
    for change, said in (({"use_dora": True}, "DoRA"), ({"r": 64}, "max_lora_rank"), ({"bias": "all"}, "bias")):
        copy = shutil.copytree(directories[NAMES[0]], tmp_path / said)
        config = json.loads((copy / "adapter_config.json").read_text())
        (copy / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(AdapterError, match=said):
            await engine.load_adapter("run-v000004-dddddddd", copy)


@contextlib.asynccontextmanager
async def looking_away(engine: VllmEngine) -> AsyncIterator[None]:
    """Its watch would put in order what another engine does to the server."""
    assert engine._watching is not None
    await end(engine._watching)
    yield
    engine._watching = asyncio.create_task(engine._watch())


async def test_a_server_that_is_attached_to_is_checked_cleaned_and_left(
    engine: VllmEngine, files: ModelFiles, directories: dict[str, Path], tmp_path: Path
) -> None:
    for name in NAMES:
        await engine.unload_adapter(name)
    client = engine._client
    key = client._headers["Authorization"].removeprefix("Bearer ")
    async with looking_away(engine):
        await client.load("older-v000007-99999999", str(directories[NAMES[0]]))
        attached = VllmEngine(Attached(client.url, key=key), files, NEEDS, tmp_path / "scratch")
        await attached.start()
        assert set((await client.served()).adapters) == {ZERO}, "what was left over is gone"
        await attached.close()
        assert (await client.served()).adapters == {}
        demanding = dataclasses.replace(NEEDS, rank=64, slots=9)
        wanting = VllmEngine(Attached(client.url, key=key), files, demanding, tmp_path / "other")
        with pytest.raises(ConfigError) as refused:
            await wanting.start()
        assert "--max-lora-rank 64" in str(refused.value)

    async def whole() -> bool:
        return ZERO in (await client.served()).adapters

    await until_true(whole, within=BACK, what="the first engine has its adapter of zeros again")


def processes(engine: VllmEngine) -> list[psutil.Process]:
    """The server's process and all below it."""
    home = engine._home
    assert isinstance(home, Supervised)
    assert home.pid is not None
    server = psutil.Process(home.pid)
    return [server, *server.children(recursive=True)]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_a_server_that_dies_or_hangs_is_ended_started_anew_and_serves_the_same(
    engine: VllmEngine, directories: dict[str, Path], how: signal.Signals
) -> None:
    name = NAMES[0]
    await engine.load_adapter(name, directories[name])
    (prompt,) = prompts(1, seed=9)
    before = await sample(engine, name, prompt, seed=3)
    incarnation = (await engine.health()).incarnation
    old = processes(engine)
    running = asyncio.create_task(sample(engine, name, prompt, tokens=480))
    await until(lambda: engine._in_flight)
    # Killed: the one that answers. Stopped: one that computes, while the one that answers says that all is well.
    os.kill(old[0].pid if how == signal.SIGKILL else old[-1].pid, how)
    with pytest.raises(GenerationError) as failed:
        await running
    assert failed.value.retryable
    assert not (await engine.health()).ok
    await until(lambda: engine._ok, within=BACK, what="the server is back")
    assert psutil.wait_procs(old, timeout=120)[1] == [], "nothing of the old one is left"
    assert CacheEvent("cleared") in engine.cache_events()
    assert (await engine.health()).incarnation > incarnation
    with pytest.raises(AdapterNotLoaded):
        await sample(engine, name, prompt)
    await engine.load_adapter(name, directories[name])
    after = await sample(engine, name, prompt, seed=3)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-4)
    await engine.unload_adapter(name)


@pytest.mark.long
async def test_a_server_that_cannot_start_says_why(files: ModelFiles, tmp_path: Path) -> None:
    engine = supervised(files, tmp_path / "s")
    home = engine._home
    assert isinstance(home, Supervised)
    plain = home._command
    home._command = lambda port: [*plain(port), "--max-lora-rank", "7"]
    with pytest.raises(Exception, match="max-lora-rank") as failed:
        await engine.start()
    assert "ended with exit code" in str(failed.value)
