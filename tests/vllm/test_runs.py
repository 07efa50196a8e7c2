"""Whole runs on real vLLM servers through the command line: killed engines and actors, and the demo's task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from broker.models import PACKAGED, ModelFiles, resolve
from tests.command_line import Command, Home, read_steps
from tests.vllm.conftest import PYTHON

pytestmark = [pytest.mark.servers, pytest.mark.timeout(2400)]

STEPS = 12

LONG = 1800.0
"""Seconds a run may take here: servers start in half a minute on an idle machine, and in minutes on a busy one."""

EXAMPLES = Path(__file__).parents[2] / "examples"

FLEET = {"engine": "vllm", "engine_args": ["--enforce-eager"], "actors": 1}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home", wrapper=["env", f"FARFLUNG_VLLM_PYTHON={PYTHON}"])
    home.write("tasks.jsonl", "\n".join(json.dumps({"prompt": f"say {number}"}) for number in range(20)))
    home.write(
        "reward.py",
        "def low_letters(completions, **columns):\n"
        "    return [sum(letter in 'abcdefghijklm' for letter in text) / (len(text) or 1) for text in completions]\n",
    )
    yield home
    home.close()


def the_one(up: Command, words: str) -> psutil.Process:
    """The first descendant of `up` whose command line holds `words`."""
    return next(process for process in up.descendants() if words in " ".join(process.cmdline()))


@pytest.mark.long
def test_a_run_outlives_its_engine_and_its_actor(home: Home, files: ModelFiles) -> None:
    config = home.write_run("tough", files.directory, run={"steps": STEPS}, fleet=FLEET, optimizer={"lr": 1e-2})
    directory = home.directory / "runs" / "tough"
    up = home.start("up", config, "--json", "--threads-actor", "1", "--threads-learner", "1")

    def goes_on(what: str) -> None:
        before = len(read_steps(directory))
        up.until(lambda: len(read_steps(directory)) >= before + 2, f"two steps more after {what}", within=LONG)

    goes_on("the start")
    engine = the_one(up, "vllm.entrypoints")
    engine.kill()
    goes_on("the engine's death")
    engine = the_one(up, "vllm.entrypoints")
    below = [engine, *engine.children(recursive=True)]
    the_one(up, "deploy.cli actor").kill()
    assert psutil.wait_procs(below, timeout=60)[1] == [], "the engine does not outlive its actor"
    goes_on("the actor's death")
    ended = up.wait(within=LONG)
    assert ended.code == 0, ended.err
    summary = ended.json
    assert summary["steps"] == summary["head"] == STEPS
    outcomes = ("trained", "dropped", "skipped", "failed", "expired", "open")
    assert summary["groups_issued"] == sum(summary[f"groups_{outcome}"] for outcome in outcomes)
    assert (summary["groups_failed"], summary["groups_expired"]) == (0, 0), "nothing was lost"
    assert [step["step"] for step in read_steps(directory)] == list(range(1, STEPS + 1))
    assert max(step["truth_p99"] for step in read_steps(directory)) < 1e-3
    versions = {group["version"] for group in stored(home, directory, "tough")}
    assert len(versions) > STEPS // 2, "one version after the other was served"


def stored(home: Home, directory: Path, run: str) -> list[dict[str, object]]:
    ended = home.farflung("trajectories", "list", run, "--limit", "1000", "--dir", directory, "--json")
    assert ended.code == 0, ended.err
    return list(ended.json)


def test_the_demo_runs_on_vllm(home: Home) -> None:
    model = resolve(PACKAGED).directory
    home.write("addition.py", (EXAMPLES / "addition.py").read_text())
    config = home.write_run(
        "addition", model, run={"steps": 3}, tasks={"source": "addition.py:Tasks"},
        environment={"rewards": ["addition.py:reward"]}, sampling={"max_new_tokens": 16},
        algorithm={"group_size": 8, "groups_per_step": 4, "max_staleness": 1}, optimizer={"lr": 3e-4}, fleet=FLEET,
    )  # fmt: skip
    directory = home.directory / "runs" / "addition"
    up = home.start("up", config, "--json", "--threads-actor", "1", "--threads-learner", "1")
    ended = up.wait(within=LONG)
    assert ended.code == 0, ended.err
    assert ended.json["steps"] == ended.json["head"] == 3
    steps = read_steps(directory)
    assert max(step["truth_mean"] for step in steps) < 1e-3, "what was sampled is what is recorded"
    assert {group["version"] for group in stored(home, directory, "addition")} >= {0, 1}
