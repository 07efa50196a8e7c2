"""The HTTP calls to a vLLM server. Every answer is read whole and checked; what goes wrong is an EngineError.

`Refused` carries a status and what the server said; everything else (no connection, a time-out, a body cut short,
bytes that are no JSON) means that the server cannot be asked now.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from actors.engines.vllm import wire
from actors.engines.vllm.wire import Dialect, Served
from broker.errors import EngineError

ASK_SECONDS = 10.0
"""How long a question that needs no computing may take."""

LOAD_SECONDS = 120.0
"""How long loading an adapter may take: it waits for the batch's step, and for the first one kernels are made."""


KEEP_SECONDS = 2.0
"""An idle connection is used again for so long: less than the five seconds after which vLLM's HTTP server hangs up."""


class Refused(EngineError):
    """The server answered with an error. `status` is HTTP's, `said` its words."""

    def __init__(self, what: str, status: int, said: str) -> None:
        super().__init__(f"{what}: the engine answered {status}: {said}")
        self.status = status
        self.said = said


class EngineClient:
    """A connection pool to one server. `key` is what its `--api-key` wants, empty for none."""

    def __init__(self, url: str, *, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def version(self) -> str:
        """The server's version. Raises EngineError."""
        answer = await self._call("GET", "/version")
        return str(answer.get("version", "")) if isinstance(answer, dict) else ""

    async def served(self, *, timeout: float = ASK_SECONDS) -> Served:
        """Its base model and adapters. Raises EngineError."""
        return wire.served(await self._call("GET", "/v1/models", timeout=timeout))

    async def metrics(self, *, timeout: float = ASK_SECONDS) -> str:
        """Its counters in Prometheus' text format. Raises EngineError."""
        return (await self._read("GET", "/metrics", None, timeout)).decode(errors="replace")

    async def load(self, name: str, path: str) -> None:
        """Load an adapter that the server finds at `path`. Raises Refused, EngineError."""
        await self._read("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, LOAD_SECONDS)

    async def unload(self, name: str) -> None:
        """Forget an adapter; unknown names are ignored. Raises EngineError."""
        try:
            await self._read("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_SECONDS)
        except Refused as error:
            if error.status != 404 or name not in error.said:
                raise

    async def generate(self, dialect: Dialect, body: dict[str, Any], *, timeout: float | None = None) -> Any:
        """One continuation; waits as long as it takes unless told otherwise. Raises Refused, EngineError.

        Whoever cancels the call hangs up, and the server then drops the request.
        """
        return await self._call("POST", wire.PATHS[dialect], body, timeout=timeout)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = ASK_SECONDS
    ) -> Any:
        data = await self._read(method, path, body, timeout)
        try:
            return json.loads(data)
        except ValueError:
            raise EngineError(f"{path} of the engine at {self.url} answered no JSON: {data[:200]!r}") from None

    async def _read(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS),
                trust_env=False,
            )
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=ASK_SECONDS)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                data = await response.read()
                if response.status == 200:
                    return data
                raise Refused(path, response.status, _words(data))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            raise EngineError(f"{path} of the engine at {self.url} gave no answer: {what}") from error


def _words(data: bytes) -> str:
    try:
        return wire.problem(json.loads(data))
    except ValueError:
        return " ".join(data.decode(errors="replace").split())[:300]
