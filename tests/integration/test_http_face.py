"""The HTTP face of a fleet, with a real broker, a real engine and the unmodified `openai` client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.adapter_cache import AdapterCache
from actors.engines.base import Generation
from actors.engines.embedded import EmbeddedEngine
from actors.replica import Replica
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.ending import end
from broker.messages import AdapterRef, Head
from broker.registry import Registry
from broker.store import Store
from router.fleet import FleetFace
from router.service import RouterService
from tests.waiting import until

pytestmark = pytest.mark.servers

FLEET = "facing"


class Slow(EmbeddedEngine):
    """Answers nothing while it is held; counts what was cancelled."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.held: list[str] = []
        self.hold = False
        self.cancelled: list[str] = []

    async def generate(self, request_id: str, *arguments: Any) -> Generation:
        if self.hold:
            self.held.append(request_id)
            await asyncio.Event().wait()
        return await super().generate(request_id, *arguments)

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        await super().cancel(request_id)


class Scene:
    def __init__(self, face: FleetFace, engine: Slow, service: RouterService, port: int, adapter: str) -> None:
        self.face = face
        self.engine = engine
        self.service = service
        self.adapter = adapter
        self.client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)


@pytest.fixture
async def scene(bus: Bus, registry: Registry, store: Store, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Scene]:
    engine = Slow(tiny_model, threads=1)
    await engine.start()
    blob = tiny_adapter(tiny_model, tmp_path)
    put = await store.put("runs/lit/i/adapters/000001", blob)
    ref = AdapterRef(version=1, name=f"lit-v000001-{put.sha256[:8]}", key=put.key, size=put.size, sha256=put.sha256)
    head = Head(
        run="lit", fleet=FLEET, incarnation="i", epoch=1, learner="", step=1, head=1, active=1, max_staleness=2,
        state="running", adapter=ref, live=[ref], spec={"run": {"model": str(tiny_model)}},
    )  # fmt: skip
    await registry.runs.put("lit", head.encode())
    replica = Replica(
        bus, registry, AdapterCache(store, tmp_path / "work"), engine, fleet=FLEET, id="replica-face", model="tiny"
    )
    service = RouterService(bus, registry, fleet=FLEET, id="router-face")
    face = FleetFace(bus, registry, service, token="secret", wall=lambda: 1234.5)
    face.tokenizer = ChatTokenizer.from_directory(tiny_model)
    port = await face.listen("127.0.0.1", 0)
    parts = [asyncio.create_task(part) for part in (replica.run(), service.run(), face.run())]
    subject = Scene(face, engine, service, port, ref.name)
    await until(
        lambda: service.placer.can_serve(ref.name) and any(name == "lit" for name, _ in face.models()), within=30
    )
    yield subject
    await subject.client.close()
    await end(*parts)
    await engine.close()
    await registry.runs.delete("lit")


def tiny_adapter(model: Path, scratch: Path) -> bytes:
    """A LoRA adapter of large random weights for the tiny model, as one blob."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=1.0)
        wrapped.save_pretrained(scratch / "adapter")
    from safetensors.torch import load_file

    tensors = load_file(scratch / "adapter" / "adapter_model.safetensors")
    config = (scratch / "adapter" / "adapter_config.json").read_text()
    return bytes(save(tensors, {"adapter_config": config}))


async def test_the_openai_client_samples_from_the_base_model_a_run_and_a_version(scene: Scene) -> None:
    listed = [model.id async for model in scene.client.models.list()]
    assert listed[:1] == [FLEET]
    assert {"lit", scene.adapter} <= set(listed)
    texts = {}
    for model in (FLEET, "lit", "lit@1", "lit@0", scene.adapter):
        answer = await scene.client.completions.create(model=model, prompt="hello world", max_tokens=12, temperature=0)
        texts[model] = answer.choices[0].text
        assert answer.model == model
        assert answer.system_fingerprint == ("base" if model in (FLEET, "lit@0") else scene.adapter)
        assert answer.created == 1234
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 11
    assert texts["lit"] == texts["lit@1"] == texts[scene.adapter] != texts[FLEET] == texts["lit@0"]


async def test_token_ids_go_in_and_token_ids_and_logprobs_come_out(scene: Scene) -> None:
    assert scene.face.tokenizer is not None
    ids = scene.face.tokenizer.encode("hello world")
    answer = await scene.client.completions.create(
        model="lit", prompt=ids, max_tokens=6, temperature=0, logprobs=1, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0].model_dump()
    text = await scene.client.completions.create(model="lit", prompt="hello world", max_tokens=6, temperature=0)
    assert choice["prompt_token_ids"] == ids
    assert scene.face.tokenizer.decode(choice["token_ids"]) == choice["text"] == text.choices[0].text
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(choice["token_ids"]) == len(logprobs["tokens"])
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert logprobs["text_offset"][0] == 0


async def test_chat_whole_and_streamed_and_several_choices(scene: Scene) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "ho"}]}]
    ask: dict[str, Any] = {"model": "lit", "messages": said, "max_completion_tokens": 8}
    whole = await scene.client.chat.completions.create(**ask, temperature=0, logprobs=True)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens
    pieces = [
        piece
        async for piece in await scene.client.chat.completions.create(
            **ask, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    ]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    several = await scene.client.chat.completions.create(**ask, n=3, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    again = await scene.client.chat.completions.create(**ask, n=3, seed=5)
    assert [choice.message.content for choice in again.choices] == [
        choice.message.content for choice in several.choices
    ]
    assert len({choice.message.content for choice in several.choices}) > 1
    assert several.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_text_ends_before_what_stops_it(scene: Scene) -> None:
    ask: dict[str, Any] = {"model": FLEET, "prompt": "hello world", "max_tokens": 12, "temperature": 0}
    whole = (await scene.client.completions.create(**ask)).choices[0].text
    stop = whole[4:6]
    cut = await scene.client.completions.create(**ask, stop=[stop, "never"], extra_body={"return_token_ids": True})
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == len(cut.choices[0].model_dump()["token_ids"]) < 12


async def test_bad_input_has_the_right_status_and_says_what_is_wrong(scene: Scene) -> None:
    ask: dict[str, Any] = {"model": "lit", "prompt": "hello", "max_tokens": 4}
    with pytest.raises(openai.NotFoundError, match="no model 'nobody'"):
        await scene.client.completions.create(**ask | {"model": "nobody"})
    with pytest.raises(openai.NotFoundError, match="no model 'lit@7'"):
        await scene.client.completions.create(**ask | {"model": "lit@7"})
    for wrong in (
        {"prompt": ""}, {"prompt": []}, {"max_tokens": -1}, {"temperature": -1}, {"top_p": 0}, {"echo": True},
        {"logprobs": 5}, {"max_tokens": 100_000}, {"prompt": [1] * 512}, {"prompt": [-1]},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            await scene.client.completions.create(**ask | wrong)
    for wrong in ({"messages": []}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"top_logprobs": 3}):
        with pytest.raises(openai.BadRequestError):
            await scene.client.chat.completions.create(
                **{"model": "lit", "messages": [{"role": "user", "content": "a"}]} | wrong  # type: ignore[arg-type]
            )
    with pytest.raises(openai.AuthenticationError):
        await scene.client.with_options(api_key="wrong").completions.create(**ask)
    assert scene.service.loads() == {"replica-face": 0.0}


async def test_a_client_that_leaves_ends_its_generation_in_the_engine(scene: Scene) -> None:
    scene.engine.hold = True
    ask = asyncio.create_task(scene.client.completions.create(model="lit", prompt="hello", n=2, max_tokens=4))
    await until(lambda: len(scene.engine.held) == 2)
    ask.cancel()
    await until(lambda: set(scene.engine.cancelled) >= set(scene.engine.held))
    text = scene.face.exposition()
    assert 'farflung_router_answers_total{path="/v1/completions",status="499"} 1' in text


async def test_metrics_and_health(scene: Scene) -> None:
    await scene.client.completions.create(model="lit", prompt="hello world, this is more than a block", max_tokens=2)
    await until(lambda: scene.service.loads() == {"replica-face": 0.0})
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.client.base_url.port)
    writer.write(b"GET /health HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    assert text.startswith("HTTP/1.1 200 OK")
    assert 'farflung_router_placements_total{kind="unmatched"} 1' in text
    assert "farflung_router_prompt_tokens_total 38" in text
    assert 'farflung_router_replicas{state="eligible"} 1' in text
