"""The probe, made by a real policy and judged on numbers: each way of being wrong is told apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from broker.errors import MalformedMessage
from broker.messages import Floats, Ids, decode
from broker.probe import Probe, verdict
from broker.runspec import LoraSection, OptimizerSection
from learner.model import Policy
from learner.probe import make_probe


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return Policy(tiny_model, model_name="tiny", lora=LoraSection(), optimizer=OptimizerSection(), temperature=0.7)


@pytest.fixture(scope="module")
def made(policy: Policy) -> tuple[bytes, Probe]:
    return make_probe(policy, run="r", tolerance=1e-3, seed=3)


Sampled = list[tuple[Ids, Floats]]


def sampled(policy: Policy, probe: Probe, adapter: bytes | None, *, temperature: float = 1.0) -> Sampled:
    """What an engine that computes like `policy` answers; `temperature` is what it forgot to apply."""
    table = policy.next_logprobs(probe.prompt_ids, adapter) * temperature
    tokens = np.random.default_rng(0).integers(0, table.shape[1], len(table)).astype(np.int32)
    return [(tokens[row : row + 1], table[row, tokens[row : row + 1]]) for row in range(len(table))]


def test_a_probe_survives_the_wire_and_an_honest_engine_passes(policy: Policy, made: tuple[bytes, Probe]) -> None:
    adapter, probe = made
    probe = decode(probe.encode(), Probe)
    assert verdict(probe, sampled(policy, probe, None), sampled(policy, probe, adapter)) is None
    assert probe.temperature == 0.7
    difference = np.abs(probe.table(probe.base) - probe.table(probe.adapted)).mean(axis=1)
    assert difference.min() >= 1.0, "whoever does not apply it is far off"


@pytest.mark.parametrize("tolerance", [0.15, 1.0, 1e9])
def test_a_wide_bound_on_the_mean_leaves_a_probe_that_can_be_made_and_told(policy: Policy, tolerance: float) -> None:
    adapter, probe = make_probe(policy, run="r", tolerance=tolerance, seed=3)
    assert verdict(probe, sampled(policy, probe, None), sampled(policy, probe, adapter)) is None
    assert verdict(probe, sampled(policy, probe, None), sampled(policy, probe, None)) is not None


def test_making_a_probe_leaves_the_policy_as_it_was(policy: Policy) -> None:
    weights, random = policy.adapter_bytes(), torch.get_rng_state()
    first = make_probe(policy, run="r", tolerance=1e-3, seed=3)
    assert policy.adapter_bytes() == weights
    assert torch.equal(torch.get_rng_state(), random)
    again = make_probe(policy, run="r", tolerance=1e-3, seed=3)
    assert first[0] == again[0], "the same weights whoever makes them"
    assert first[0] != make_probe(policy, run="r", tolerance=1e-3, seed=4)[0]


def test_each_way_of_being_wrong_is_told_apart(policy: Policy, made: tuple[bytes, Probe]) -> None:
    adapter, probe = made
    base, adapted = sampled(policy, probe, None), sampled(policy, probe, adapter)
    assert "serves the base model in an adapter's name" in str(verdict(probe, base, base))
    assert "base model is not the learner's" in str(verdict(probe, adapted, adapted))
    raw = sampled(policy, probe, None, temperature=0.7)
    assert "temperature 0.7" in str(verdict(probe, raw, adapted))
    half = sampled(policy, probe, policy.random_adapter_bytes(0.01, 3))
    assert "misreads" in str(verdict(probe, base, half))


@pytest.mark.parametrize("strange", [([999_999], [-1.0]), ([-1], [-1.0]), ([], []), ([1], [float("nan")])])
def test_an_answer_that_is_none_fails(
    policy: Policy, made: tuple[bytes, Probe], strange: tuple[list[int], list[float]]
) -> None:
    adapter, probe = made
    base, adapted = sampled(policy, probe, None), sampled(policy, probe, adapter)
    base[2] = (np.asarray(strange[0], np.int32), np.asarray(strange[1], np.float32))
    assert verdict(probe, base, adapted) is not None


def test_a_table_that_does_not_fit_its_prompts_is_malformed(made: tuple[bytes, Probe]) -> None:
    _, probe = made
    with pytest.raises(MalformedMessage):
        probe.table(probe.base[:-4])
