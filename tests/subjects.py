"""NATS subject patterns, as the server matches them."""

from __future__ import annotations


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is one of those that `pattern` means: `*` is any one word, a last `>` any that follow."""
    wanted, words = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, words = wanted[:-1], words[: len(wanted) - 1] if len(words) >= len(wanted) else []
    return len(wanted) == len(words) and all(want in ("*", word) for want, word in zip(wanted, words, strict=True))
