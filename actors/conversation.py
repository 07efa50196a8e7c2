"""The token rules of a conversation: what was sampled is never rendered or tokenized again.

The next prompt is the stored prompt, then the sampled ids, then the rendered *delta*: what the chat template writes
after the last reply. That is right only if the template leaves what came before as it was, so it is proven each
time. The conversation is rendered with a unique sentinel in the place of each sampled reply; the text before each
sentinel must be what it was when that reply was sampled, and the rendering of the real texts must be the same with
the replies put in. Where that fails (the template strips thinking, the environment rewrote the history), the
conversation forks: everything is rendered afresh into a new row, in which earlier replies are context.

So each sampled token is trained exactly once, in the row in which it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.chat import ChatMessage, ChatTokenizer, Prompt, prompt_ids
from broker.messages import Ids
from broker.trajectories import NO_VERSION, Row, Turn


class Conversation:
    """The exact token ids of one episode, turn by turn.

    Call `add_reply` with what was sampled on `prompt`, then `extend` with what the environment answers (or `rewrite`
    with a history of its own), and so on. `extensions` and `forks` count how the later prompts came about.
    """

    def __init__(self, tokenizer: ChatTokenizer, prompt: Prompt) -> None:
        """Start with a text to complete as it is, or with messages. Raises ModelError, or ValueError if empty."""
        self._tokenizer = tokenizer
        self._messages: list[_Entry] = []
        self._completion_style = isinstance(prompt, str)
        self._turns: list[Turn] = []
        self._completion: list[ChatMessage] = []
        self._finished: list[_Draft] = []
        self.extensions = 0
        self.forks = 0
        if isinstance(prompt, str):
            self._turns.append(Turn(role="prompt", content=prompt))
            self._row = _Draft(template_text=[], first_entry=0)
            self._row.add_context(prompt_ids(tokenizer, prompt))
        else:
            self._messages = [_Entry(message) for message in prompt]
            self._turns += [_turn(message) for message in prompt]
            self._row = self._fresh_row()
        if not self._row.token_ids:
            raise ValueError("the prompt is empty: not one token stands before the first reply")

    @property
    def prompt(self) -> Ids:
        """The token ids to sample the next reply on, int32 [n]."""
        return np.asarray(self._row.token_ids, dtype=np.int32)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled, over all turns."""
        return sum(sum(row.mask) for row in (*self._finished, self._row))

    @property
    def turns(self) -> list[Turn]:
        """Everything that was said, in order, as text for people."""
        return list(self._turns)

    @property
    def completion(self) -> list[ChatMessage]:
        """The messages after the first prompt, replies and environment's, in order."""
        return list(self._completion)

    def add_reply(self, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, version: int) -> str:
        """Store what was sampled on `prompt`, token ids [n] and their logprobs [n], and return it as text.

        Raises ValueError when the two differ in length.
        """
        ids = [int(token) for token in np.asarray(token_ids, dtype=np.int32)]
        values = [float(value) for value in np.asarray(logprobs, dtype=np.float32)]
        if len(ids) != len(values):
            raise ValueError(f"expected one logprob per sampled token, got {len(values)} for {len(ids)}")
        self._row.add_sampled(ids, values, version)
        text = self._tokenizer.decode(ids)
        message = {"role": "assistant", "content": text}
        self._messages.append(_Entry(message, reply_of=ids))
        self._completion.append(message)
        self._turns.append(Turn(role="assistant", content=text))
        return text

    def extend(self, messages: Sequence[ChatMessage]) -> None:
        """Put the environment's messages after the last reply: the next prompt is ready.

        Raises ModelError when the template refuses them, ValueError when the prompt was a plain string.
        """
        self._refuse_completion_style()
        self._messages += [_Entry(message) for message in messages]
        self._turns += [_turn(message) for message in messages]
        self._completion += messages
        delta = self._proven_delta()
        if delta is None:
            self._fork()
        else:
            self._row.add_context(self._encode_delta(delta))
            self.extensions += 1

    def rewrite(self, messages: Sequence[ChatMessage]) -> None:
        """Replace the whole history by `messages`: the next prompt is their rendering, in a new row.

        Raises ModelError when the template refuses them, ValueError when the prompt was a plain string.
        """
        self._refuse_completion_style()
        self._messages = [_Entry(message) for message in messages]
        self._turns.append(Turn(role="environment", content="(rewrote the history as follows)"))
        self._turns += [_turn(message) for message in messages]
        self._completion += messages
        self._fork()

    def rows(self) -> list[Row]:
        """The rows to train on, in order. A row in which nothing was sampled is left out.

        Context after the last sampled token of a row trains nothing and is cut off.
        """
        return [row.finish() for row in (*self._finished, self._row) if any(row.mask)]

    def _refuse_completion_style(self) -> None:
        if self._completion_style:
            raise ValueError("a plain string prompt has one turn; give reset()'s prompt as a list of chat messages")

    def _fresh_row(self) -> _Draft:
        text = self._tokenizer.render([entry.message for entry in self._messages])
        row = _Draft(template_text=[text], first_entry=len(self._messages))
        row.add_context(self._tokenizer.encode(text))
        return row

    def _fork(self) -> None:
        row = self._fresh_row()
        self._finished.append(self._row)
        self._row = row
        self.forks += 1

    def _proven_delta(self) -> str | None:
        """What the template writes after the last reply, or None if it changes anything before it."""
        replies = [entry for entry in self._messages[self._row.first_entry :] if entry.reply_of is not None]
        salt = self._unused_salt()
        sentinels = iter([f"reply{salt}n{number}end" for number in range(len(replies))])
        skeleton_messages = [
            {**entry.message, "content": next(sentinels)}
            if index >= self._row.first_entry and entry.reply_of is not None
            else entry.message
            for index, entry in enumerate(self._messages)
        ]
        skeleton = self._tokenizer.render(skeleton_messages)
        pieces = _split_at(skeleton, [f"reply{salt}n{number}end" for number in range(len(replies))])
        if pieces is None or pieces[:-1] != self._row.template_text:
            return None
        real = self._tokenizer.render([entry.message for entry in self._messages])
        if not _is_filled(real, pieces, [str(entry.message["content"]) for entry in replies]):
            return None
        self._row.template_text = pieces
        return pieces[-1]

    def _unused_salt(self) -> int:
        """A number that makes sentinels which occur in no message."""
        said = json.dumps([dict(entry.message) for entry in self._messages], default=str)
        salt = 0
        while f"reply{salt}n" in said:
            salt += 1
        return salt

    def _encode_delta(self, delta: str) -> list[int]:
        """Token ids of the delta. An end-of-turn token that was sampled is not repeated."""
        sampled = next(entry.reply_of for entry in reversed(self._messages) if entry.reply_of is not None)
        last = sampled[-1] if sampled else None
        if last is not None and last in self._tokenizer.eos_ids:
            closing = self._tokenizer.token_text(last)
            if closing and delta.startswith(closing):
                return self._tokenizer.encode_after(last, delta[len(closing) :])
        return self._tokenizer.encode(delta)


@dataclass(slots=True)
class _Entry:
    """A message, and the token ids if it was sampled."""

    message: ChatMessage
    reply_of: list[int] | None = None


@dataclass(slots=True)
class _Draft:
    """A row that still grows. `template_text` is what the template wrote before each reply sampled in it."""

    template_text: list[str]
    first_entry: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add_context(self, ids: Sequence[int]) -> None:
        self._add(ids, [0.0] * len(ids), 0, NO_VERSION)

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self._add(ids, logprobs, 1, version)

    def _add(self, ids: Sequence[int], logprobs: Sequence[float], mask: int, version: int) -> None:
        self.token_ids += ids
        self.logprobs += logprobs
        self.mask += [mask] * len(ids)
        self.versions += [version] * len(ids)

    def finish(self) -> Row:
        end = len(self.mask) - self.mask[::-1].index(1)
        return Row.of(self.token_ids[:end], self.logprobs[:end], self.mask[:end], self.versions[:end])


def _turn(message: ChatMessage) -> Turn:
    content: Any = message.get("content")
    return Turn(
        role=str(message.get("role")), content=content if isinstance(content, str) else json.dumps(content, default=str)
    )


def _split_at(text: str, sentinels: Sequence[str]) -> list[str] | None:
    """`text` cut at each sentinel, or None unless each occurs exactly once and in order."""
    pieces = []
    for sentinel in sentinels:
        if text.count(sentinel) != 1:
            return None
        piece, _, text = text.partition(sentinel)
        pieces.append(piece)
    return [*pieces, text]


def _is_filled(text: str, pieces: Sequence[str], replies: Sequence[str]) -> bool:
    """Whether `text` is `pieces` with the replies between them; a template may trim a reply's outer whitespace."""
    if not text.startswith(pieces[0]):
        return False
    at = len(pieces[0])
    for reply, piece in zip(replies, pieces[1:], strict=True):
        forms = dict.fromkeys((reply, reply.strip(), reply.lstrip(), reply.rstrip()))
        length = next((len(form) for form in forms if text.startswith(form + piece, at)), None)
        if length is None:
            return False
        at += length + len(piece)
    return at == len(text)
