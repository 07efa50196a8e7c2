"""Play schedules by the thousand, or one of them with its story.

python -m tests.chaos.simulation --schedules 100000        every seed from 0 on, on all cores
python -m tests.chaos.simulation --seed 4711               one seed: its story, shrunk first if it fails
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.chaos.simulation.loop import PROCESS
from tests.chaos.simulation.schedule import Schedule, schedule_of
from tests.chaos.simulation.shrink import shrink
from tests.chaos.simulation.world import Outcome, World, quiet

CHUNK = 50
"""Schedules a worker plays between two reports."""

STORY_LINES = 120
"""A longer story is shown by its beginning and its end."""

CHUNKS_PER_WORKER = 40
"""After so many chunks each, workers make way for fresh ones."""


def play(schedule: Schedule, *, verbose: bool = False) -> Outcome:
    """Play one schedule; `verbose` puts the product's own log into the story."""
    world = World(schedule)
    if not verbose:
        return world.play()
    handler = _Scribe(world)
    logging.disable(logging.DEBUG)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        return world.play()
    finally:
        root.removeHandler(handler)
        logging.disable(logging.WARNING)


class _Scribe(logging.Handler):
    """Writes what the product logs into the story, with who said it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        who = PROCESS.get()
        self._world.say(f"    {who.name if who else 'world'}: {record.getMessage()[:300]}")


def chunk(first: int, count: int) -> tuple[int, int, int, list[tuple[int, str]]]:
    """Play some seeds: how many, callbacks, commits, and the seeds that failed with what was violated."""
    quiet()
    outcomes = [World(schedule_of(seed)).play() for seed in range(first, first + count)]
    failed = [(outcome.schedule.seed, outcome.violation) for outcome in outcomes if outcome.violation]
    return count, sum(o.callbacks for o in outcomes), sum(o.commits for o in outcomes), failed


def _chunks(first: int, schedules: int, jobs: int) -> Iterator[tuple[int, int, int, list[tuple[int, str]]]]:
    """What `chunk` says of every piece, in order.

    Workers grow, so that all are replaced now and then. A pool that is told to do so itself (`max_tasks_per_child`)
    may forget to start a new one, and wait for ever.
    """
    context = get_context("spawn")
    pieces = _pieces(first, schedules)
    while batch := list(itertools.islice(pieces, jobs * CHUNKS_PER_WORKER)):
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            yield from pool.map(chunk, *zip(*batch, strict=True))


def _pieces(first: int, schedules: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, first + schedules, CHUNK):
        yield begin, min(CHUNK, first + schedules - begin)


def many(first: int, schedules: int, jobs: int) -> int:
    """Play `schedules` seeds from `first` on; returns how many failed. Prints each failure, shrunk."""
    began = time.monotonic()
    played = callbacks = commits = said = 0
    failures: list[tuple[int, str]] = []
    for count, ran, made, failed in _chunks(first, schedules, jobs):
        played, callbacks, commits = played + count, callbacks + ran, commits + made
        failures += failed
        for seed, violation in failed:
            print(f"seed {seed}: {violation.strip().splitlines()[-1]}", flush=True)
        if played // 5000 > said:
            said = played // 5000
            print(f"{played} schedules, {len(failures)} failed, {time.monotonic() - began:.0f} s", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{played} schedules, {commits} commits, {callbacks} events in {seconds:.0f} s on {jobs} cores; "
        f"{len(failures)} failed"
    )
    if failures:
        one(failures[0][0])
    return len(failures)


def one(seed: int) -> int:
    """Tell the story of one seed; 1 if it fails."""
    quiet()
    schedule = schedule_of(seed)
    if play(schedule).violation:
        schedule = shrink(schedule, lambda candidate: bool(play(candidate).violation))
    outcome = play(schedule, verbose=True)
    print(schedule)
    lines = outcome.story
    print(
        "\n".join(
            lines if len(lines) <= STORY_LINES else [*lines[: STORY_LINES // 2], "...", *lines[-STORY_LINES // 2 :]]
        )
    )
    print(f"violated: {outcome.violation}" if outcome.violation else f"all well after {outcome.seconds:.1f} s")
    return int(bool(outcome.violation))
