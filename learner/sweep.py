"""The sweeper: the only one that removes objects. Nobody deletes a blob because a publish answered "duplicate"."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from broker import names

UNREFERENCED_HOURS = 24.0
"""A blob that nothing refers to may belong to a message still on its way; after a day it does not."""


def removable_groups(
    objects: Iterable[tuple[str, float]], *, open_groups: Collection[str], now: float, keep_hours: float
) -> list[str]:
    """Keys of closed groups' blobs that are older than `keep_hours` (0: keep for ever).

    `objects` are (key, time written) as the store lists them, `now` by the same store's clock. Blobs of open groups
    stay whatever their age: their message may be on its way.
    """
    if keep_hours <= 0:
        return []
    limit = max(keep_hours, UNREFERENCED_HOURS) * 3600
    return [key for key, written in objects if now - written > limit and names.group_of(key) not in open_groups]


def removable_versions(
    objects: Iterable[tuple[str, float]], *, newest: int, referenced: Collection[str], keep: int, now: float
) -> list[str]:
    """Keys of adapters and checkpoints older than the newest `keep` (0: keep all) that nothing current refers to.

    Their keys say `.../adapters/{number}.{sha256}` and `.../checkpoints/{number}/{part}.{sha256}`; `newest` is the
    newest number. What was written within a day stays.
    """
    if keep <= 0:
        return []
    removable = []
    for key, written in objects:
        number = int(key.split("/")[4].partition(".")[0])
        if number <= newest - keep and key not in referenced and now - written > UNREFERENCED_HOURS * 3600:
            removable.append(key)
    return removable


def groups_prefix(run: str, incarnation: str) -> str:
    """Where the groups of an incarnation lie."""
    return f"{names.run_prefix(run, incarnation)}/groups/"
