"""The points at which tests kill components: each is reached somewhere, and an unknown one is refused."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker import faults
from broker.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_point_is_reached_in_the_code_and_no_other() -> None:
    source = "".join(path.read_text() for folder in ("learner", "actors") for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r'faults\.reached\("([a-z_.]+)"\)', source))
    named |= {f"learner.{label}" for label in re.findall(r'progress\("([a-z_]+)"\)', source)}
    assert named == set(faults.POINTS)


@pytest.mark.parametrize(("text", "code"), [("kill learner.issued 2", -signal.SIGKILL), ("kill learner.issue", 0)])
def test_a_fault_strikes_at_its_point_and_count(text: str, code: int) -> None:
    program = (
        "from broker import faults\n"
        f"faults.from_environment({{'FARFLUNG_FAULT': {text!r}}})\n"
        "for _ in range(2): faults.reached('learner.issued')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == code


@pytest.mark.parametrize("text", ["kill", "kill nowhere", "hurt learner.issue", "kill learner.issue x"])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no fault"):
        faults.from_environment({"FARFLUNG_FAULT": text})
