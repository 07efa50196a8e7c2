"""Whatever is killed, the run goes on: learner, actor, router, broker and store in turn, in one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.command_line import Command, Home, read_steps

pytestmark = pytest.mark.servers

STEPS = 100


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.write("tasks.jsonl", "\n".join(json.dumps({"prompt": f"say {number}"}) for number in range(20)))
    home.write(
        "reward.py",
        "def low_letters(completions, **columns):\n"
        "    return [sum(letter in 'abcdefghijklm' for letter in text) / (len(text) or 1) for text in completions]\n",
    )
    yield home
    home.close()


def kill(up: Command, words: str) -> None:
    """SIGKILL the one child of `up` whose command line holds `words`, or the first of several."""
    for process in up.descendants():
        if words in " ".join(process.cmdline()):
            process.kill()
            psutil.wait_procs([process], timeout=10)
            return
    raise AssertionError(f"no child has {words!r} on its command line")


def test_a_run_outlives_its_learner_an_actor_the_router_the_broker_and_the_store(home: Home, tiny_model: Path) -> None:
    config = home.write_run("tough", tiny_model, run={"steps": STEPS}, fleet={"actors": 2})
    directory = home.directory / "runs" / "tough"
    up = home.start("up", config, "--json")

    def goes_on(what: str) -> None:
        before = len(read_steps(directory))
        up.until(lambda: len(read_steps(directory)) >= before + 3, f"three steps more after {what}")

    goes_on("the start")
    for words in ("deploy.cli actor", "deploy.cli router", "nats-server", "rclone", "deploy.cli learner"):
        kill(up, words)
        goes_on(f"the death of {words}")
    ended = up.wait()
    assert ended.code == 0, ended.err
    summary = ended.json
    assert summary["done"]
    assert summary["steps"] == summary["head"] == STEPS
    outcomes = ("trained", "dropped", "skipped", "failed", "expired", "open")
    assert summary["groups_issued"] == sum(summary[f"groups_{outcome}"] for outcome in outcomes)
    assert summary["groups_trained"] + summary["groups_skipped"] == STEPS * 4, "each step had its groups, none twice"
    numbers = [step["step"] for step in read_steps(directory)]
    assert numbers == list(range(1, STEPS + 1)), "no step was lost, and none was committed twice"
