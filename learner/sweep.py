"""The sweeper: the only one that removes objects. Nobody deletes a blob because a publish answered "duplicate"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from broker import names
from learner.history import read_key


def removable_groups(
    objects: Iterable[tuple[str, float]],
    *,
    open_groups: Collection[str],
    now: float,
    keep_hours: float,
    grace_hours: float,
) -> list[str]:
    """Keys of closed groups' blobs that are older than `keep_hours` (0: keep for ever) and than `grace_hours`.

    `objects` are (key, time written) as the store lists them, `now` by the same store's clock. Blobs of open groups
    stay whatever their age: their message may be on its way.
    """
    if keep_hours <= 0:
        return []
    limit = max(keep_hours, grace_hours) * 3600
    return [key for key, written in objects if now - written > limit and names.group_of(key) not in open_groups]


def removable_versions(
    objects: Iterable[tuple[str, float]],
    *,
    newest: int,
    referenced: Collection[str],
    keep: int,
    now: float,
    grace_hours: float,
) -> list[str]:
    """Keys of adapters and checkpoints older than the newest `keep` (0: keep all) that nothing current refers to.

    Their keys say `.../adapters/{number}.{sha256}` and `.../checkpoints/{number}/{part}.{sha256}`; `newest` is the
    newest number. What was written within `grace_hours` stays.
    """
    if keep <= 0:
        return []
    removable = []
    for key, written in objects:
        number = int(key.split("/")[4].partition(".")[0])
        if number <= newest - keep and key not in referenced and now - written > grace_hours * 3600:
            removable.append(key)
    return removable


def contested(objects: Iterable[tuple[str, float]], *, now: float, grace_hours: float) -> dict[str, list[str]]:
    """Places that hold more than one object, each with its keys that are older than `grace_hours`.

    A place is a key without the sha256 it ends in. It holds several when two actors finished one group, or when a
    learner died, or was displaced, between its uploads and its commit, and the step was made again.
    """
    places: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for key, written in objects:
        places[place_of(key)].append((key, written))
    old = {
        place: [key for key, written in found if now - written > grace_hours * 3600]
        for place, found in places.items()
        if len(found) > 1
    }
    return {place: keys for place, keys in old.items() if keys}


def losers(places: Mapping[str, Collection[str]], named: Mapping[str, str]) -> list[str]:
    """Keys of `places` (as `contested` gives them) in whose place a commit names another object.

    `named` is what the commits name, by place. Where they name nothing the contest is not decided, and all stay.
    """
    return [key for place, keys in places.items() if place in named for key in keys if key != named[place]]


def place_of(key: str) -> str:
    """A key without the sha256 it ends in."""
    return key.rpartition(".")[0]


def removable_copies(
    objects: Iterable[tuple[str, float]], *, incarnation: str, newest: int, keep: int, now: float, grace_hours: float
) -> list[str]:
    """Keys of commits' head copies whose checkpoints retention removes (`removable_versions` with the same numbers).

    Claims stay: they are few, and their epochs are what the next one is counted from.
    """
    if keep <= 0:
        return []
    removable = []
    for key, written in objects:
        copy = read_key(key)
        if copy is None or copy.kind != "commit" or copy.incarnation != incarnation:
            continue
        if copy.step <= newest - keep and now - written > grace_hours * 3600:
            removable.append(key)
    return removable


def groups_prefix(run: str, incarnation: str) -> str:
    """Where the groups of an incarnation lie."""
    return f"{names.run_prefix(run, incarnation)}/groups/"
