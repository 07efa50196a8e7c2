"""What an HTTP client may name as `model`: the base model, a run, or one version of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from broker.messages import AdapterRef, Head


class Policy(NamedTuple):
    """What serves a request: an adapter of a run, or, where that is None, the base model."""

    run: str
    adapter: str | None
    version: int


BASE = Policy("", None, 0)


def base_names(fleet: str, heads: Iterable[Head]) -> list[str]:
    """The base model's names: the fleet's, and what its runs call the model."""
    names = [fleet]
    for head in heads:
        run = head.spec.get("run")
        model = run.get("model") if isinstance(run, Mapping) else None
        if isinstance(model, str) and model:
            names.append(Path(model).name if model.startswith((".", "/", "~")) else model)
    return list(dict.fromkeys(names))


def listed(fleet: str, heads: Iterable[Head]) -> list[tuple[str, str | None]]:
    """Every name that can be asked for, with the base model's for what is an adapter of it."""
    heads = sorted(heads, key=lambda head: head.run)
    bases = base_names(fleet, heads)
    models: list[tuple[str, str | None]] = [(name, None) for name in bases]
    for head in heads:
        models.append((head.run, fleet))
        models += [(ref.name, fleet) for ref in head.live]
    return models


def find(model: str, fleet: str, heads: Iterable[Head]) -> Policy | None:
    """The policy called `model`: the base model, `RUN` (its active version), `RUN@VERSION`, or an adapter's name.

    None when there is none.
    """
    heads = list(heads)
    by_run = {head.run: head for head in heads}
    if model in by_run:
        head = by_run[model]
        return _version(head, head.active)
    if model in base_names(fleet, heads):
        return BASE
    run, _, version = model.rpartition("@")
    if run in by_run and version.isdigit():
        return _version(by_run[run], int(version))
    for head in heads:
        for ref in head.live:
            if ref.name == model:
                return Policy(head.run, ref.name, ref.version)
    return None


def _version(head: Head, version: int) -> Policy | None:
    ref = next((ref for ref in _refs(head) if ref.version == version), None)
    if ref is not None:
        return Policy(head.run, ref.name, ref.version)
    return Policy(head.run, None, 0) if version == 0 else None


def _refs(head: Head) -> list[AdapterRef]:
    return [*head.live, *([head.adapter] if head.adapter else [])]
