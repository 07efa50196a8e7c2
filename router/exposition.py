"""Readings in Prometheus' text format. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def metric(name: str, kind: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> str:
    """One metric. `kind` is gauge or counter; each sample has its labels and its value."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
