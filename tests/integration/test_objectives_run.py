"""Whole runs under other objectives, and with groups that teach nothing replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Home, read_steps

pytestmark = pytest.mark.servers

REWARD = '''
def low_letters(completions, flat, **columns):
    """The share of letters that stand early in the alphabet; 0 for tasks whose group is to have no signal."""
    scores = []
    for completion, nothing in zip(completions, flat):
        text = completion[-1]["content"]
        scores.append(0.0 if nothing else sum(letter in "abcdefghijklm" for letter in text) / max(1, len(text)))
    return scores
'''

STEPS, GROUPS = 4, 4


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.write("reward.py", REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "flat": n % 2 == 0} for n in range(40)]
    home.write("tasks.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    yield home
    home.close()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_that_teach_nothing_are_replaced_so_that_steps_stay_whole(
    home: Home, tiny_model: Path, max_staleness: int
) -> None:
    """Half of the tasks give equal rewards; twice a step's groups may be replaced, which is more than are needed."""
    config = home.write_run(
        "dynamic",
        tiny_model,
        run={"steps": STEPS},
        algorithm={"groups_per_step": GROUPS, "max_staleness": max_staleness, "dynamic_sampling": 4.0},
    )
    ended = home.farflung("up", config, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["groups_trained"] == STEPS * GROUPS
    assert ended.json["groups_skipped"] > 0
    steps = read_steps(home.directory / "runs" / "dynamic")
    counted = sum(step["signal_groups"] for step in steps)
    assert counted == STEPS * GROUPS
    assert any(step["episodes"] > GROUPS * 8 for step in steps), "replaced groups count in a step's figures"


def test_a_run_with_gspo_rloo_and_a_kl_to_the_base_goes_to_its_end(home: Home, tiny_model: Path) -> None:
    algorithm = {"objective": "gspo", "advantage": "rloo", "kl_coef": 0.05, "overlong_buffer": 4}
    config = home.write_run("gspo", tiny_model, run={"steps": STEPS}, algorithm=algorithm)
    ended = home.farflung("up", config, "--json")
    assert ended.code == 0, ended.err
    steps = read_steps(home.directory / "runs" / "gspo")
    assert len(steps) == STEPS
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 1e-4


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "cispo"])
def test_training_raises_the_reward_under_each_objective(home: Home, tiny_model: Path, objective: str) -> None:
    """The short version of `tests.benchmarks.learning`: letters early in the alphabet, every task with a signal."""
    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "flat": False} for n in range(20)]
    home.write("tasks.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    name = objective.replace("_", "-")
    # GSPO's own bounds are made for replies of thousands of tokens, whose mean ratio hardly moves.
    bounds = {"clip_low": 0.2, "clip_high": 0.28} if objective == "gspo" else {}
    config = home.write_run(name, tiny_model, run={"steps": 16}, algorithm={"objective": objective, **bounds})
    ended = home.farflung("up", config, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["reward_last5"] > ended.json["reward_first5"] + 0.05
