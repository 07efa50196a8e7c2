"""The configuration file: complete when printed, and refused with a remedy when wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.errors import ConfigError
from broker.runspec import OBJECTIVES, RunSpec, fleet_of
from deploy.config import check, load, render
from learner.priority import PRIORITIES

GOOD: dict[str, Any] = {
    "run": {"name": "r", "model": "m"},
    "tasks": {"source": "t.jsonl"},
    "environment": {"rewards": ["r.py:f"]},
}


def changed(path: str, value: object) -> dict[str, Any]:
    plain = {section: dict(keys) for section, keys in GOOD.items()}
    section, key = path.split(".")
    plain.setdefault(section, {})[key] = value
    return plain


def test_a_printed_configuration_is_the_same_configuration_and_explains_every_key() -> None:
    spec = check(GOOD, "x")
    text = render(spec)
    assert check(tomllib.loads(text), "printed") == spec
    for section in msgspec.structs.fields(RunSpec):
        assert f"[{section.name}]" in text
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[number - 1].startswith("# ") and len(lines[number - 1]) > 8, line


def test_the_shipped_examples_are_valid() -> None:
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
    assert len(examples) >= 2
    for path in examples:
        load(path)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("run.stepz", 3, ["run.stepz", "unknown key", "did you mean steps?"]),
        ("run.group_size", 8, ["run.group_size", "unknown key", "write algorithm.group_size"]),
        ("run.steps", "many", ["run.steps", "int", "'many'", "Optimizer steps"]),
        ("run.steps", 0, ["run.steps", ">= 1"]),
        ("run.name", "Has Spaces", ["run.name", "lower-case"]),
        ("algorithm.group_size", 1, ["algorithm.group_size", ">= 2"]),
        ("algorithm.advantage", "ppo", ["algorithm.advantage", "'ppo'", "dr_grpo"]),
        ("algorithm.objective", "reinforce", ["algorithm.objective", "'reinforce'", "docs/objectives.md"]),
        ("algorithm.ratio_max", 2.0, ["algorithm.ratio_max is not used by the objective ppo_clip", "dual_clip"]),
        ("algorithm.dual_clip", 1.1, ["algorithm.dual_clip: expected more than 1 + clip_high (1.28)"]),
        ("algorithm.objective", "distillation", ["algorithm.teacher: missing"]),
        ("algorithm.overlong_buffer", 999, ["algorithm.overlong_buffer: expected at most 256", "999"]),
        ("algorithm.min_group_size", 99, ["algorithm.min_group_size", "at most group_size (8)", "99"]),
        ("environment.rewards", [], ["environment", "nothing scores an episode", "rewards ="]),
        ("environment.rewards", [1], ["environment.rewards", "str"]),
        ("environment.reward_weights", [1.0, 2.0], ["environment.reward_weights", "1 rewards", "got 2"]),
        ("environment.group_timeout", 5.0, ["environment.group_timeout", "episode_timeout"]),
        ("fleet.max_inflight", 4, ["fleet.max_inflight", "group_size (8)"]),
        ("fleet.min_replicas", 2, ["fleet.min_replicas", "fleet.actors (1)"]),
        ("evaluation.every", 0, ["evaluation.every", "0", "Versions whose number"]),
        ("evaluation.top_p", 0.0, ["evaluation.top_p", "0.0"]),
        ("evaluation.samples", 0, ["evaluation.samples", "Completions per task"]),
        ("environment.reward_weights", [float("inf")], ["environment.reward_weights: expected a finite number"]),
        ("optimizer.lr", float("inf"), ["optimizer.lr: expected a finite number, got inf"]),
        ("algorithm.dynamic_sampling", float("inf"), ["algorithm.dynamic_sampling: expected a finite number"]),
        ("evaluation.success", float("nan"), ["evaluation.success: expected a finite number"]),
        ("evaluation.reward_weights", [1.0], ["evaluation.reward_weights", "0 functions", "got 1"]),
        ("nonsense.key", 1, ["nonsense", "unknown key"]),
    ],
)
def test_what_is_wrong_is_named_with_its_path_and_a_remedy(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(path, value), "file.toml")
    message = str(caught.value)
    assert message.startswith("file.toml: ")
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("evaluation.samples", 99, ["evaluation.samples", "fleet.max_inflight (64)", "99"]),
        ("fleet.eval_slots", 0, ["fleet.eval_slots", "at least 1 with evaluation.source"]),
    ],
)
def test_an_evaluation_that_the_fleet_has_no_room_for_is_refused(path: str, value: object, words: list[str]) -> None:
    section, _, key = path.partition(".")
    plain: dict[str, Any] = {**GOOD, "evaluation": {"source": "held-out.jsonl"}}
    plain[section] = {**plain.get(section, {}), key: value}
    with pytest.raises(ConfigError) as caught:
        check(plain, "file.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_evaluation_is_sampled_and_scored_like_training_unless_told_otherwise() -> None:
    plain = {**GOOD, "evaluation": {"source": "held-out.jsonl"}, "sampling": {"temperature": 0.7, "max_new_tokens": 33}}
    spec = check(plain, "x")
    assert (spec.evaluation.temperature, spec.evaluation.max_new_tokens, spec.evaluation.top_p) == (0.7, 33, 1.0)
    assert spec.evaluation_environment == spec.environment
    assert spec.evaluation_tasks.source == "held-out.jsonl"
    own = check({**plain, "evaluation": {"source": "h", "rewards": ["e.py:strict"], "temperature": 0}}, "x")
    assert own.evaluation.temperature == 0
    assert own.evaluation_environment.rewards == ["e.py:strict"]
    assert own.user_code == [*spec.environment.rewards, "e.py:strict"], "actors must have it, too"
    assert check(tomllib.loads(render(own)), "printed") == own


def test_an_objectives_defaults_are_filled_in_and_the_others_stay_empty() -> None:
    spec = check(changed("algorithm.objective", "gspo"), "x").algorithm
    assert (spec.clip_low, spec.clip_high, spec.normalisation) == (3e-4, 4e-4, "sequence")
    assert (spec.dual_clip, spec.ratio_max, spec.importance_level) == (None, None, None)
    assert spec.parameters == {"clip_low": 3e-4, "clip_high": 4e-4}


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "distillation"])
def test_every_objective_can_be_configured_by_its_name_alone_and_printed(objective: str) -> None:
    spec = check(changed("algorithm.objective", objective), "x")
    assert check(tomllib.loads(render(spec)), "printed") == spec


def test_dr_grpo_divides_by_the_longest_possible_completion() -> None:
    plain = changed("algorithm.advantage", "dr_grpo")
    assert check(plain, "x").algorithm.normalisation == "constant"
    assert check(plain, "x").algorithm.normalisation_length == 256
    many = plain | {"environment": {"environment": "e.py:E", "max_turns": 3}}
    assert check(many, "x").algorithm.normalisation_length == 768
    assert check(changed("algorithm.normalisation", "token"), "x").algorithm.normalisation_length is None


def test_every_priority_that_can_be_configured_exists() -> None:
    for name in PRIORITIES:
        assert check(changed("algorithm.priority", name), "x").algorithm.priority == name


def test_a_missing_key_is_named_with_its_meaning() -> None:
    with pytest.raises(ConfigError, match=r"run\.model: missing; expected The base model"):
        check({**GOOD, "run": {"name": "r"}}, "x")
    with pytest.raises(ConfigError, match="tasks: missing"):
        check({"run": GOOD["run"]}, "x")


def test_a_file_that_is_none_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="byte 4 is not UTF-8"):
        load(tmp_path / "latin.toml")


def test_fleets_are_named_after_their_model() -> None:
    assert fleet_of("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-135m-instruct"
    assert fleet_of("/models/My Model/") == "my-model"
    assert fleet_of("///") == "fleet"
