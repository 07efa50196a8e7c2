"""The configuration file: one TOML file, checked whole before anything starts, and printed with every meaning.

What the keys are stands in `broker.runspec`; here they are read, refused with a remedy, and shown.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import ConfigError
from broker.runspec import RunSpec

FINITE = frozenset(
    ("lr", "kl_coef", "truth_tolerance", "dynamic_sampling", "reward_weights", "success", "temperature", "weight_decay")
)
"""Keys whose numbers must be finite; elsewhere infinity means that there is no bound."""


def load(path: Path) -> RunSpec:
    """Read and check a configuration file. Raises ConfigError: where, what was expected, what to write instead."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        plain = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return check(plain, str(path))


def check(plain: dict[str, Any], where: str) -> RunSpec:
    """Turn parsed TOML into a RunSpec, or raise ConfigError."""
    try:
        spec = msgspec.convert(plain, RunSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error), plain)}") from None
    problems = list(_contradictions(spec))
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    return spec


def _contradictions(spec: RunSpec) -> typing.Iterator[str]:
    """Combinations that no single key shows to be impossible."""
    environment, algorithm, fleet = spec.environment, spec.algorithm, spec.fleet
    if not environment.environment and not environment.rewards:
        yield (
            "environment: nothing scores an episode; expected environment.rewards or environment.environment. "
            'Write rewards = ["path/to/file.py:function"]'
        )
    if environment.reward_weights and len(environment.reward_weights) != len(environment.rewards):
        yield (
            f"environment.reward_weights: expected one weight for each of the {len(environment.rewards)} rewards, "
            f"got {len(environment.reward_weights)}"
        )
    if algorithm.min_group_size > algorithm.group_size:
        yield (
            f"algorithm.min_group_size: expected at most group_size ({algorithm.group_size}), "
            f"got {algorithm.min_group_size}"
        )
    if fleet.max_inflight < algorithm.group_size:
        yield (
            f"fleet.max_inflight: expected at least algorithm.group_size ({algorithm.group_size}), since a group runs "
            f"at once on one actor; got {fleet.max_inflight}"
        )
    yield from _infinities(spec)
    yield from _evaluation_contradictions(spec)
    if environment.group_timeout < environment.episode_timeout:
        yield (
            f"environment.group_timeout: expected at least episode_timeout ({environment.episode_timeout:g}), "
            f"got {environment.group_timeout:g}"
        )
    if fleet.min_replicas > fleet.actors:
        yield (
            f"fleet.min_replicas: expected at most fleet.actors ({fleet.actors}), since each actor hosts one replica; "
            f"got {fleet.min_replicas}"
        )


def _infinities(spec: RunSpec) -> typing.Iterator[str]:
    """Numbers that are none, and infinite ones where that has no meaning; bounds and times may be infinite."""
    plain: dict[str, dict[str, Any]] = msgspec.to_builtins(spec)
    for section, values in plain.items():
        for key, value in values.items():
            several = value if isinstance(value, list) else [value]
            numbers = [number for number in several if isinstance(number, float)]
            if any(math.isnan(number) or (math.isinf(number) and key in FINITE) for number in numbers):
                yield f"{section}.{key}: expected a finite number, got {value!r}"


def _evaluation_contradictions(spec: RunSpec) -> typing.Iterator[str]:
    evaluation, fleet = spec.evaluation, spec.fleet
    if evaluation.reward_weights and len(evaluation.reward_weights) != len(evaluation.rewards):
        yield (
            f"evaluation.reward_weights: expected one weight for each of the {len(evaluation.rewards)} functions in "
            f"evaluation.rewards, got {len(evaluation.reward_weights)}"
        )
    if not evaluation.source:
        return
    if evaluation.samples > fleet.max_inflight:
        yield (
            f"evaluation.samples: expected at most fleet.max_inflight ({fleet.max_inflight}), since a task's "
            f"completions run at once on one actor; got {evaluation.samples}"
        )
    if not fleet.eval_slots:
        yield (
            "fleet.eval_slots: expected at least 1 with evaluation.source, since a version stays loaded until it is "
            f"evaluated; got {fleet.eval_slots}. Leave it out, or leave out evaluation.source"
        )


def _explain(message: str, plain: dict[str, Any]) -> str:
    """msgspec's message with the key's path as TOML has it, and what to write instead."""
    problem, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `([^`]+)`", problem)
    missing = re.search(r"missing required field `([^`]+)`", problem)
    if unknown:
        key = f"{path}.{unknown[1]}".lstrip(".")
        known = _keys_of(path)
        close = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
        elsewhere = [f"{section}.{unknown[1]}" for section in _keys_of("") if unknown[1] in _keys_of(section)]
        hint = f"write {elsewhere[0]}" if elsewhere else f"did you mean {close[0]}?" if close else ""
        return f"{key}: unknown key; {hint or 'known here'}{': ' if not hint else ' - known here: '}{', '.join(known)}"
    if missing:
        key = f"{path}.{missing[1]}".lstrip(".")
        return f"{key}: missing; expected {_meaning(key)}"
    if not path or problem.startswith(f"{path}."):
        return problem  # a section's own words, with the key's whole path
    got = _value_at(plain, path)
    shown = f" ({got!r})" if got is not None else ""
    return f"{path}: {problem[0].lower()}{problem[1:]}{shown}. {_meaning(path)}"


def _sections() -> dict[str, type[msgspec.Struct]]:
    return dict(typing.get_type_hints(RunSpec))


def _keys_of(section: str) -> list[str]:
    sections = _sections()
    if not section:
        return list(sections)
    return [field.name for field in msgspec.structs.fields(sections[section])] if section in sections else []


def _value_at(plain: dict[str, Any], path: str) -> object:
    value: Any = plain
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(part)
        else:
            return None
    return value


def _meaning(key: str) -> str:
    section, _, name = key.partition(".")
    name = re.sub(r"\[.*", "", name)
    if name in _keys_of(section):
        return _description(_sections()[section], name)
    kind = _sections().get(section)
    return (kind.__doc__ or "").strip().splitlines()[0] if kind else f"a table [{section}]"


def _description(kind: type[msgspec.Struct], name: str) -> str:
    hint = typing.get_type_hints(kind, include_extras=True)[name]
    notes = [note.description for note in typing.get_args(hint)[1:] if isinstance(note, msgspec.Meta)]
    return next((note for note in notes if note), "")


def render(spec: RunSpec) -> str:
    """The whole configuration as TOML, every key with its meaning, defaults included."""
    lines = []
    for section, kind in _sections().items():
        lines += ["", f"# {(kind.__doc__ or '').strip().splitlines()[0]}", f"[{section}]"]
        values = getattr(spec, section)
        for field in msgspec.structs.fields(kind):
            value = getattr(values, field.name)
            lines.append(f"# {_description(kind, field.name)}")
            lines.append(f"# {field.name} =" if value is None else f"{field.name} = {_toml(value)}")
    return "\n".join(lines).strip() + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
