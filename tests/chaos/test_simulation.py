"""The protocol under thousands of fault schedules, and proof that the simulation would notice if it were wrong."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCHEDULES = 2000
"""Minutes on two cores; `make sim` plays fifty times as many."""

PLANTED = {
    "a step's groups are acknowledged before its commit": (
        """
        real = Learner._commit
        async def early(self, batch, *rest):
            await asyncio.gather(*(held.delivery.ack() for held in batch))
            return await real(self, batch, *rest)
        Learner._commit = early
        """,
        "which it has not closed",
    ),
    "a redelivered group is put into the buffer again": (
        """
        real = Intake._receive
        async def forgetful(self, delivery):
            self._holding.pop(names.group_at(delivery.subject), None)
            await real(self, delivery)
        Intake._receive = forgetful
        """,
        "a second time|was made from",
    ),
    "the ledger forgets the groups that a step closes": (
        """
        real = Ledger.to_state
        Ledger.to_state = lambda self, without=(): real(self)
        """,
        "a second time|which were closed|not intact|opens",
    ),
    "a learner writes over the head of a later epoch": (
        """
        async def reckless(self, key, value, revision, *, patience=60.0):
            await self.put(key, value)
            return (await self.get(key)).revision
        Bucket.compare_and_set = reckless
        """,
        "who wrote in it|was written after epoch",
    ),
    "a version is active before a replica serves it": (
        """
        Activation.observe = lambda self, replicas, now: "active"
        """,
        "have ever confirmed it",
    ),
    "the optimizer is not restored": (
        """
        PlayedPolicy.load_optimizer_bytes = lambda self, data: None
        """,
        "different histories",
    ),
    "credit counts what is committed and not what is open": (
        """
        CreditRule.credit = lambda self, **_: 10**6
        """,
        "the window is",
    ),
    "what was issued is not issued again when the broker lost it": (
        """
        Feeder.issue_again = lambda self, group, index, active: asyncio.sleep(0)
        """,
        "stands still",
    ),
    "retired versions stay wanted": (
        """
        import learner.session
        learner.session.live_versions = lambda *, head, active, max_staleness, known: sorted(known)
        """,
        "too many for the slots|stands still",
    ),
    "a router does not ask what a replica has confirmed": (
        """
        Placer.eligible = lambda self, adapter: list(self._replicas)
        """,
        "never confirmed",
    ),
    "a watch believes that it has everything when it is told so": (
        """
        real = Bucket.state
        async def nothing_there(self):
            return (await real(self))._replace(entries=0)
        Bucket.state = nothing_there
        client.EARLY_MARK = 0.5
        """,
        "stands still",
    ),
}
"""What is broken, the code that breaks it, and what the referee then says."""

PREAMBLE = """
import asyncio
import re
import sys
from broker import names
from broker.registry import Bucket
from learner.activation import Activation
from learner.credit import CreditRule
from learner.feeder import Feeder
from learner.intake import Intake
from learner.ledger import Ledger
from learner.service import Learner
from router.placement import Placer
from tests.chaos.simulation import client
from tests.chaos.simulation.models import PlayedPolicy
from tests.chaos.simulation.schedule import schedule_of
from tests.chaos.simulation.world import World, quiet
quiet()
"""

SEARCH = """
for seed in range(400):
    violation = World(schedule_of(seed)).play().violation
    if violation and re.search(sys.argv[1], violation):
        print(f"seed {seed}: {violation}")
        sys.exit(0)
sys.exit("400 schedules, and nobody noticed")
"""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the project, with the order of sets fixed."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(1800)
def test_the_invariants_hold_in_every_schedule() -> None:
    done = simulate("-m", "tests.chaos.simulation", "--schedules", str(SCHEDULES))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{SCHEDULES} schedules" in done.stdout


def test_what_was_played_before_makes_no_difference() -> None:
    code = """
outcomes = [World(schedule_of(seed)).play() for seed in (60, 58, 59, 60)]
print([(outcome.callbacks, outcome.seconds) for outcome in outcomes])
"""
    done = simulate("-c", PREAMBLE + code)
    assert done.returncode == 0, done.stderr
    first, *_, again = ast.literal_eval(done.stdout)
    assert first == again


def test_a_seed_replays_exactly() -> None:
    stories = [simulate("-m", "tests.chaos.simulation", "--seed", "12") for _ in range(2)]
    assert stories[0].returncode == 0, stories[0].stderr
    assert stories[0].stdout == stories[1].stdout
    assert "has finished the run" in stories[0].stdout


@pytest.mark.parametrize("bug", PLANTED)
def test_the_simulation_notices_when(bug: str) -> None:
    code, words = PLANTED[bug]
    lines = [line[8:] for line in code.splitlines()]
    done = simulate("-c", "\n".join([PREAMBLE, *lines, SEARCH]), words)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_failing_schedule_shrinks_to_the_faults_that_matter() -> None:
    from tests.chaos.simulation.schedule import schedule_of
    from tests.chaos.simulation.shrink import shrink

    schedule = next(
        found for found in map(schedule_of, range(1000)) if len(found.faults) > 3 and found.shape.actors > 1
    )
    culprit = schedule.faults[2]
    smallest = shrink(schedule, lambda candidate: culprit in candidate.faults)
    assert smallest.faults == (culprit,)
    assert (smallest.shape.actors, smallest.shape.steps, smallest.shape.groups_per_step) == (1, 1, 1)
