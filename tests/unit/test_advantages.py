"""Group-normalised advantages against values worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.advantages import Advantage, group_advantages, has_signal
from learner.shaping import overlong_punishment

TRL: dict[str, Any] = json.loads((Path(__file__).parents[1] / "references" / "trl.json").read_text())


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 1/4; squared deviations 3 * 1/16 + 9/16 = 3/4, over n - 1 = 3: variance 1/4, std 1/2
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4)
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], "grpo"), expected, rtol=1e-12)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    np.testing.assert_allclose(group_advantages([3, 1, 2, 0], "dr_grpo"), [1.5, -0.5, 0.5, -1.5])


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(group_advantages([3, 1, 2, 0], "rloo"), [3 - 1, 1 - 5 / 3, 2 - 4 / 3, 0 - 2])


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "dr_grpo", "rloo"])
def test_advantages_equal_trls(kind: Advantage) -> None:
    rewards = np.asarray(TRL["batch"]["rewards"]).reshape(2, 3)
    ours = np.concatenate([group_advantages(group.tolist(), kind) for group in rewards])
    # TRL computes them in float32
    np.testing.assert_allclose(ours, TRL["advantages"][kind], rtol=1e-6, atol=1e-6)


def test_overlong_punishment_equals_trls() -> None:
    case = TRL["overlong"]
    for penalty in (1.0, 0.3):
        ours = [
            overlong_punishment(n, longest=case["longest"], buffer=case["buffer"], penalty=penalty)
            for n in case["lengths"]
        ]
        np.testing.assert_allclose(ours, penalty * np.asarray(case["punishment"]), rtol=1e-12)
    assert overlong_punishment(1000, longest=100, buffer=20, penalty=0.5) == -0.5
    assert overlong_punishment(100, longest=100, buffer=0, penalty=1.0) == 0.0


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.5] * 8, [0.1 + 0.2, 0.3], [7.0], []])
def test_a_group_without_variance_teaches_nothing(kind: str, rewards: list[float]) -> None:
    assert not has_signal(rewards)
    assert group_advantages(rewards, kind).tolist() == [0.0] * len(rewards)  # type: ignore[arg-type]


def test_rewards_that_differ_have_a_signal_at_any_scale() -> None:
    assert has_signal([0, 1])
    assert has_signal([1e-6, 0])
    assert has_signal([1000, 1000.001])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, bad], "grpo")
