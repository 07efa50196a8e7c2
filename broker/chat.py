"""A model's tokenizer and chat template, without torch and without transformers.

`tokenizers` and `jinja2` do the work and are loaded when first needed. Rendering follows what `transformers` does
(`apply_chat_template`): the same sandbox, the same globals, the same whitespace rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from broker.errors import ModelError, TaskSourceError

if TYPE_CHECKING:
    import jinja2

ChatMessage = Mapping[str, Any]
"""One message of a conversation: `role` (system, user, assistant, tool), `content`, and what the template knows."""

Prompt = str | Sequence[ChatMessage]
"""A text to complete as it is, or a conversation to be rendered through the chat template."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """The tokenizer and the chat template of one model.

    `eos_ids` are the tokens that end a reply: those of the generation config and the config, the tokenizer's own, and
    the one the chat template closes an assistant's turn with.
    """

    def __init__(
        self, backend: Any, *, template: str | None, special: Mapping[str, str], eos_ids: Iterable[int], source: str
    ) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `special` maps bos_token, eos_token and so on to their text."""
        self._backend = backend
        self._template_text = template
        self._template: jinja2.Template | None = None
        self._special = dict(special)
        self._source = source
        closing = self._closing_token()
        ids = [*eos_ids, *([] if closing is None else [closing])]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))

    @classmethod
    def from_directory(cls, path: Path) -> ChatTokenizer:
        """Read tokenizer.json, the chat template and the special tokens of a model directory. Raises ModelError."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json. Write one with "
                f"transformers.AutoTokenizer.from_pretrained(...).save_pretrained({str(path)!r})"
            )
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelError(f"{file} is no tokenizer that the `tokenizers` package reads: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(path / "tokenizer_config.json")
        special = _special_tokens({**_read_json(path / "special_tokens_map.json"), **config})
        eos: list[int] = []
        for settings in (_read_json(path / "generation_config.json"), _read_json(path / "config.json")):
            eos += _ids(settings.get("eos_token_id"))
            eos += _ids((settings.get("text_config") or {}).get("eos_token_id"))
        if "eos_token" in special:
            eos += _ids(backend.token_to_id(special["eos_token"]))
        return cls(
            backend, template=_find_template(path, config), special=special, eos_ids=eos, source=f"the model in {path}"
        )

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template_text is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. No special token is added; those written in `text` become their ids."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_after(self, token: int, text: str) -> list[int]:
        """Token ids of `text` as it continues after the special token `token`: no start-of-text rule applies to it."""
        ids = self.encode(self.token_text(token) + text)
        return ids[1:] if ids[:1] == [token] else self.encode(text)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens unless `skip_special` is off."""
        text: str = self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)
        return text

    def token_text(self, token: int) -> str:
        """How a special token is written in text; empty for an id the tokenizer does not have."""
        return self._backend.id_to_token(token) or ""

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text, through the model's chat template.

        Raises ModelError when the model has no chat template, or when the template refuses the messages.
        """
        import jinja2

        if self._template is None:
            if self._template_text is None:
                raise ModelError(
                    f"{self._source} has no chat template, but the prompt is a list of chat messages. Put a "
                    "chat_template.jinja into the model's directory, choose an instruct model, or give prompts as "
                    "plain strings"
                )
            try:
                self._template = _compile(self._template_text)
            except jinja2.TemplateError as error:
                raise ModelError(f"{self._source} has a chat template that jinja2 cannot read: {error}") from error
        try:
            return self._template.render(
                messages=[{key: value for key, value in message.items() if value is not None} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            raise ModelError(
                f"the chat template of {self._source} refuses messages with the roles {roles}: {error}"
            ) from error

    def _closing_token(self) -> int | None:
        """The special token that the template writes after an assistant's reply, if it writes one."""
        if not self.has_template:
            return None
        marker = "xREPLYx"
        try:
            text = self.render(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}],
                add_generation_prompt=False,
            )
        except ModelError:
            return None
        after = text.rpartition(marker)[2].lstrip()
        for token, added in self._backend.get_added_tokens_decoder().items():
            if added.special and added.content and after.startswith(added.content):
                return int(token)
        return None


def with_system_prompt(prompt: Prompt, system_prompt: str) -> Prompt:
    """`prompt` with `system_prompt` before it, unless that is empty or the prompt has a system message of its own.

    Raises TaskSourceError for a plain string prompt: it has no place for a system message.
    """
    if not system_prompt:
        return prompt
    if isinstance(prompt, str):
        raise TaskSourceError(
            "environment.system_prompt is set, but the prompt is a plain string, which is completed as it is. Write "
            'the prompt as [{"role": "user", "content": "..."}], or leave system_prompt out'
        )
    if prompt and prompt[0].get("role") == "system":
        return prompt
    return [{"role": "system", "content": system_prompt}, *prompt]


def prompt_ids(tokenizer: ChatTokenizer, prompt: Prompt) -> list[int]:
    """Token ids of an episode's first prompt. Raises ModelError as `ChatTokenizer.render` does."""
    return tokenizer.encode(prompt if isinstance(prompt, str) else tokenizer.render(prompt))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _ids(value: object) -> list[int]:
    if isinstance(value, list):
        return [int(token) for token in value]
    return [value] if isinstance(value, int) else []


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is a string or an object with its text under `content`."""
    tokens = {}
    for name in _SPECIAL:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _find_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or in tokenizer_config.json as a string or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def _compile(text: str) -> jinja2.Template:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks an assistant's text for training masks; it renders as what stands in it."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(text)
