"""The stand-alone router before servers that answer, fail, hang, die and return."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import router.upstreams as module
from broker.errors import ConfigError
from router.http import Exchange, Server
from router.openai import Message, conversation_text, decode_stream, spoken
from router.servers import Upstream, cache_of
from router.upstreams import StandAlone, UpstreamOptions
from tests.waiting import until


class FakeVllm:
    """A model server that answers each completion with `reply` token ids, as it is told."""

    def __init__(self, port: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.exchanges: list[Exchange] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.mode = "answer"
        self.health = "ok"
        self.reply = list(range(1000, 1033))
        self.models: list[dict[str, Any]] = [{"id": "base", "parent": None}]
        self.metrics = b""
        self.cancelled = 0
        self.server = Server(self.handle)
        self.port = port

    async def start(self) -> None:
        self.server = Server(self.handle)
        self.port = await self.server.start("127.0.0.1", self.port)

    async def stop(self) -> None:
        await self.server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, exchange: Exchange) -> None:
        if exchange.method == "GET":
            if self.health == "hang":
                return
            if exchange.path == "/v1/models":
                exchange.send(200, json.dumps({"object": "list", "data": self.models}).encode())
            elif exchange.path == "/metrics":
                exchange.send(200, self.metrics, b"text/plain")
            else:
                exchange.send(200 if self.health == "ok" else 503, b"")
            return
        asked = json.loads(exchange.body)
        self.asked.append(asked)
        self.exchanges.append(exchange)
        self.headers.append(dict(exchange.headers))
        exchange.on_gone = self._gone
        if self.mode == "answer":
            self.answer(exchange)
        elif self.mode == "error":
            exchange.send(500, b'{"error":{"message":"engine dead"}}')
        elif self.mode == "unknown":
            exchange.send(404, b'{"error":{"message":"no such model"}}')
        elif self.mode == "die":
            exchange.abort()

    def _gone(self) -> None:
        self.cancelled += 1

    def answer(self, exchange: Exchange) -> None:
        asked = json.loads(exchange.body)
        usage = {
            "prompt_tokens": 64,
            "completion_tokens": len(self.reply),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if asked.get("stream"):
            exchange.start(200, b"text/event-stream")
            for id in self.reply:
                piece = {"choices": [{"index": 0, "text": "x", "token_ids": [id]}]}
                exchange.piece(b"data: " + json.dumps(piece).encode() + b"\n\n")
            exchange.piece(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            exchange.piece(b"data: [DONE]\n\n")
            exchange.end()
            return
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if "messages" in asked:
            choice["message"] = {"role": "assistant", "content": "it is a reply of some length, certainly"}
        else:
            choice |= {"text": "some text", "token_ids": self.reply}
        exchange.send(200, json.dumps({"object": "x", "choices": [choice], "usage": usage}).encode())


class Scene:
    def __init__(self, servers: list[FakeVllm], face: StandAlone, port: int) -> None:
        self.servers = servers
        self.face = face
        self.port = port

    async def ask(self, body: object, path: str = "/v1/completions", method: str = "POST", headers: str = "") -> Any:
        """(status, body) of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nContent-Length: {len(data)}\r\nConnection: close\r\n{headers}\r\n"
        writer.write(head.encode() + data)
        try:
            async with asyncio.timeout(20):
                answer = await reader.read()
        finally:
            writer.close()
        first, _, rest = answer.partition(b"\r\n\r\n")
        return int(first.split()[1]) if first else 0, rest

    def served(self) -> list[int]:
        return [len(server.asked) for server in self.servers]

    def loads(self) -> list[float]:
        return [self.face.placer().load(server.url) for server in self.servers]


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    servers = [FakeVllm() for _ in range(getattr(request, "param", 3))]
    for server in servers:
        await server.start()
    face = StandAlone([server.url for server in servers], UpstreamOptions(wait_seconds=1.0))
    port = await face.listen("127.0.0.1", 0)
    task = asyncio.create_task(face.run())
    await until(lambda: len(face.placer().eligible(None)) == len(servers))
    yield Scene(servers, face, port)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for server in servers:
        await server.stop()


def completion(prompt: object, model: str = "base", **more: object) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": 40, **more}


def ids(seed: int, length: int = 64) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


async def test_siblings_meet_and_the_next_turn_finds_them_without_any_header(scene: Scene) -> None:
    for prompt in range(3):
        for _ in range(4):
            assert (await scene.ask(completion(ids(prompt))))[0] == 200
    placements = scene.face.placer().placements
    assert (placements["unmatched"], placements["affinity"]) == (3, 9)
    home = next(index for index, server in enumerate(scene.servers) if server.asked)
    first = scene.servers[home].asked[0]["prompt"]
    before = scene.served()
    await scene.ask(completion(first + scene.servers[home].reply + ids(9, 20)))
    assert scene.served()[home] == before[home] + 1
    assert scene.loads() == [0.0, 0.0, 0.0]


async def test_the_body_goes_on_as_it_came_and_the_answer_comes_back_as_it_was(scene: Scene) -> None:
    body = b'{"model":"base","prompt":[1,2,3],"max_tokens":5,"an_option_of_tomorrow":{"x":[1]}}'
    status, answer = await scene.ask(body, headers="X-Request-Id: abc\r\nAuthorization: Bearer theirs\r\n")
    assert status == 200
    server = next(server for server in scene.servers if server.asked)
    assert server.exchanges[0].body == body
    assert server.headers[0][b"x-request-id"] == b"abc"
    assert server.headers[0][b"authorization"] == b"Bearer theirs"
    assert json.loads(answer)["choices"][0]["token_ids"] == server.reply


async def test_text_and_conversations_are_placed_by_their_text(scene: Scene) -> None:
    text = "once upon a time " * 20
    for _ in range(3):
        await scene.ask(completion(text))
    assert sorted(scene.served()) == [0, 0, 3]
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it? " * 20}]
    await scene.ask({"model": "base", "messages": said}, "/v1/chat/completions")
    home = max(range(3), key=lambda index: "messages" in (scene.servers[index].asked or [{}])[-1])
    reply = {"role": "assistant", "content": "it is a reply of some length, certainly"}
    longer = [*said, reply, {"role": "user", "content": "go on"}]
    depth = scene.face.placer().placements["affinity"]
    await scene.ask({"model": "base", "messages": longer}, "/v1/chat/completions")
    assert scene.servers[home].asked[-1]["messages"] == longer
    assert scene.face.placer().placements["affinity"] == depth + 1


async def test_streams_pass_as_they_come_and_teach_too(scene: Scene) -> None:
    status, answer = await scene.ask(completion(ids(1), stream=True))
    assert status == 200
    assert answer.count(b"data: ") == 35
    assert answer.endswith(b"0\r\n\r\n")
    server = next(server for server in scene.servers if server.asked)
    placed = scene.face.placer().placements["affinity"]
    await scene.ask(completion(ids(1) + server.reply + ids(2, 20)))
    assert len(server.asked) == 2
    assert scene.face.placer().placements["affinity"] == placed + 1
    assert scene.loads() == [0.0, 0.0, 0.0]


async def test_a_stream_can_be_read_while_it_is_being_written(scene: Scene) -> None:
    for server in scene.servers:
        server.mode = "hold"
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    body = json.dumps(completion(ids(1), stream=True)).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await until(lambda: any(scene.served()))
    exchange = next(server.exchanges[0] for server in scene.servers if server.exchanges)
    exchange.start(200, b"text/event-stream")
    for number in range(3):
        exchange.piece(b"data: %d\n\n" % number)
        async with asyncio.timeout(5):
            await reader.readuntil(b"data: %d\n\n" % number)
    exchange.end()
    writer.close()


@pytest.mark.parametrize("how", ["error", "die"])
async def test_a_failing_server_is_out_at_once_and_its_requests_are_answered_by_others(scene: Scene, how: str) -> None:
    scene.servers[0].mode = how
    scene.servers[0].health = "bad"
    answers = await asyncio.gather(*(scene.ask(completion(ids(number))) for number in range(12)))
    assert [status for status, _ in answers] == [200] * 12
    before = len(scene.servers[0].asked)
    await asyncio.gather(*(scene.ask(completion(ids(100 + number))) for number in range(6)))
    assert len(scene.servers[0].asked) == before
    assert scene.loads() == [0.0, 0.0, 0.0]
    scene.servers[0].mode, scene.servers[0].health = "answer", "ok"
    await until(lambda: len(scene.face.placer().eligible(None)) == 3, within=5.0)


async def test_a_server_that_dies_with_requests_in_flight_fails_none_of_them(scene: Scene) -> None:
    for server in scene.servers:
        server.mode = "hold"
    asks = [asyncio.create_task(scene.ask(completion(ids(number)))) for number in range(9)]
    await until(lambda: sum(scene.served()) == 9)
    assert len(scene.servers[1].asked) == 3
    await scene.servers[1].stop()
    await until(lambda: sum(scene.served()) == 12)
    for server in (scene.servers[0], scene.servers[2]):
        for exchange in server.exchanges:
            server.answer(exchange)
    assert [status for status, _ in await asyncio.gather(*asks)] == [200] * 9
    await scene.servers[1].start()
    await until(lambda: len(scene.face.placer().eligible(None)) == 3, within=5.0)
    scene.servers[1].mode = "answer"
    assert scene.loads() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scene", [2], indirect=True)
async def test_a_silent_server_loses_its_requests_to_the_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.1)
    scene.servers[0].mode = scene.servers[0].health = "hang"
    answers = await asyncio.gather(*(scene.ask(completion(ids(number))) for number in range(4)))
    assert [status for status, _ in answers] == [200] * 4
    assert len(scene.servers[0].asked) == 2
    assert scene.loads() == [0.0, 0.0]


@pytest.mark.parametrize("scene", [2], indirect=True)
async def test_what_a_silent_server_had_answered_is_no_part_of_anothers_answer(scene: Scene) -> None:
    for server in scene.servers:
        server.mode = "hold"
    ask = asyncio.create_task(scene.ask(completion(ids(1))))
    await until(lambda: any(scene.served()))
    half, whole = sorted(scene.servers, key=lambda server: not server.asked)
    whole.mode = "answer"
    half.exchanges[0].raw(b'HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n{"object":"x","half":"')
    upstream = next(upstream for upstream in scene.face._upstreams.values() if upstream.name == half.url)
    [link] = upstream.busy
    await until(lambda: link.status)
    upstream.answered = scene.face._away = float("-inf")
    scene.face._lose(upstream, TimeoutError())
    status, body = await ask
    assert (status, json.loads(body)["choices"][0]["token_ids"]) == (200, whole.reply)


async def test_a_request_at_which_servers_hang_up_again_and_again_is_refused(scene: Scene) -> None:
    for server in scene.servers:
        server.mode = "die"
    status, body = await scene.ask(completion(ids(1)))
    assert status == 502
    assert f"hung up {module.HANG_UPS} times" in json.loads(body)["error"]["message"]
    assert sum(scene.served()) == module.HANG_UPS
    assert scene.loads() == [0.0, 0.0, 0.0]


async def test_a_request_that_waits_for_its_model_goes_on_as_soon_as_a_server_lists_it(scene: Scene) -> None:
    scene.face._options = UpstreamOptions(wait_seconds=20.0)
    first, second, *_ = scene.face._upstreams.values()
    scene.servers[0].models.append({"id": "run-v3", "parent": "base"})
    await scene.face._look(first)
    scene.servers[0].health = "bad"
    await until(lambda: not first.well)
    ask = asyncio.create_task(scene.ask(completion(ids(1), model="run-v3")))
    await until(lambda: scene.face._waiting)
    scene.servers[1].models.append({"id": "run-v3", "parent": "base"})
    await scene.face._look(second)
    assert not scene.face._waiting
    assert (await ask)[0] == 200


async def test_an_error_that_every_server_gives_is_the_requests_own(scene: Scene) -> None:
    for server in scene.servers:
        server.mode = "error"
    status, body = await scene.ask(completion(ids(1)))
    assert status == 500
    assert b"engine dead" in body
    assert sum(scene.served()) == 2


async def test_without_a_server_that_is_well_requests_wait_and_are_then_refused(scene: Scene) -> None:
    for server in scene.servers:
        server.health = "bad"
    await until(lambda: not scene.face.placer().eligible(None))
    status, body = await scene.ask(completion(ids(1)))
    assert status == 503
    assert "no server that has 'base' has answered for 1 s" in json.loads(body)["error"]["message"]
    status, _ = await scene.ask(b"", "/health", "GET")
    assert status == 503
    waits = asyncio.create_task(scene.ask(completion(ids(1))))
    scene.servers[2].health = "ok"
    scene.face._options = UpstreamOptions(wait_seconds=20.0)
    assert (await waits)[0] == 200


async def test_the_routers_own_questions_share_no_connection_with_its_clients(scene: Scene) -> None:
    upstream = next(iter(scene.face._upstreams.values()))
    await upstream.fetch("/health")
    assert upstream.idle == []
    for _ in range(3):
        assert (await scene.ask(completion(ids(1))))[0] == 200
    assert sum(len(upstream.idle) for upstream in scene.face._upstreams.values()) == 1, "kept, and used again"


async def test_a_client_that_leaves_stops_the_server_too(scene: Scene) -> None:
    for server in scene.servers:
        server.mode = "hold"
    body = json.dumps(completion(ids(1))).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await until(lambda: sum(scene.served()) == 1)
    assert any(scene.loads())
    writer.close()
    await until(lambda: sum(server.cancelled for server in scene.servers) == 1)
    assert scene.loads() == [0.0, 0.0, 0.0]
    assert 'farflung_router_answers_total{path="/v1/completions",status="499"} 1' in scene.face.exposition()


async def test_a_model_goes_where_it_is_listed_and_anywhere_when_it_is_listed_nowhere(scene: Scene) -> None:
    scene.servers[1].models.append({"id": "run-v3", "parent": "base"})
    await scene.face._look(next(up for up in scene.face._upstreams.values() if up.name == scene.servers[1].url))
    for number in range(4):
        await scene.ask(completion(ids(number), model="run-v3"))
    assert scene.served() == [0, 4, 0]
    for server in scene.servers:
        server.mode = "unknown"
    status, _ = await scene.ask(completion(ids(1), model="nobody's"))
    assert status == 404
    assert "nobody's" not in scene.face._unlisted
    _, listed = await scene.ask(b"", "/v1/models", "GET")
    assert [model["id"] for model in json.loads(listed)["data"]] == ["base", "run-v3"]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "Expected `object`"),
        ({"prompt": [1]}, 400, "model"),
        (completion([]), 400, "empty"),
        (completion(""), 400, "empty"),
        (completion(None), 400, "expected a prompt"),
        (completion([1, -2]), 400, "`int` >= 0"),
        (completion([1, 1 << 40]), 400, "`int` <= 2147483647"),
        (completion([1, "a"]), 400, "prompt"),
        (completion([1], n=0), 400, "n from 1"),
        (completion([1], seed=1 << 70), 400, "`int` <= 9223372036854775680"),
        (completion([1], seed=-(1 << 70)), 400, "seed"),
        (completion([1], stop_token_ids=[1 << 63]), 400, "stop_token_ids"),
        (completion([1], top_k=1 << 70), 400, "top_k"),
        ({"model": "base", "prompt": [1], "max_tokens": "many"}, 400, "max_tokens"),
    ],
)
async def test_bad_input_is_answered_with_what_was_expected(scene: Scene, body: object, status: int, word: str) -> None:
    got, answer = await scene.ask(body)
    error = json.loads(answer)["error"]
    assert (got, error["type"]) == (status, "invalid_request_error")
    assert word in error["message"]
    assert scene.served() == [0, 0, 0]


async def test_other_paths_and_methods_are_refused(scene: Scene) -> None:
    assert (await scene.ask(b"{}", "/v1/embeddings"))[0] == 404
    assert (await scene.ask(b"", "/v1/completions", "GET"))[0] == 405
    assert (await scene.ask(b"", "/v1/models/base", "GET"))[0] == 200
    assert (await scene.ask(b"", "/v1/models/other", "GET"))[0] == 404
    assert (await scene.ask({"model": "base", "messages": []}, "/v1/chat/completions"))[0] == 400


async def test_a_token_is_asked_for_and_kept_from_the_servers() -> None:
    server = FakeVllm()
    await server.start()
    face = StandAlone([server.url], UpstreamOptions(token="secret"))
    port = await face.listen("127.0.0.1", 0)
    task = asyncio.create_task(face.run())
    scene = Scene([server], face, port)
    await until(lambda: face.placer().eligible(None))
    assert (await scene.ask(completion([1])))[0] == 401
    assert (await scene.ask(completion([1]), headers="Authorization: Bearer wrong\r\n"))[0] == 401
    assert (await scene.ask(completion([1]), headers="Authorization: Bearer secret\r\n"))[0] == 200
    assert b"authorization" not in server.headers[0]
    assert (await scene.ask(b"", "/health", "GET"))[0] == 200, "probes need no token"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.stop()


async def test_metrics_tell_what_was_done(scene: Scene) -> None:
    for _ in range(2):
        await scene.ask(completion(ids(1)))
    _, text = await scene.ask(b"", "/metrics", "GET")
    lines = text.decode().splitlines()
    assert 'farflung_router_placements_total{kind="affinity"} 1' in lines
    assert 'farflung_router_placements_total{kind="unmatched"} 1' in lines
    assert 'farflung_router_answers_total{path="/v1/completions",status="200"} 2' in lines
    assert "farflung_router_prompt_tokens_total 128" in lines
    assert 'farflung_router_replicas{state="well"} 3' in lines
    assert sum(line.startswith("farflung_router_inflight{") for line in lines) == 3
    assert any(line.startswith("farflung_router_mirror_bytes ") for line in lines)


@pytest.mark.parametrize("url", ["", "gpu:8000", "https://gpu:8000", "http://gpu:port"])
def test_an_upstream_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--upstream"):
        Upstream.parse(url)


def test_the_size_of_a_cache_is_read_from_vllms_metrics() -> None:
    text = (
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        'vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="1000"} 1.0\n'
    )
    assert cache_of(text) == (32, 32_000)
    assert cache_of(text.replace("1000", "None")) is None
    assert cache_of("") is None


def test_a_longer_conversation_begins_with_the_shorter_one() -> None:
    first = [Message("user", "a"), Message("assistant", [{"type": "text", "text": "b"}])]
    assert conversation_text([*first, Message("user", "c")]).startswith(conversation_text(first))
    assert conversation_text(first) == conversation_text(first[:1]) + spoken(Message("assistant", "b"))


def test_a_stream_that_cannot_be_read_teaches_nothing_and_breaks_nothing() -> None:
    answer = decode_stream(
        b'data: {"choices": 3}\n\ndata: {nonsense\n\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
    )
    assert answer.choices[0].said == "a"
    assert answer.usage is None
