"""Reward functions written for TRL work unchanged, and what they get wrong is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.calls import EpisodeError
from actors.rewards import RewardFunction, Rewards, Score, load_rewards
from broker.errors import ConfigError, UserCodeError
from broker.runspec import EnvironmentSection

EXAMPLES = Path(__file__).parents[2] / "examples"


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


async def score(*functions: Callable[..., Any], completions: Any = None, **columns: Any) -> list[Score | EpisodeError]:
    completions = said("a", "bb") if completions is None else completions
    rewards = Rewards(tuple(RewardFunction(function.__name__, function) for function in functions))
    return await rewards.score(
        prompts=[[{"role": "user", "content": "q"}]] * len(completions),
        completions=completions,
        completion_ids=[[5, 2]] * len(completions),
        columns={"prompt": "q", **columns},
    )


async def test_a_sum_that_overflows_fails_its_own_episode_only() -> None:
    def huge(completions: Any, **columns: Any) -> list[float]:
        return [1e308, 1.0]

    failed, good = await score(huge, huge)
    assert isinstance(failed, EpisodeError)
    assert "weighted sum" in str(failed)
    assert isinstance(good, Score)


def values(scores: list[Score | EpisodeError]) -> list[float]:
    assert all(isinstance(score, Score) for score in scores)
    return [score.reward for score in scores if isinstance(score, Score)]


async def test_functions_as_trl_documents_them_work_unchanged() -> None:
    def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        assert set(kwargs) == {"prompts", "completions", "answer", "level"}
        return [float(len(ids)) for ids in completion_ids]

    def format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    def answer_reward(prompts: Any, completions: Any, answer: list[str]) -> list[float]:
        assert prompts[0][-1]["content"] == "q"
        return [
            1.0 if completion[0]["content"] == wanted else 0.0
            for completion, wanted in zip(completions, answer, strict=True)
        ]

    scores = await score(length_reward, format_reward, answer_reward, answer="bb", level=3)
    assert values(scores) == [3.0, 5.0]
    assert isinstance(scores[1], Score)
    assert scores[1].parts == {"length_reward": 2.0, "format_reward": 2.0, "answer_reward": 1.0}


async def test_a_string_prompts_completions_are_strings() -> None:
    def length(completions: list[str], **columns: Any) -> list[float]:
        return [len(completion) for completion in completions]

    assert values(await score(length, completions=["abc", ""])) == [3.0, 0.0]


async def test_async_functions_and_array_results_are_taken() -> None:
    async def slow(completions: Any, **columns: Any) -> Any:
        return np.asarray([0.5, 1.0], dtype=np.float32)

    def numbers(completions: Any) -> Any:
        return (np.float64(1), True)

    assert values(await score(slow, numbers)) == [1.5, 2.0]


async def test_none_means_that_the_function_does_not_apply() -> None:
    def sometimes(completions: Any, **columns: Any) -> Any:
        return [None, 2.0]

    scores = await score(sometimes)
    assert scores == [Score(0.0, {}), Score(2.0, {"sometimes": 2.0})]


async def test_rewards_are_summed_by_weight() -> None:
    section = EnvironmentSection(rewards=["addition.py:reward"] * 2, reward_weights=[2.0, -0.5])
    rewards = load_rewards(section, [EXAMPLES])
    scores = await rewards.score(
        prompts=["q"] * 2, completions=said("It is 42.", "7"), completion_ids=[[1]] * 2, columns={"answer": 42}
    )
    assert scores == [
        Score(1.5, {"reward": 1.0, "addition.py:reward": 1.0}),
        Score(0.0, {"reward": 0.0, "addition.py:reward": 0.0}),
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 10**400, "high", [1.0], np.ones(2)])
async def test_a_bad_value_fails_its_own_episode_only(bad: object) -> None:
    def reward(completions: Any, **columns: Any) -> list[Any]:
        return [1.0, bad]

    good, failed = await score(reward)
    assert good == Score(1.0, {"reward": 1.0})
    assert isinstance(failed, EpisodeError)
    assert failed.category == "reward"
    assert "expected a finite number" in str(failed)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0] * 3, "returned 3 values for 2 completions"),
        (0.5, "returned float; expected a list"),
        (None, "returned NoneType; expected a list"),
        ("ab", "returned str; expected a list"),
        ({"a": 1.0, "b": 2.0}, "returned dict; expected a list"),
    ],
)
async def test_anything_but_one_value_each_fails_the_group(returned: object, told: str) -> None:
    def reward(completions: Any, **columns: Any) -> object:
        return returned

    with pytest.raises(EpisodeError, match=told) as failure:
        await score(reward)
    assert failure.value.category == "reward"


async def test_a_function_that_raises_fails_the_group_and_says_where() -> None:
    def reward(completions: Any, **columns: Any) -> list[float]:
        raise KeyError("solution")

    with pytest.raises(EpisodeError, match=r"reward raised KeyError: 'solution' \(.*test_rewards\.py:\d+\)") as failure:
        await score(reward)
    assert failure.value.category == "reward"
    assert not failure.value.retryable


async def test_a_column_that_the_task_lacks_is_named() -> None:
    def reward(completions: Any, solution: Any) -> list[float]:
        return [0.0] * 2

    with pytest.raises(EpisodeError, match=r"solution, but the task has no such column.*answer"):
        await score(reward, answer=1)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("reward = 1.0", "to be a function, got float"),
        ("class reward: ...", "to be a function, got type"),
        ("def reward(replies): ...", "takes no argument named `completions`"),
    ],
)
def test_what_cannot_be_a_reward_is_refused_at_load(tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "code.py").write_text(source)
    with pytest.raises(UserCodeError, match=told):
        load_rewards(EnvironmentSection(rewards=["code.py:reward"]), [tmp_path])


def test_weights_that_do_not_fit_the_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward_weights: expected one weight per reward function \(1\), got 2"):
        load_rewards(EnvironmentSection(rewards=["addition.py:reward"], reward_weights=[1.0, 2.0]), [EXAMPLES])
