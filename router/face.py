"""What every HTTP face of a router has: routes, the bearer token, errors in OpenAI's shape, health and metrics."""

from __future__ import annotations

import hmac
import logging
from abc import ABC, abstractmethod
from collections import Counter

import msgspec

from router import exposition
from router.exposition import metric
from router.http import Exchange, Server
from router.openai import BadRequest
from router.placement import Placer

log = logging.getLogger(__name__)

FAILED = "the router failed at this request; its log says why"
"""The answer where an exception came that nobody expected."""


class Face(ABC):
    """An HTTP server that answers as a model server does."""

    def __init__(self, *, token: str = "") -> None:
        """`token`: what clients must show as `Authorization: Bearer ...`; empty: nothing."""
        self._expected = f"Bearer {token}".encode() if token else b""
        self._server = Server(self._serve)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._routes = {
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/chat/completions"): self.chat,
            ("GET", "/v1/models"): self._list_models,
        }
        self._paths = frozenset(path for _, path in self._routes)

    async def listen(self, host: str, port: int) -> int:
        """Start to listen; returns the port. Raises OSError."""
        return await self._server.start(host, port)

    async def hang_up(self) -> None:
        """Listen no more."""
        await self._server.close()

    # ------------------------------------------------------------------------------------------- for the faces to say

    @abstractmethod
    def completions(self, exchange: Exchange) -> None:
        """Answer POST /v1/completions, now or later. Raises BadRequest."""

    @abstractmethod
    def chat(self, exchange: Exchange) -> None:
        """Answer POST /v1/chat/completions, now or later. Raises BadRequest."""

    @abstractmethod
    def models(self) -> list[tuple[str, str | None]]:
        """The models that can be asked for, each with the one it is an adapter of."""

    @abstractmethod
    def placer(self) -> Placer:
        """The placement behind this face."""

    @abstractmethod
    def healthy(self) -> str:
        """Why nothing can be served now; empty when it can."""

    def more_metrics(self) -> str:
        """Further metrics in Prometheus' format."""
        return ""

    # --------------------------------------------------------------------------------------------------------- shared

    def _serve(self, exchange: Exchange) -> None:
        try:
            self._route(exchange)
        except BadRequest as problem:
            self.refuse(exchange, problem)
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            self.refuse(exchange, BadRequest(FAILED, status=500))

    def _route(self, exchange: Exchange) -> None:
        method, path = exchange.method, exchange.path
        found = self._routes.get((method, path))
        if found is None:
            method = "GET" if method == "HEAD" else method
            if (method, path) == ("GET", "/health"):
                self._health(exchange)
                return
            if (method, path) == ("GET", "/metrics"):
                exchange.send(200, self.exposition().encode(), exposition.CONTENT_TYPE)
                return
        if self._expected and not hmac.compare_digest(exchange.headers.get(b"authorization", b""), self._expected):
            raise BadRequest(
                "expected the header 'Authorization: Bearer TOKEN' with the router's token",
                status=401,
                code="invalid_api_key",
            )
        if found is not None:
            found(exchange)
            return
        if path in self._paths:
            raise BadRequest(f"{path} does not take {exchange.method}", status=405)
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            for model, parent in self.models():
                if model == name:
                    exchange.send(200, msgspec.json.encode(_model(model, parent)))
                    return
            raise self.unknown_model(name)
        raise BadRequest(
            f"there is no {path} here; /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics are",
            status=404,
        )

    def refuse(self, exchange: Exchange, problem: BadRequest) -> None:
        """Answer with an error, if there still is somebody to answer."""
        self.count(exchange, problem.status)
        if exchange.started:
            exchange.abort()
        else:
            exchange.send(problem.status, problem.body())

    def count(self, exchange: Exchange, status: int) -> None:
        """Count an answer for the metrics."""
        path = exchange.path if exchange.path in self._paths else "other"
        self._answers[path, status] += 1

    def unknown_model(self, name: str) -> BadRequest:
        """The error for a model that is not there."""
        known = ", ".join(model for model, _ in self.models()[:8]) or "none yet"
        return BadRequest(
            f"there is no model {name!r}; there are: {known}", status=404, code="model_not_found", param="model"
        )

    def _list_models(self, exchange: Exchange) -> None:
        data = [_model(model, parent) for model, parent in self.models()]
        exchange.send(200, msgspec.json.encode({"object": "list", "data": data}))

    def _health(self, exchange: Exchange) -> None:
        problem = self.healthy()
        if problem:
            exchange.send(503, BadRequest(problem, status=503).body())
        else:
            exchange.send(200, b"{}")

    def exposition(self) -> str:
        """Everything that is measured, in Prometheus' text format."""
        placer = self.placer()
        mirrored = placer.mirrored()
        replicas = placer.replicas()
        return "".join(
            [
                metric(
                    "farflung_router_answers_total",
                    "counter",
                    "HTTP answers, by path and status",
                    (({"path": path, "status": str(status)}, n) for (path, status), n in sorted(self._answers.items())),
                ),
                metric(
                    "farflung_router_placements_total",
                    "counter",
                    "Requests placed, by kind: affinity, spill, unmatched",
                    (({"kind": kind}, number) for kind, number in placer.placements.items()),
                ),
                metric(
                    "farflung_router_prompt_tokens_total",
                    "counter",
                    "Prompt tokens of requests that ended well",
                    [({}, placer.prompt_tokens)],
                ),
                metric(
                    "farflung_router_cached_tokens_total",
                    "counter",
                    "How many of those their replicas found cached",
                    [({}, placer.cached_tokens)],
                ),
                metric(
                    "farflung_router_inflight",
                    "gauge",
                    "Requests that a replica has from this router",
                    (({"replica": name}, len(placer.assigned(name))) for name in replicas),
                ),
                metric(
                    "farflung_router_load_tokens",
                    "gauge",
                    "Work that a replica is believed to have left, in prefilled tokens",
                    (({"replica": name}, placer.load(name)) for name in replicas),
                ),
                metric(
                    "farflung_router_mirrored_blocks",
                    "gauge",
                    "KV blocks that a replica is believed to hold",
                    (({"replica": name}, blocks) for name, (blocks, _) in mirrored.items()),
                ),
                metric(
                    "farflung_router_mirror_limit_blocks",
                    "gauge",
                    "KV blocks that may be mirrored of a replica",
                    (({"replica": name}, limit) for name, (_, limit) in mirrored.items()),
                ),
                metric("farflung_router_mirror_bytes", "gauge", "Memory of all mirrors", [({}, placer.memory())]),
                self.more_metrics(),
            ]
        )


def _model(name: str, parent: str | None) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "farflung",
        "root": parent or name,
        "parent": parent,
    }
