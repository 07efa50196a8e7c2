"""Evaluation through the command line: beside a run that goes on, by hand, and as it is seen afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Home, made_step
from tests.integration.test_full_run import new_home

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

HELD_OUT = 5


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = new_home(tmp_path)
    lines = [json.dumps({"prompt": [{"role": "user", "content": f"tell {n}"}]}) for n in range(HELD_OUT)]
    home.write("held-out.jsonl", "\n".join(lines))
    home.write("no-tasks.jsonl", "")
    yield home
    home.close()


def evaluations(directory: Path) -> list[dict[str, Any]]:
    path = directory / "evals.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_run_is_evaluated_while_it_goes_on_and_any_version_by_hand(home: Home, tiny_model: Path) -> None:
    evaluation = {"source": "held-out.jsonl", "every": 4, "samples": 2, "success": 0.5, "top_p": 0.9}
    sections: dict[str, dict[str, object]] = {
        "run": {"steps": 5000},
        "evaluation": evaluation,
        "fleet": {"eval_slots": 2},
    }
    config = home.write_run("judged", tiny_model, **sections)
    directory = home.directory / "runs" / "judged"
    up = home.start("up", config)
    up.until(lambda: made_step(directory, 4) and len(evaluations(directory)) >= 2, "two versions are evaluated")

    by_hand = home.farflung("eval", "judged@1", "held-out.jsonl", "--samples", 4, "--limit", 3, "--json")
    assert by_hand.code == 0, by_hand.err
    result = by_hand.json
    assert (result["version"], result["tasks"], result["failed_tasks"], result["samples"]) == (1, 3, 0, 4)
    assert result["adapter"].startswith("judged-v000001-")
    assert (result["success"], result["top_p"]) == (0.5, 0.9), "the run's configuration holds where nothing is said"
    assert result["reward_low"] <= result["reward"] <= result["reward_high"]
    assert 0 <= result["pass_at_1"] <= result["pass_at_2"] <= result["pass_at_4"] <= 1
    assert up.running

    for arguments, code, words in (
        (("judged@100000", "held-out.jsonl"), 2, "has no version 100000"),
        (("nobody", "held-out.jsonl"), 5, "there is no run nobody"),
        (("judged@x", "held-out.jsonl"), 2, "expected RUN, RUN@latest or RUN@VERSION"),
        (("judged", "no-tasks.jsonl"), 2, "holds no task"),
        (("judged", "nowhere.jsonl"), 2, "'nowhere.jsonl' does not exist"),
    ):
        refused = home.farflung("eval", *arguments)
        assert refused.code == code, refused.err
        assert words in refused.err

    up.interrupt()
    assert up.wait().code == 130
    logged = evaluations(directory)
    assert [record["version"] for record in logged] == sorted({record["version"] for record in logged})
    assert logged[0]["version"] == 0
    assert logged[0]["adapter"] is None
    for record in logged[1:]:
        assert record["version"] % 4 == 0
        assert record["step"] == record["version"]
        assert record["adapter"].startswith(f"judged-v{record['version']:06d}-")
        assert (record["tasks"], record["failed_tasks"], record["samples"]) == (HELD_OUT, 0, 2)

    [shown] = home.farflung("status", "judged", "--dir", directory, "--json").json["runs"]
    assert shown["evaluation"] == logged[-1]
    said = home.farflung("status", "judged", "--dir", directory).out
    assert f"evaluation of version {logged[-1]['version']}: reward {logged[-1]['reward']:.3f}" in said
    drawn = home.farflung("plot", "judged", "eval_reward", "--dir", directory)
    assert drawn.code == 0, drawn.err
    assert f"eval_reward, steps 0 to {logged[-1]['step']}, last" in drawn.out
