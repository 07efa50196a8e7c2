"""From a schedule that fails to the shortest one that still does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.chaos.simulation.schedule import Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The smallest schedule that can be reached from `schedule` by single simplifications, each of which still fails.

    `fails` plays a schedule. What fails may be another violation than at first: it is a violation all the same.
    """
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(schedule):
            if fails(candidate):
                schedule, smaller = candidate, True
                break
    return schedule


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with a fault less, or with a smaller run."""
    for index in range(len(schedule.faults)):
        yield schedule.without(index)
    shape = schedule.shape
    for change in (
        {"actors": shape.actors - 1},
        {"routers": 1},
        {"groups_per_step": shape.groups_per_step - 1},
        {"publish_every": 1},
        {"max_staleness": shape.max_staleness - 1},
        {"steps": shape.steps - 1},
        {"min_replicas": 1},
    ):
        smaller = replace(shape, **change)
        if smaller == shape or min(smaller.actors, smaller.groups_per_step, smaller.steps) < 1:
            continue
        if smaller.max_staleness < 0 or smaller.min_replicas > smaller.actors:
            continue
        yield replace(schedule, shape=smaller)
