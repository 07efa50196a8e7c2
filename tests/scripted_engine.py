"""A server that speaks vLLM's HTTP as the real one does, without a model, and with faults on order.

What it "samples" depends on the prompt, on the bytes of the adapter that it holds under the name that was asked for,
and on nothing else, so that a test can tell who served.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from aiohttp import web

Reply = web.StreamResponse
Fault = Callable[[web.Request], Awaitable[Reply]]


def status(code: int, message: str = "planted") -> Fault:
    """Answer with an error."""

    async def fault(request: web.Request) -> Reply:
        return error(code, message)

    return fault


def cut_short(body: bytes = b'{"data": [') -> Fault:
    """Promise more bytes than come, then hang up."""

    async def fault(request: web.Request) -> Reply:
        response = web.StreamResponse(headers={"Content-Length": str(len(body) + 100)})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.abort()
        return response

    return fault


def body(content: bytes) -> Fault:
    """Answer 200 with these bytes."""

    async def fault(request: web.Request) -> Reply:
        return web.Response(body=content)

    return fault


def silence() -> Fault:
    """Never answer."""

    async def fault(request: web.Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    return fault


def error(code: int, message: str) -> web.Response:
    content = {"error": {"message": message, "type": "Planted", "param": None, "code": code}}
    return web.json_response(content, status=code)


@dataclass
class ScriptedEngine:
    """The state of one server, and what is wrong with it."""

    model: str
    context: int = 512
    max_loras: int = 5
    max_rank: int = 8
    version: str = "0.32.0"
    lora: bool = True
    lora_routes: bool = True
    scale_out: bool = True
    processed_logprobs: bool = True
    key: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    """What the next calls of a path meet in place of an answer."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    serves_instead: dict[str, str] = field(default_factory=dict)
    """Whom a name is really served by: "base" or another adapter's name."""
    hold: asyncio.Event | None = None
    """While set, generation waits for it."""
    stopped: bool = False
    """Nothing that needs computing is answered, as when the engine's process is stopped."""
    tokens: int = 0
    sampled_by: list[str] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(middlewares=[self._planted])
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/inference/v1/generate", self._generate)
        if self.lora_routes:
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def stop(self) -> None:
        """End abruptly, as a killed process does: connections are cut, adapters are gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.adapters.clear()
        self.contents.clear()

    async def restart(self) -> None:
        port = int(self.url.rpartition(":")[2])
        await self.stop()
        await self.start(port)

    def plant(self, path: str, *faults: Fault) -> None:
        self.faults[path].extend(faults)

    @property
    def asked(self) -> list[str]:
        return [path for path, _ in self.calls]

    @web.middleware
    async def _planted(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Reply]]) -> Reply:
        self.calls.append((request.path, await request.json() if request.can_read_body else None))
        if self.key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        waiting = self.faults[request.path]
        if waiting:
            return await waiting.popleft()(request)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)

    async def _version(self, request: web.Request) -> Reply:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> Reply:
        cards: list[dict[str, Any]] = [
            {"id": "base", "root": self.model, "parent": None, "max_model_len": self.context},
            *({"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items()),
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> Reply:
        lines = [
            f'vllm:generation_tokens_total{{engine="0",model_name="base"}} {float(self.tokens)}',
            f'vllm:lora_requests_info{{max_lora="{self.max_loras}",running_lora_adapters=""}} 1.7e+09',
            'vllm:cache_config_info{block_size="32",num_gpu_blocks="256",engine="0"} 1.0',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _load(self, request: web.Request) -> Reply:
        asked = await request.json()
        name, path = asked["lora_name"], asked["lora_path"]
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded. If you want ... 'load_inplace'")
        if not self.lora:
            return error(
                500, "Call to add_lora method failed: 'LoRA is not enabled. Use --enable-lora to enable LoRA.'"
            )
        directory = Path(path)
        if not (directory / "adapter_config.json").exists():
            return error(404, f"Loading lora {name} failed: No adapter found for <path>")
        rank = int(json.loads((directory / "adapter_config.json").read_text()).get("r", 1))
        if rank > self.max_rank:
            return error(
                500, f"Worker failed with error 'LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.'"
            )
        self.adapters[name] = path
        data = await asyncio.to_thread((directory / "adapter_model.safetensors").read_bytes)
        self.contents[name] = hashlib.sha256(data).hexdigest()
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> Reply:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return error(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name], self.contents[name]
        return web.Response(text="Success")

    async def _generate(self, request: web.Request) -> Reply:
        asked = await request.json()
        plain = request.path == "/v1/completions"
        if not plain and not self.scale_out:
            return error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out")
        model, parameters = asked["model"], asked if plain else asked["sampling_params"]
        if model != "base" and model not in self.adapters:
            return error(404, f"The model `{model}` does not exist. Valid aliases: base.")
        salt = asked.get("cache_salt", "x")
        if not 1 <= len(salt) <= 128 or set(salt) & set("@/\\"):
            return error(
                400, "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', ..."
            )
        prompt = asked["prompt"] if plain else asked["token_ids"]
        if len(prompt) >= self.context:
            return error(400, f"This model's maximum context length is {self.context} tokens. However, ...")
        if self.stopped:
            await asyncio.Event().wait()
        if self.hold is not None:
            await self.hold.wait()
        server = self.serves_instead.get(model, model)
        self.sampled_by.append(server)
        tokens = sample(prompt, self.contents.get(server, "base"), parameters["max_tokens"])
        self.tokens += len(tokens)
        only = parameters.get("top_k") == 1 and self.processed_logprobs
        two = parameters["top_p"] > 0.5  # as in bfloat16, the first place is shared: top_k alone allows both
        logprobs = [(-math.log(2) if two else 0.0) if only else -1.0 - token / 100 for token in tokens]
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 3}}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": tokens}
        if plain:
            choice["logprobs"] = {"token_logprobs": logprobs}
        else:
            content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
            choice["logprobs"] = {"content": content}
        return web.json_response({"model": model, "choices": [choice], "usage": usage})


def sample(prompt: list[int], content: str, count: int) -> list[int]:
    """`count` tokens that depend on the prompt and on what computed them."""
    digest = hashlib.sha256(f"{prompt} {content}".encode()).digest()
    return [digest[index % len(digest)] for index in range(count)]


class ScriptedPublisher:
    """A publisher of KV-cache events, as a server that was started with --kv-events-config has one."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(endpoint)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.sequence = 0

    def publish(self, *events: dict[str, Any]) -> None:
        """One batch, as vLLM 0.32 writes it."""
        body = {"ts": 1.5, "events": list(events), "data_parallel_rank": 0}
        self._socket.send_multipart([b"", self.sequence.to_bytes(8, "big"), msgpack.packb(body)])
        self.sequence += 1

    def close(self) -> None:
        self._socket.close(linger=0)


def stored(
    hashes: list[bytes], tokens: list[int], *, parent: bytes | None = None, lora: str | None = None, salt: str = ""
) -> dict[str, Any]:
    """A BlockStored event for blocks of 32 tokens, which is what the scripted server says its blocks have."""
    name = [lora] if lora else []
    first = [*name, *([salt] if salt else [])]
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 32, "lora_id": 1 if lora else None, "medium": "GPU", "lora_name": lora,
        "extra_keys": [(first if not number else name) or None for number in range(len(hashes))],
    }  # fmt: skip


def removed(*hashes: bytes) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}
