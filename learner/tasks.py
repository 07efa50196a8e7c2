"""Task sources: JSONL files, Hugging Face dataset directories and Python classes, and the order they are read in.

Rows are addressed by index, and the order is a function of (index, seed) alone, so a run resumes from its cursor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from broker.chat import ChatTokenizer, prompt_ids, with_system_prompt
from broker.code import load_object
from broker.errors import ConfigError, TaskSourceError, UserCodeError
from broker.runspec import TasksSection

Row = dict[str, Any]
"""A task's columns: plain data that msgpack carries."""

_MSGPACK_INTEGERS = range(-(2**63), 2**64)
_ROUNDS = 4
"""Feistel rounds: with four, a pseudorandom round function gives a pseudorandom permutation (Luby and Rackoff)."""


class TaskSource(Protocol):
    """Where a run's tasks come from. `length` is None for a source without an end."""

    @property
    def length(self) -> int | None: ...

    def row(self, index: int) -> Row:
        """The task at `index`, as plain data. Raises TaskSourceError."""


def load_tasks(
    section: TasksSection, roots: Sequence[Path] = (), *, needs_prompt: bool = True, where: str = "tasks."
) -> TaskSource:
    """Open the task source that `section` names; paths are relative to `roots`, in order, then the current folder.

    `needs_prompt` is off when an environment class makes the prompts. `where`: what error messages put before the
    section's keys. Raises TaskSourceError when the source is missing or empty, or when a line or row is not a task;
    UserCodeError when its class cannot be used.
    """
    prompt_column = section.prompt_column if needs_prompt else None
    if ":" in section.source and not _find(section.source, roots):
        return _ClassTasks(section, roots, prompt_column, where)
    path = _find(section.source, roots)
    if path is None:
        looked = ", ".join(dict.fromkeys(str(root / section.source) for root in (*roots, Path.cwd())))
        raise TaskSourceError(
            f"{where}source: {section.source!r} does not exist; looked for {looked}. Give a .jsonl file, a Hugging "
            "Face dataset directory, or a class as path/to/file.py:Name"
        )
    if path.is_dir():
        return _DatasetTasks(path, section.split, prompt_column, where)
    if path.suffix not in (".jsonl", ".ndjson"):
        raise TaskSourceError(f"{where}source: expected a .jsonl file, got {path}. Write one JSON object per line")
    return _JsonlTasks(path, prompt_column, where)


def order(index: int, length: int | None, seed: int, shuffle: bool) -> int:
    """Which row the run's `index`-th task is: epoch after epoch, each a permutation of its own if `shuffle`.

    Needs no state and constant time: a Feistel cipher over the next power of four, walked until it hits the range.
    Without a `length` the source is read straight on.
    """
    if length is None:
        return index
    epoch, place = divmod(index, length)
    if not shuffle or length == 1:
        return place
    half = ((length - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            key = f"{seed}:{epoch}:{number}:{right}".encode()
            mixed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
            left, right = right, left ^ (mixed & mask)
        place = left << half | right
        if place < length:
            return place


def check_lengths(
    source: TaskSource,
    tokenizer: ChatTokenizer,
    context: int,
    sample: int,
    *,
    prompt_column: str = "prompt",
    system_prompt: str = "",
) -> None:
    """Render the first `sample` tasks' prompts, so that a run that cannot work is refused at its start.

    Raises TaskSourceError for a prompt that leaves no room for a reply in `context` tokens, or that is empty, and
    ModelError when the chat template is missing or refuses the messages.
    """
    for index in range(sample if source.length is None else min(sample, source.length)):
        prompt = with_system_prompt(source.row(index)[prompt_column], system_prompt)
        tokens = len(prompt_ids(tokenizer, prompt))
        if tokens == 0:
            raise TaskSourceError(f"task {index}: the prompt is empty")
        if tokens >= context:
            raise TaskSourceError(
                f"task {index}: the prompt has {tokens} tokens, but the model's context is {context} and a reply needs "
                "room too. Shorten or drop the task, or choose a model with a longer context"
            )


def _find(source: str, roots: Sequence[Path]) -> Path | None:
    candidates = (root / Path(source).expanduser() for root in (*roots, Path.cwd()))
    return next((path for path in candidates if path.exists()), None)


def _checked(row: object, where: str, prompt_column: str | None) -> Row:
    """`row` as plain data with a usable prompt. Raises TaskSourceError."""
    if not isinstance(row, Mapping):
        raise TaskSourceError(f"{where}: expected an object with columns, got {type(row).__name__}")
    columns = {str(name): _plain(value, f"{where}: column {name!r}") for name, value in row.items()}
    if prompt_column is None:
        return columns
    if prompt_column not in columns:
        raise TaskSourceError(
            f"{where}: no column {prompt_column!r}; it has {', '.join(columns) or 'none'}. Set tasks.prompt_column"
        )
    prompt = columns[prompt_column]
    messages = prompt if isinstance(prompt, list) else [None]
    if not isinstance(prompt, str) and not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise TaskSourceError(
            f"{where}: expected column {prompt_column!r} to be a string or a list of messages such as "
            f'[{{"role": "user", "content": "..."}}], got {type(prompt).__name__} {str(prompt)[:80]!r}'
        )
    if not prompt:
        raise TaskSourceError(f"{where}: column {prompt_column!r} is empty")
    return columns


def _plain(value: object, where: str) -> Any:
    """`value` as data that msgpack carries: numpy becomes plain, dates become ISO strings. Raises TaskSourceError."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TaskSourceError(f"{where}: {value[:60]!r} is no valid text: {error.reason}") from error
        return value
    if value is None or isinstance(value, bool | float | bytes):
        return value
    if isinstance(value, int) and value in _MSGPACK_INTEGERS:
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise TaskSourceError(
        f"{where}: {type(value).__name__} {str(value)[:60]!r} cannot be sent. Use numbers up to 64 bits, strings, "
        "lists, dicts or dates, or drop the column"
    )


class _JsonlTasks:
    """One JSON object per line, blank lines skipped. Only the lines' offsets are held in memory."""

    def __init__(self, path: Path, prompt_column: str | None, where: str) -> None:
        self._path = path
        self._prompt_column = prompt_column
        self._offsets = array("Q")
        self._lines = array("Q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._parse(line, number)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        if not self._offsets:
            raise TaskSourceError(f"{where}source: {path} holds no task. Write one JSON object per line")

    @property
    def length(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> Row:
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return self._parse(file.readline(), self._lines[index])

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TaskSourceError(f"{self._path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TaskSourceError(f"{self._path}, line {number}: expected a JSON object, got {line.strip()[:60]!r}")
        return _checked(row, f"{self._path}, line {number}", self._prompt_column)


class _DatasetTasks:
    """A directory written by `Dataset.save_to_disk`, or one with parquet, JSON or CSV files."""

    def __init__(self, path: Path, split: str, prompt_column: str | None, where: str) -> None:
        try:
            import datasets
        except ImportError:
            raise TaskSourceError(
                f"{where}source: {path} is a directory, which the `datasets` library reads: "
                "`pip install 'farflung[datasets]'`, or give a .jsonl file"
            ) from None
        saved = any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))
        try:
            found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
        except Exception as error:
            raise TaskSourceError(
                f"{where}source: {path} is no dataset that the `datasets` library can read: {error}"
            ) from error
        if isinstance(found, dict):
            if split not in found:
                raise TaskSourceError(f"{where}split: {path} has no split {split!r}; it has {', '.join(found)}")
            found = found[split]
        self._rows: Any = found
        self._path = path
        self._prompt_column = prompt_column
        if len(found) == 0:
            raise TaskSourceError(f"{where}source: split {split!r} of {path} holds no task")
        self.row(0)

    @property
    def length(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return _checked(self._rows[index], f"{self._path}, row {index}", self._prompt_column)


class _ClassTasks:
    """An object of the user's with `__getitem__(index)`, and `__len__` unless it has no end."""

    def __init__(self, section: TasksSection, roots: Sequence[Path], prompt_column: str | None, where: str) -> None:
        self._spec = spec = section.source
        self._prompt_column = prompt_column
        found: Any = load_object(spec, roots=roots)
        if callable(found):
            try:
                found = found(**section.arguments)
            except Exception as error:
                raise UserCodeError(
                    f"{where}source: {spec} could not be made with the arguments {section.arguments}: "
                    f"{type(error).__name__}: {error}. Set {where}arguments"
                ) from error
        elif section.arguments:
            raise ConfigError(f"{where}arguments: {spec} is no class, so it takes no arguments; leave them out")
        if not hasattr(found, "__getitem__"):
            raise UserCodeError(
                f"{where}source: {spec} has no __getitem__, so tasks cannot be addressed by index and a run could not "
                "resume. Write `def __getitem__(self, index): return {...}` (and __len__ unless it has no end); an "
                "iterable can be turned into a list, or written to a .jsonl file"
            )
        self._rows: Any = found
        self._length = len(self._rows) if hasattr(found, "__len__") else None
        if self._length == 0:
            raise TaskSourceError(f"{where}source: {spec} holds no task: its length is 0")
        self.row(0)

    @property
    def length(self) -> int | None:
        return self._length

    def row(self, index: int) -> Row:
        try:
            row = self._rows[index]
        except Exception as error:
            raise TaskSourceError(f"{self._spec}: task {index} raised {type(error).__name__}: {error}") from error
        return _checked(row, f"{self._spec}, task {index}", self._prompt_column)
