"""The vLLM engine against a scripted server: what it asks for, what it refuses, and how it survives what may happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import actors.engines.vllm.engine as module
from actors.engines.base import Sampling
from actors.engines.vllm import client as client_module
from actors.engines.vllm.client import EngineClient
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.flags import ZERO, Needs
from actors.engines.vllm.process import Attached, Supervised
from broker.blocks import HASH, chain
from broker.ending import end
from broker.errors import (
    AdapterError,
    AdapterNotLoaded,
    ConfigError,
    EngineError,
    GenerationError,
    PromptTooLong,
    ServerError,
)
from broker.messages import CacheEvent
from broker.models import ModelFiles, fingerprint_of, resolve
from tests import scripted_engine as scripted
from tests.scripted_engine import ScriptedEngine, ScriptedPublisher, removed, sample
from tests.waiting import until

PROMPT = np.arange(10, 20, dtype=np.int32)
NAME = "run-v000001-abcdef12"
OLDER = "run-v000000-00000000"

Start = Callable[..., Awaitable[VllmEngine]]


def adapter(directory: Path, value: float = 1.0, rank: int = 8) -> Path:
    directory.mkdir(parents=True)
    save_file(
        {"base_model.model.x.lora_A.weight": np.full((rank, 4), value, np.float32)},
        directory / "adapter_model.safetensors",
    )
    (directory / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {rank}}}')
    return directory


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return resolve(str(tiny_model))


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[ScriptedEngine]:
    server = ScriptedEngine(str(tiny_model))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def start(
    server: ScriptedEngine, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Starts engines attached to the server, and closes them."""
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(module, "BACKOFF", (0.02,))
    engines: list[VllmEngine] = []

    async def start(key: str = "", **options: Any) -> VllmEngine:
        needs = options.pop("needs", Needs(rank=8, slots=3, context=512))
        home = Attached(server.url, key=key)
        engine = VllmEngine(home, files, needs, tmp_path / f"scratch-{len(engines)}", **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.close()


def ask(engine: VllmEngine, adapter: str | None = None, id: str = "r", **sampling: Any) -> asyncio.Task[Any]:
    sampling = {"max_new_tokens": 4, **sampling}
    return asyncio.create_task(engine.generate(id, adapter, PROMPT, Sampling(**sampling)))


# --------------------------------------------------------------------------------------------------------- admission


async def test_a_server_that_will_do_is_used_and_left_as_it_was_found(server: ScriptedEngine, start: Start) -> None:
    engine = await start()
    health = await engine.health()
    assert health.ok
    assert (health.adapter_slots, health.context, health.max_rank) == (4, 512, 8)
    assert (health.cache_tokens, health.block) == (256 * 32, 32)
    assert list(server.adapters) == [ZERO]
    await engine.close()
    assert not (await engine.health()).ok
    assert server.adapters == {}


@pytest.mark.parametrize(
    ("lack", "flag"),
    [
        ({"lora": False}, "--enable-lora --max-loras 4 --max-lora-rank 8"),
        ({"lora_routes": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"max_rank": 1}, "--max-lora-rank 8"),
        ({"max_loras": 3}, "it holds 3 adapters, 3 for the runs .* are needed: --max-loras 4"),
        ({"processed_logprobs": False}, "--logprobs-mode processed_logprobs"),
        ({"context": 256}, "--max-model-len 512"),
        ({"version": "0.9.2"}, "expected 0.11 or newer"),
    ],
)
async def test_a_server_that_lacks_something_is_refused_with_the_flag(
    server: ScriptedEngine, start: Start, lack: dict[str, Any], flag: str
) -> None:
    await server.stop()
    for name, value in lack.items():
        setattr(server, name, value)
    await server.start()
    with pytest.raises(ConfigError, match=flag):
        await start()


async def test_all_that_is_missing_is_said_at_once(server: ScriptedEngine, start: Start) -> None:
    server.max_rank, server.processed_logprobs, server.max_loras = 1, False, 1
    with pytest.raises(ConfigError) as refused:
        await start()
    assert all(flag in str(refused.value) for flag in ("--max-lora-rank", "--max-loras", "--logprobs-mode"))


async def test_a_server_of_another_model_is_refused(server: ScriptedEngine, start: Start, tmp_path: Path) -> None:
    from tests.tiny import build_tiny_model

    other = build_tiny_model(tmp_path / "other", seed=1)
    server.model = str(other)
    with pytest.raises(ConfigError, match=f"serves {other} .*{fingerprint_of(other)}"):
        await start()


async def test_a_server_that_is_not_there_or_wants_a_key_is_named(server: ScriptedEngine, start: Start) -> None:
    server.key = "secret"
    with pytest.raises(ServerError, match="401"):
        await start()
    assert (await (await start(key="secret")).health()).ok
    await server.stop()
    with pytest.raises(ServerError, match="is its URL right"):
        await start()


async def test_adapters_of_an_earlier_run_are_cleaned_up_and_those_of_others_take_slots(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    left = str(adapter(tmp_path / "left"))
    for name in (NAME, "run-probe-abcdef12", ZERO, "customer-lora"):
        server.adapters[name], server.contents[name] = left, "x"
    engine = await start()
    assert list(server.adapters) == ["customer-lora", ZERO]
    assert (await engine.health()).adapter_slots == 3


# ---------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("scale_out", [True, False])
async def test_token_ids_go_in_and_come_out_with_their_logprobs(
    server: ScriptedEngine, start: Start, tmp_path: Path, scale_out: bool
) -> None:
    server.scale_out = scale_out
    engine = await start(seeds=True)
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    result = await ask(engine, NAME, seed=7, stop_token_ids=(2,), temperature=0.7)
    assert result.token_ids.tolist() == sample(PROMPT.tolist(), server.contents[NAME], 4)
    assert result.logprobs.tolist() == pytest.approx([-1 - token / 100 for token in result.token_ids])
    assert (result.adapter, result.finish, result.cached_tokens) == (NAME, "length", 3)
    path, asked = server.calls[-1]
    assert path == ("/inference/v1/generate" if scale_out else "/v1/completions")
    parameters = asked["sampling_params"] if scale_out else asked
    expected = {
        "max_tokens": 4,
        "temperature": 0.7,
        "seed": 7,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "logprobs": 0,
    }
    assert {name: parameters[name] for name in expected} == expected
    assert (await engine.health()).generated_tokens == 4


async def test_seeds_are_kept_from_a_server_that_may_compute_on_a_cpu(server: ScriptedEngine, start: Start) -> None:
    await ask(await start(), seed=7)
    assert "seed" not in server.calls[-1][1]["sampling_params"]


async def test_blocks_of_the_prefix_cache_are_salted_with_what_was_loaded_and_not_with_the_name_alone(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    salts = []
    for directory in ("a", "b"):
        await engine.load_adapter(NAME, adapter(tmp_path / directory))
        await ask(engine, NAME)
        salts.append(server.calls[-1][1]["cache_salt"])
        await engine.unload_adapter(NAME)
    assert salts[0] != salts[1]
    await ask(engine)
    assert "cache_salt" not in server.calls[-1][1], "the base is one and the same"


async def test_the_base_is_sampled_under_an_adapter_of_zeros_that_comes_back_when_it_is_lost(
    server: ScriptedEngine, start: Start
) -> None:
    engine = await start()
    assert (await ask(engine)).adapter is None
    assert server.sampled_by[-1] == ZERO
    del server.adapters[ZERO], server.contents[ZERO]
    with pytest.raises(GenerationError) as failed:
        await ask(engine)
    assert failed.value.retryable
    await until(lambda: ZERO in server.adapters)
    assert (await ask(engine)).adapter is None


async def test_a_prompt_that_is_too_long_is_refused_and_a_reply_ends_with_the_context(
    server: ScriptedEngine, start: Start
) -> None:
    engine = await start()
    with pytest.raises(PromptTooLong):
        await engine.generate("r", None, np.zeros(512, np.int32), Sampling(max_new_tokens=1))
    result = await engine.generate("r", None, np.zeros(510, np.int32), Sampling(max_new_tokens=9))
    assert len(result.token_ids) == 2
    with pytest.raises(GenerationError) as refused:
        await engine.generate("r", None, np.zeros(0, np.int32), Sampling(max_new_tokens=1))
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("fault", "retryable"),
    [
        (scripted.status(500), True),
        (scripted.status(503), True),
        (scripted.status(422), False),
        (scripted.cut_short(), True),
        (scripted.body(b"no json"), True),
        (scripted.body(b'{"model": "farflung-base", "choices": []}'), True),
        (
            scripted.body(
                b'{"model": "other", "choices": [{"finish_reason": "length", "token_ids": [1], '
                b'"logprobs": {"content": [{"token_id": 1, "logprob": -1}]}}]}'
            ),
            True,
        ),
        (
            scripted.body(
                b'{"model": "farflung-base", "choices": [{"finish_reason": "length", "token_ids": [1, 2], '
                b'"logprobs": {"content": [{"token_id": 1, "logprob": -1}]}}]}'
            ),
            True,
        ),
        (
            scripted.body(
                b'{"model": "farflung-base", "choices": [{"finish_reason": "length", "token_ids": [1], '
                b'"logprobs": {"content": [{"token_id": 1, "logprob": -9999.0}]}}]}'
            ),
            True,
        ),
    ],
)
async def test_a_reply_that_is_not_certainly_right_is_an_error_and_the_next_one_counts(
    server: ScriptedEngine, start: Start, fault: scripted.Fault, retryable: bool
) -> None:
    engine = await start()
    server.plant("/inference/v1/generate", fault)
    with pytest.raises(GenerationError) as refused:
        await ask(engine)
    assert refused.value.retryable == retryable
    assert len((await ask(engine)).token_ids) == 4


async def test_cancelling_ends_a_request_and_frees_its_id(server: ScriptedEngine, start: Start) -> None:
    engine = await start()
    server.hold = asyncio.Event()
    running = ask(engine, id="r")
    await until(lambda: server.calls[-1][1] and server.calls[-1][1].get("request_id") == "r")
    with pytest.raises(GenerationError, match="in flight already"):
        await ask(engine, id="r")
    await engine.cancel("r")
    result = await running
    assert (result.finish, len(result.token_ids)) == ("cancelled", 0)
    server.hold = None
    assert len((await ask(engine, id="r")).token_ids) == 4
    assert (await engine.health()).running == 0


# ---------------------------------------------------------------------------------------------------------- adapters


async def test_an_adapter_that_is_loaded_already_with_the_same_bytes_is_taken_as_it_is(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    directory = adapter(tmp_path / "a")
    server.plant("/v1/load_lora_adapter", scripted.cut_short(b""))
    with pytest.raises(EngineError):
        await engine.load_adapter(NAME, directory)
    engine._loading.add(NAME)  # keeps the watch from unloading it, as the next attempt does
    server.adapters[NAME], server.contents[NAME] = str(directory), "as loaded"
    await engine.load_adapter(NAME, directory)
    assert server.contents[NAME] == "as loaded"
    assert (await engine.health()).adapters == (NAME,)


async def test_a_name_that_is_loaded_with_other_bytes_is_loaded_anew(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    engine._loading.add(NAME)
    server.adapters[NAME], server.contents[NAME] = str(adapter(tmp_path / "old", 1)), "old bytes"
    await engine.load_adapter(NAME, adapter(tmp_path / "new", 2))
    assert server.adapters[NAME] == str(tmp_path / "new")
    assert server.contents[NAME] != "old bytes"


async def test_a_load_that_the_server_does_not_confirm_is_none(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    server.plant("/v1/load_lora_adapter", scripted.body(b"Success"))
    with pytest.raises(EngineError, match="does not list"):
        await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    assert (await engine.health()).adapters == ()


@pytest.mark.parametrize(
    ("fault", "raised", "said"),
    [
        (scripted.status(500, "EngineCore encountered an issue"), EngineError, "EngineCore"),
        (scripted.status(500, "expected target modules in {...} but received [...]"), AdapterError, "target modules"),
        (scripted.status(500, "vLLM does not yet support DoRA."), AdapterError, "DoRA"),
        (scripted.status(404, "No adapter found for <path>"), AdapterError, "FARFLUNG_CACHE"),
        (scripted.cut_short(b"Succ"), EngineError, "no answer"),
    ],
)
async def test_a_load_that_fails_says_who_is_at_fault(
    server: ScriptedEngine, start: Start, tmp_path: Path, fault: scripted.Fault, raised: type[Exception], said: str
) -> None:
    engine = await start()
    server.plant("/v1/load_lora_adapter", fault)
    with pytest.raises(raised, match=said):
        await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    await engine.load_adapter(NAME, tmp_path / "a")


async def test_a_load_without_an_answer_ends_in_bounded_time(
    server: ScriptedEngine, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()
    monkeypatch.setattr(client_module, "LOAD_SECONDS", 0.05)
    server.plant("/v1/load_lora_adapter", scripted.silence())
    with pytest.raises(EngineError, match="no answer"):
        await engine.load_adapter(NAME, adapter(tmp_path / "a"))


async def test_no_more_adapters_than_slots_are_loaded(server: ScriptedEngine, start: Start, tmp_path: Path) -> None:
    engine = await start()
    for number in range(4):
        await engine.load_adapter(f"run-v{number:06d}-00000000", adapter(tmp_path / str(number), number))
    with pytest.raises(AdapterError, match="no slot left"):
        await engine.load_adapter(NAME, adapter(tmp_path / "more"))
    await engine.unload_adapter(OLDER)
    await engine.load_adapter(NAME, tmp_path / "more")


async def test_an_adapter_leaves_when_its_last_request_has_ended(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    server.hold = asyncio.Event()
    running = ask(engine, NAME)
    await until(lambda: engine._in_flight)
    leaving = asyncio.create_task(engine.unload_adapter(NAME))
    await until(lambda: engine._leaving)
    with pytest.raises(AdapterNotLoaded):
        await ask(engine, NAME, id="late")
    assert NAME in server.adapters
    server.hold.set()
    assert (await running).adapter == NAME
    await leaving
    assert list(server.adapters) == [ZERO]
    assert (await engine.health()).adapters == ()


async def test_an_adapter_that_could_not_be_unloaded_is_unloaded_later(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    server.plant("/v1/unload_lora_adapter", scripted.status(500))
    await engine.unload_adapter(NAME)
    await until(lambda: list(server.adapters) == [ZERO], what="the watch unloads it")


# ------------------------------------------------------------------------------------------------------------- deaths


async def test_a_server_that_was_started_anew_is_another_incarnation_without_adapters(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    before = (await engine.health()).incarnation
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    server.hold = asyncio.Event()
    running = ask(engine, NAME)
    await until(lambda: server.sampled_by or engine._in_flight)
    await server.stop()
    with pytest.raises(GenerationError) as failed:
        await running
    assert failed.value.retryable
    await until(lambda: not engine._ok, what="the death is noticed")
    with pytest.raises(GenerationError, match="not running"):
        await ask(engine)
    with pytest.raises(EngineError):
        await engine.load_adapter(NAME, tmp_path / "a")
    server.hold = None
    await server.start(int(server.url.rpartition(":")[2]))
    await until(lambda: engine._ok, what="it is back")
    assert (await engine.health()).incarnation > before
    assert (await engine.health()).adapters == ()
    with pytest.raises(AdapterNotLoaded):
        await ask(engine, NAME)
    await engine.load_adapter(NAME, tmp_path / "a")
    assert (await ask(engine, NAME)).adapter == NAME


async def test_adapters_that_a_living_server_lost_are_noticed_by_a_request(
    server: ScriptedEngine, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 3600.0)
    engine = await start()
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    before = (await engine.health()).incarnation
    server.adapters.clear()
    with pytest.raises(AdapterNotLoaded):
        await ask(engine, NAME)
    assert (await engine.health()).incarnation > before
    assert (await engine.health()).adapters == ()


async def test_adapters_that_a_living_server_lost_are_noticed_without_a_request(
    server: ScriptedEngine, start: Start, tmp_path: Path
) -> None:
    engine = await start()
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    before = (await engine.health()).incarnation
    server.adapters.clear()
    await until(lambda: engine._incarnation > before, what="the loss is noticed")
    assert (await engine.health()).ok
    assert (await engine.health()).adapters == ()


async def test_a_server_that_hangs_is_found_out_and_one_that_only_works_long_is_not(
    server: ScriptedEngine, start: Start
) -> None:
    now = 0.0
    engine = await start(quiet_seconds=10.0, hang_seconds=60.0, clock=lambda: now)
    server.hold = asyncio.Event()
    running = ask(engine)
    await until(lambda: engine._in_flight)
    now += 20.0
    await until(lambda: engine._counted is not None)
    for _ in range(20):  # it computes: tokens are counted, though no request ends
        now += 20.0
        server.tokens += 1
        await until(lambda: engine._alive_at == engine._clock())
    assert engine._ok
    server.hold, server.stopped = None, True
    now += 75.0
    with pytest.raises(GenerationError):
        await running
    assert [engine._ok, "hangs" in engine._detail] == [False, True]
    server.stopped = False
    await until(lambda: engine._ok, what="it is back")
    assert len((await ask(engine)).token_ids) == 4


async def test_an_idle_server_is_asked_for_a_sign_of_life_and_believed(server: ScriptedEngine, start: Start) -> None:
    now = 0.0
    engine = await start(quiet_seconds=10.0, hang_seconds=60.0, clock=lambda: now)
    for _ in range(10):
        now += 65.0
        await until(lambda: engine._clock() == engine._alive_at)
    assert engine._ok


async def test_a_server_that_lacks_something_after_its_restart_is_not_used_until_it_has_it(
    server: ScriptedEngine, start: Start
) -> None:
    engine = await start()
    server.max_rank = 1
    await server.stop()
    await until(lambda: not engine._ok)
    await server.start(int(server.url.rpartition(":")[2]))
    await until(lambda: "--max-lora-rank 8" in engine._detail, what="it is told what is missing")
    assert not engine._ok
    server.max_rank = 8
    await until(lambda: engine._ok)


async def test_a_look_that_fails_half_way_is_not_the_last(
    server: ScriptedEngine, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()
    await engine.load_adapter(NAME, adapter(tmp_path / "a"))
    nothing = json.dumps({"data": [{"id": server.model, "root": server.model, "max_model_len": 512}]}).encode()
    server.plant("/v1/models", scripted.body(nothing), scripted.status(500))
    await until(lambda: not server.faults["/v1/models"], what="an adapter seems lost, and then there is no answer")
    await until(lambda: engine._ok, what="it answers again")
    with monkeypatch.context() as patch:
        looked = []
        patch.setattr(engine, "_listen", lambda: looked.append(True) or 1 / 0)
        await until(lambda: len(looked) > 1, what="it is looked at again after what nobody foresaw")
    await server.stop()
    await until(lambda: not engine._ok, what="its death is noticed")


async def test_a_server_is_got_back_once_the_machine_has_room_for_it(
    server: ScriptedEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()

    async def no_memory() -> EngineClient:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._home, "open", no_memory)
        patch.setattr(engine._home, "ended", lambda: "was killed by SIGKILL")
        await until(lambda: "Cannot allocate memory" in engine._detail, what="it is told what is missing")
    await until(lambda: engine._ok, what="it is back")


async def test_a_server_that_will_not_end_is_killed_when_its_end_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.ending.AGAIN_SECONDS", 0.05)
    stubborn = ["sh", "-c", "trap '' TERM; echo deaf; exec sleep 60"]
    home = Supervised(lambda port: stubborn, lambda key: {}, tmp_path / "log")
    opening = asyncio.create_task(home.open())
    await until(lambda: home.pid is not None and "deaf" in home.log.read_text())
    process = home._process
    assert process is not None
    try:
        await end(opening)
        await home.end()
        assert process.poll() is not None, "it is gone"
    finally:
        process.kill()


async def test_a_client_says_what_a_server_without_json_said() -> None:
    server = ScriptedEngine("x")
    await server.start()
    client = EngineClient(server.url)
    try:
        server.plant("/v1/models", scripted.body(b"<html>"))
        with pytest.raises(EngineError, match="<html>"):
            await client.served()
        server.plant("/v1/models", scripted.body(b'{"data": [{"id": "x"}]}'))
        with pytest.raises(EngineError, match="cannot be read"):
            await client.served()
    finally:
        await client.close()
        await server.stop()


# ------------------------------------------------------------------------------------------------- KV-cache events


@pytest.fixture
def publisher() -> Iterator[ScriptedPublisher]:
    pytest.importorskip("zmq")
    publisher = ScriptedPublisher()
    yield publisher
    publisher.close()


FIRST = list(range(32))


async def heard(engine: VllmEngine, publisher: ScriptedPublisher) -> None:
    """Return once what is published arrives."""

    def arrives() -> bool:
        publisher.publish(scripted.stored([b"first"], FIRST, lora=ZERO))
        return any(event.change == "stored" for event in engine.cache_events())

    await until(arrives, what="the engine follows the publisher")


async def told(engine: VllmEngine, count: int) -> list[CacheEvent]:
    """The next `count` events that are not about the block by which it was found out that the engine hears."""
    events: list[CacheEvent] = []
    first = CacheEvent("stored", None, ours(None, FIRST))

    def enough() -> bool:
        events.extend(event for event in engine.cache_events() if event != first)
        return len(events) >= count

    await until(enough, what=f"{count} events")
    return events


def ours(adapter: str | None, tokens: list[int]) -> bytes:
    return chain(adapter, np.array(tokens, np.int32), block=32)


async def test_cached_blocks_are_told_for_whoever_may_meet_them(
    server: ScriptedEngine, start: Start, publisher: ScriptedPublisher, tmp_path: Path
) -> None:
    engine = await start(events=publisher.endpoint)
    await heard(engine, publisher)
    directory = adapter(tmp_path / "a")
    await engine.load_adapter(NAME, directory)
    await ask(engine, NAME)
    salt = next(asked["cache_salt"] for _, asked in reversed(server.calls) if asked and "cache_salt" in asked)
    tokens = list(range(100, 164))
    publisher.publish(
        scripted.stored([b"none"], tokens[:32]),
        scripted.stored([b"old"], tokens[:32], lora=NAME, salt="of other bytes under its name"),
        scripted.stored([b"other"], tokens[:32], lora="customer-lora"),
        scripted.stored([b"older"], tokens[:32], lora=OLDER, salt=salt),
        scripted.stored([b"zero"], tokens[:32], lora=ZERO),
        scripted.stored([b"a", b"b"], tokens, lora=NAME, salt=salt),
    )
    assert await told(engine, 2) == [
        CacheEvent("stored", None, ours(None, tokens[:32])),
        CacheEvent("stored", NAME, ours(NAME, tokens)),
    ]
    publisher.publish(removed(b"b", b"older"))
    assert await told(engine, 1) == [CacheEvent("removed", blocks=ours(NAME, tokens)[-HASH:])]


async def test_a_server_that_was_started_anew_holds_no_blocks(
    server: ScriptedEngine, start: Start, publisher: ScriptedPublisher
) -> None:
    engine = await start(events=publisher.endpoint)
    await heard(engine, publisher)
    await server.stop()
    await until(lambda: not engine._ok, what="the death is noticed")
    await server.start(int(server.url.rpartition(":")[2]))
    events: list[CacheEvent] = []
    await until(lambda: events.extend(engine.cache_events()) or CacheEvent("cleared") in events, what="all taken back")
    await heard(engine, publisher)


async def test_a_server_that_publishes_nothing_is_used_all_the_same(server: ScriptedEngine, start: Start) -> None:
    pytest.importorskip("zmq")
    silent = await start()
    assert (len((await ask(silent)).token_ids), silent.cache_events()) == (4, [])
    await silent.close()
    for address in ("tcp://127.0.0.1:9", "nowhere"):
        engine = await start(events=address)
        assert len((await ask(engine)).token_ids) == 4
        assert engine.cache_events() == [CacheEvent("cleared")]
        await engine.close()
