"""The OpenAI wire format, as far as a router reads and writes it. Pure.

Requests are decoded with unknown fields left out; what vLLM adds to OpenAI's fields is understood where it concerns
sampling, caching or tokens. Errors have OpenAI's shape.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from broker.messages import Ids

Prompt = str | Ids
"""A text, or token ids (int32 [n])."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What a message on the bus, and an engine, can hold."""

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 128)]
"""An Integer with room behind it for a seed for each of n choices."""


class BadRequest(Exception):
    """A request cannot be served. `status` is HTTP's; `code` and `param` are OpenAI's."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> bytes:
        """The error as JSON."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return msgspec.json.encode(
            {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
        )


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class SamplingRequest(msgspec.Struct, kw_only=True):
    """What both kinds of request say."""

    model: str
    n: Integer = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    max_tokens: Integer | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: int | None = None
    echo: bool = False


class ChatRequest(SamplingRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None


R = TypeVar("R", bound=SamplingRequest)

_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (CompletionRequest, ChatRequest)
}
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])
_lists = msgspec.json.Decoder(list[list[TokenId]])


def decode(body: bytes, kind: type[R]) -> R:
    """The request in `body`. Raises BadRequest that names the field."""
    try:
        request: R = _decoders[kind].decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"not a valid request: {error}", param=_param(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not 1 <= request.n <= 128:
        raise BadRequest(f"expected n from 1 to 128, got {request.n}", param="n")
    return request


def prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request: one or several texts, or lists of token ids. Raises BadRequest."""
    raw = bytes(request.prompt).strip()
    inner = raw[1:].lstrip()[:1]
    try:
        if raw[:1] == b'"':
            found: list[Prompt] = [_text.decode(raw)]
        elif raw[:1] == b"[" and inner == b'"':
            found = list(_texts.decode(raw))
        elif raw[:1] == b"[" and inner == b"[":
            found = [token_ids(ids) for ids in _lists.decode(raw)]
        elif raw[:1] == b"[":
            found = [token_ids(_ids.decode(raw))]
        else:
            raise BadRequest("expected a prompt: a text, a list of token ids, or a list of either", param="prompt")
    except msgspec.DecodeError as error:
        raise BadRequest(f"prompt: {error}", param="prompt") from None
    if not found or any(len(prompt) == 0 for prompt in found):
        raise BadRequest("the prompt is empty; send at least one token", param="prompt")
    return found


def token_ids(ids: Sequence[TokenId]) -> Ids:
    """int32 [n]."""
    return np.frombuffer(struct.pack(f"<{len(ids)}i", *ids), dtype="<i4")


def text_units(text: str) -> Ids:
    """A text as units of four bytes, int32 [n]: what a router without a tokenizer takes for tokens."""
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<i4")


def conversation_text(messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
    """A conversation as one text, so that a longer one begins with a shorter one that it continues."""
    parts = [] if not tools else [msgspec.json.encode(tools).decode()]
    parts += [spoken(message) for message in messages]
    return "".join(parts)


def spoken(message: Message) -> str:
    """One message as it stands in `conversation_text`."""
    content = message.content
    if content is not None and not isinstance(content, str):
        content = "".join(
            part["text"] if isinstance(part.get("text"), str) else msgspec.json.encode(part).decode()
            for part in content
        )
    calls = msgspec.json.encode(message.tool_calls).decode() if message.tool_calls else ""
    return f"\x1e{message.role}\x1f{content or ''}{calls}"


# ---------------------------------------------------------------------------------------------------------- answers


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage`, as far as it is there."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def cached(self) -> int | None:
        """Cached prompt tokens, None where the server does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Said(msgspec.Struct):
    content: str | None = None


class AnswerChoice(msgspec.Struct):
    """One choice of an answer or of a streamed piece."""

    text: str | None = None
    token_ids: list[int] | None = None
    message: _Said | None = None
    delta: _Said | None = None

    @property
    def said(self) -> str:
        """What was sampled, as text."""
        source = self.message or self.delta
        return self.text or (source.content if source else None) or ""


class Answer(msgspec.Struct):
    """A server's answer, or a streamed piece of one."""

    choices: list[AnswerChoice] = []
    usage: Usage | None = None


_answer = msgspec.json.Decoder(Answer)


def decode_answer(body: bytes) -> Answer | None:
    """A whole answer; None for anything else."""
    try:
        return _answer.decode(body)
    except msgspec.DecodeError:
        return None


def decode_stream(body: bytes) -> Answer:
    """The first choice of a streamed answer, put together from its events; what cannot be read is left out."""
    said: list[str] = []
    ids: list[int] = []
    usage = None
    for line in body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        piece = decode_answer(line[6:])
        if piece is None:
            continue
        usage = piece.usage or usage
        for choice in piece.choices[:1]:
            said.append(choice.said)
            ids += choice.token_ids or []
    return Answer([AnswerChoice(text="".join(said), token_ids=ids or None)], usage)


def _param(message: str) -> str | None:
    """The field that a msgspec error names: "... - at `$.n`"."""
    _, found, path = message.rpartition("`$.")
    return path.rstrip("`").split("[")[0] if found else None
