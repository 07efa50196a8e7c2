"""Which adapters a replica should hold. Pure: the registry's records in, a list out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.messages import AdapterRef, Head, VersionRecord


def wanted(
    heads: Mapping[str, Head],
    versions: Mapping[str, Mapping[int, VersionRecord]],
    fleet: str,
    pins: Sequence[AdapterRef] = (),
) -> list[AdapterRef]:
    """Every adapter to hold for `fleet`, the most needed first.

    A run's active version comes first, then the newest committed one, then the other live ones, newest first, then
    the one its learner offers ahead of the commit, then those under evaluation (`pins`, in their order). Runs that
    go on come before those that have ended, which keep what no evaluation needs.
    """
    found: list[tuple[int, int, str, AdapterRef]] = []
    for run, head in heads.items():
        if head.fleet != fleet:
            continue
        ended = 0 if head.state == "running" else 10
        for ref in head.live:
            need = 0 if ref.version == head.active else 1 if ref.version == head.head else 2
            found.append((ended + need, -ref.version, run, ref))
        offer = offered(head, versions.get(run, {}))
        if offer is not None:
            found.append((ended + 3, -offer.version, run, offer))
    found += [(4, place, "", ref) for place, ref in enumerate(pins)]
    unique: dict[str, AdapterRef] = {}
    for _, _, _, ref in sorted(found, key=lambda item: item[:3]):
        unique.setdefault(ref.name, ref)
    return list(unique.values())


def offered(head: Head, versions: Mapping[int, VersionRecord]) -> AdapterRef | None:
    """The version that the run's present learner offers ahead of its commit, None when there is none."""
    ahead = [
        record
        for version, record in versions.items()
        if version > head.head
        and record.state == "offered"
        and record.incarnation == head.incarnation
        and record.epoch == head.epoch
    ]
    return max(ahead, key=lambda record: record.adapter.version).adapter if ahead else None


def still_counts(head: Head, version: int, adapter: str | None) -> bool:
    """Whether a group that runs under `version`, served by `adapter`, can still be trained on.

    Not when the version is too old, and not when the run went back behind it: its adapter is not live any more then,
    even if a version of that number is made again, with other bytes and hence another name.
    """
    if adapter is not None and adapter not in {ref.name for ref in head.live}:
        return False
    return version >= head.head - head.max_staleness
