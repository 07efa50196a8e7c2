"""Every objective, with its gradient, against a few lines of numpy in float64, and against TRL's own code.

What TRL computed is recorded in `tests/references/trl.json`; `make trl-reference` makes it anew and compares.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional

from broker.runspec import OBJECTIVES as PARAMETERS
from broker.runspec import AlgorithmSection
from learner.logprobs import token_logprobs
from learner.objectives import OBJECTIVES
from learner.objectives.kl import kl
from learner.objectives.loss import Sums, row_loss
from learner.objectives.normalisation import token_weights
from learner.objectives.tokens import Tokens

Array = npt.NDArray[np.float64]

RATIOS = np.array([0.3, 0.55, 0.55, 0.9, 1.0, 1.25, 1.6, 1.6, 4.0, 7.0, 7.0, 0.99])
ADVANTAGES = np.array([-1.0, -1.0, 2.0, 1.0, -0.5, 3.0, 1.5, -1.5, -2.0, 0.7, -0.7, 1.1])
SEQUENCE = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4])
STALENESS = np.array([0, 1, 1, 2, 2, 0, 3, 3, 4, 1, 2, 5])
BEHAVIOUR = np.linspace(-3, -2.2, len(RATIOS))
TEACHER = np.linspace(-1, -4, len(RATIOS))
REFERENCE = np.linspace(-2.5, -1.5, len(RATIOS))
LOGPROBS = BEHAVIOUR + np.log(RATIOS)


def per_sequence(values: Array, how: Any) -> Array:
    return np.array([how(values[sequence == SEQUENCE]) for sequence in SEQUENCE])


def clip(ratio: Array, advantages: Array, low: float, high: float) -> tuple[Array, npt.NDArray[np.bool_]]:
    """-min(r A, clip(r) A), and where its gradient passes."""
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    return loss, np.where(advantages >= 0, ratio <= 1 + high, ratio >= 1 - low)


def by_hand(name: str, p: dict[str, Any]) -> tuple[Array, Array]:
    """Each token's loss and its derivative by the token's own logprob, in float64."""
    r, a = RATIOS, ADVANTAGES
    match name:
        case "importance_sampling":
            return -r * a, -r * a
        case "ppo_clip":
            loss, passes = clip(r, a, p["clip_low"], p["clip_high"])
            bounded = (a < 0) & (r > p["dual_clip"])
            return np.where(bounded, -p["dual_clip"] * a, loss), -r * a * (passes & ~bounded)
        case "dapo":
            loss, passes = clip(r, a, p["clip_low"], p["clip_high"])
            return loss, -r * a * passes
        case "gspo":
            s = np.exp(per_sequence(np.log(r), np.mean))
            loss, passes = clip(s, a, p["clip_low"], p["clip_high"])
            # s depends on every token of the sequence: each gets the mean of all tokens' derivatives
            return loss, per_sequence(-s * a * passes, np.mean)
        case "cispo":
            weight = np.minimum(r, p["ratio_max"])
            return -weight * a * LOGPROBS, -weight * a
        case "decoupled_ppo":
            share = np.where(STALENESS > 0, 1 / np.maximum(STALENESS, 1), 0.0)
            near = share * BEHAVIOUR + (1 - share) * LOGPROBS if p["proximal"] == "interpolated" else LOGPROBS
            weight = np.minimum(np.exp(near - BEHAVIOUR), p["ratio_max"])
            u = np.exp(LOGPROBS - near)
            loss, passes = clip(u, a, p["clip_low"], p["clip_high"])
            return weight * loss, -weight * u * a * passes
        case "truncated_is" | "masked_is":
            c = r if p["importance_level"] == "token" else np.exp(per_sequence(np.log(r), np.sum))
            if name == "truncated_is":
                c = np.minimum(c, p["ratio_max"])
            else:
                c = np.where((c < p["ratio_min"]) | (c > p["ratio_max"]), 0, c)
            return -c * a, -c * a
        case "cross_entropy":
            return -LOGPROBS, -np.ones_like(a)
        case "distillation":
            weight = np.minimum(r, p["ratio_max"]) * (LOGPROBS - TEACHER)
            return weight * LOGPROBS, weight
    raise AssertionError(name)


VARIANTS: list[dict[str, Any]] = [
    *({"objective": name} for name in OBJECTIVES if name != "distillation"),
    {"objective": "distillation", "teacher": "t"},
    {"objective": "ppo_clip", "clip_low": 0.4, "clip_high": 0.1, "dual_clip": 2.0},
    {"objective": "gspo", "clip_low": 0.3, "clip_high": 0.5},
    {"objective": "decoupled_ppo", "proximal": "recomputed"},
    {"objective": "truncated_is", "importance_level": "sequence"},
    {"objective": "masked_is", "importance_level": "sequence", "ratio_min": 0.1, "ratio_max": 6.0},
]
NORMALISATIONS = ["token", "sequence", "constant"]


def tokens(at: Any = slice(None), dtype: torch.dtype = torch.float64) -> Tokens:
    def tensor(values: Array) -> torch.Tensor:
        return torch.from_numpy(values[at]).to(dtype)

    numbers = np.unique(SEQUENCE[at], return_inverse=True)[1]
    return Tokens(
        logprobs=tensor(LOGPROBS).requires_grad_(),
        behaviour=tensor(BEHAVIOUR),
        advantages=tensor(ADVANTAGES),
        staleness=torch.from_numpy(STALENESS[at]),
        sequence=torch.from_numpy(numbers),
        teacher=tensor(TEACHER),
    )


def step_weights(normalisation: str) -> Array:
    counts = np.bincount(SEQUENCE).tolist()
    names = [str(index) for index in range(len(counts))]
    weights: Array = token_weights(counts, names, normalisation, 16)[SEQUENCE]  # type: ignore[arg-type]
    return weights


def close(ours: Any, expected: Any) -> None:
    """Within 1e-6, relative to the largest of the expected values."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(ours), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_objective_equals_its_formula_and_its_gradient(variant: dict[str, Any], normalisation: str) -> None:
    algorithm = AlgorithmSection(**variant, normalisation=normalisation, normalisation_length=16)  # type: ignore[arg-type]
    weights = step_weights(normalisation)
    given = tokens()
    loss, _ = row_loss(given, torch.from_numpy(weights), algorithm)
    loss.backward()  # type: ignore[no-untyped-call]
    values, slopes = by_hand(algorithm.objective, algorithm.parameters)
    assert given.logprobs.grad is not None
    close(loss.item(), (weights * values).sum())
    close(given.logprobs.grad, weights * slopes)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize(
    ("variant", "estimator"),
    [
        (variant, estimator)
        for variant in VARIANTS
        for estimator in ("k1", "k2", "k3")
        if estimator != "k1" or variant["objective"] not in ("cross_entropy", "distillation")
    ],
    ids=str,
)
def test_a_step_is_the_sum_of_its_rows_however_it_is_split(
    variant: dict[str, Any], normalisation: str, estimator: str
) -> None:
    algorithm = AlgorithmSection(
        **variant, normalisation=normalisation, normalisation_length=16, kl_coef=0.3, kl_estimator=estimator  # type: ignore[arg-type]
    )  # fmt: skip
    weights = step_weights(normalisation)
    results = []
    for parts in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[3, 0], [4, 2, 1]]):
        loss, sums, gradient = 0.0, Sums.none(torch.device("cpu")), np.zeros(len(RATIOS))
        for part in parts:
            at = np.flatnonzero(np.isin(SEQUENCE, part))
            given = tokens(at)
            row, more = row_loss(
                given, torch.from_numpy(weights[at]), algorithm, reference=torch.from_numpy(REFERENCE[at])
            )
            row.backward()  # type: ignore[no-untyped-call]
            assert given.logprobs.grad is not None
            gradient[at] = given.logprobs.grad.numpy()
            loss, sums = loss + row.item(), sums + more
        results.append((loss, gradient, sums.ratio.item(), sums.k3.item(), sums.kl.item(), sums.clipped_low.item()))
    for other in results[1:]:
        for ours, whole in zip(other, results[0], strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-12)


def test_weights_make_means_over_tokens_over_sequences_or_over_what_was_possible() -> None:
    counts, names = [3, 1, 0, 2], ["a", "b", "c", "a"]
    np.testing.assert_allclose(token_weights(counts, names, "token", None), [1 / 6] * 4)
    np.testing.assert_allclose(token_weights(counts, names, "sequence", None), [1 / 10, 1 / 2, 0, 1 / 10])
    np.testing.assert_allclose(token_weights(counts, names, "constant", 7), [1 / 14] * 4)
    with pytest.raises(ValueError, match="longest possible"):
        token_weights(counts, names, "constant", None)
    assert token_weights([], [], "token", None).tolist() == []


@pytest.mark.parametrize(
    ("estimator", "value"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: RATIOS * d**2 / 2),
        ("k3", lambda d: RATIOS * (np.exp(-d) - 1 + d)),
    ],
)
def test_kl_estimates_equal_their_formulas(estimator: Any, value: Any) -> None:
    given = tokens()
    estimate = kl(given, torch.from_numpy(REFERENCE), estimator)
    close(estimate.detach(), value(LOGPROBS - REFERENCE))
    if estimator != "k1":
        estimate.sum().backward()  # type: ignore[no-untyped-call]
        assert given.logprobs.grad is not None
        close(given.logprobs.grad, RATIOS * (LOGPROBS - REFERENCE))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_is_added_to_every_tokens_loss(estimator: Any) -> None:
    plain = AlgorithmSection(objective="dapo")
    with_kl = AlgorithmSection(objective="dapo", kl_coef=0.2, kl_estimator=estimator)
    weights, reference = torch.from_numpy(step_weights("token")), torch.from_numpy(REFERENCE)
    alone, _ = row_loss(tokens(), weights, plain, reference=reference)
    both, sums = row_loss(tokens(), weights, with_kl, reference=reference)
    estimate = kl(tokens(), reference, estimator).detach()
    close((both - alone).item(), 0.2 * (weights * estimate).sum().item())
    close(sums.kl.item(), estimate.sum().item())


def test_k1_is_taken_from_the_advantages_and_gives_the_gradient_of_the_kl() -> None:
    algorithm = AlgorithmSection(objective="importance_sampling", kl_coef=0.2, kl_estimator="k1")
    weights, given = step_weights("token"), tokens()
    loss, _ = row_loss(given, torch.from_numpy(weights), algorithm, reference=torch.from_numpy(REFERENCE))
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.logprobs.grad is not None
    close(given.logprobs.grad, -weights * RATIOS * (ADVANTAGES - 0.2 * (LOGPROBS - REFERENCE)))


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Summed over a whole vocabulary with the behaviour's probabilities, the estimate is the exact gradient."""
    torch.manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    behaviour, teacher = torch.randn(2, 9, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)[0]
    zeros = torch.zeros(9, dtype=torch.int64)
    given = Tokens(logprobs, behaviour, torch.zeros(9), zeros, torch.arange(9), teacher)
    algorithm = AlgorithmSection(objective="distillation", teacher="t", ratio_max=1e9)
    loss, _ = row_loss(given, behaviour.exp(), algorithm)
    close(torch.autograd.grad(loss, logits)[0], exact)


def test_distillation_without_a_teacher_says_so() -> None:
    given = Tokens(*(torch.zeros(2) for _ in range(3)), *(torch.zeros(2, dtype=torch.int64) for _ in range(2)))
    with pytest.raises(ValueError, match="teacher"):
        OBJECTIVES["distillation"](given, ratio_max=2.0)


def test_sums_count_what_was_clipped() -> None:
    _, sums = row_loss(tokens(), torch.ones(len(RATIOS), dtype=torch.float64), AlgorithmSection())
    assert sums.clipped_low.item() == 2  # 0.3 and 0.55, punished
    assert sums.clipped_high.item() == 2 + 2  # 1.6 and 7.0, rewarded; 4.0 and 7.0, punished, beyond the dual clip
    assert sums.ratio.item() == pytest.approx(RATIOS.sum())
    assert sums.k1.item() == pytest.approx(-np.log(RATIOS).sum())
    assert sums.k3.item() == pytest.approx((RATIOS - 1 - np.log(RATIOS)).sum())
    assert not sums.k3.requires_grad


def test_the_configuration_knows_each_objectives_parameters() -> None:
    assert PARAMETERS.keys() == OBJECTIVES.keys()
    for name, objective in OBJECTIVES.items():
        taken = {p.name for p in inspect.signature(objective).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert taken == PARAMETERS[name].keys() - {"normalisation", "teacher"}, name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_absurd_ratio_stays_finite(variant: dict[str, Any]) -> None:
    logprobs = torch.tensor([-0.1, -900.0], requires_grad=True)
    behaviour = torch.tensor([-900.0, -0.1])
    given = Tokens(logprobs, behaviour, -torch.ones(2), torch.tensor([0, 2]), torch.tensor([0, 1]), -torch.ones(2))
    loss, sums = row_loss(given, torch.ones(2), AlgorithmSection(**variant))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert torch.isfinite(sums.k3)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


# ---------------------------------------------------------------------------------------------------------------- TRL


def recorded() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "references" / "trl.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("case", recorded()["losses"], ids=lambda case: case["name"])
def test_losses_and_gradients_equal_trls(case: dict[str, Any]) -> None:
    batch = recorded()["batch"]
    mask = np.asarray(batch["mask"], dtype=bool)
    flat = {name: np.asarray(batch[name])[mask] for name in ("logprobs", "behaviour", "reference", "teacher")}
    sequence = np.nonzero(mask)[0]
    algorithm = AlgorithmSection(**case["algorithm"])
    weights = token_weights(
        mask.sum(1).tolist(),
        [str(i) for i in range(len(mask))],
        algorithm.normalisation or "token",
        algorithm.normalisation_length,
    )
    given = Tokens(
        logprobs=torch.from_numpy(flat["logprobs"]).requires_grad_(),
        behaviour=torch.from_numpy(flat["logprobs"] if case["on_policy"] else flat["behaviour"]),
        advantages=torch.from_numpy(np.asarray(batch["advantages"])[sequence]),
        staleness=torch.zeros(len(sequence), dtype=torch.int64),
        sequence=torch.from_numpy(sequence),
        teacher=torch.from_numpy(flat["teacher"]),
    )
    loss, _ = row_loss(
        given, torch.from_numpy(weights[sequence]), algorithm, reference=torch.from_numpy(flat["reference"])
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.logprobs.grad is not None
    close(given.logprobs.grad, np.asarray(case["gradient"])[mask])
    if case["loss"] is not None:
        close(loss.item(), case["loss"])


# ----------------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("at_once", [1 << 24, 100, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_token_logprobs_in_chunks_equal_log_softmax(at_once: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.logprobs.LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=bias).double().requires_grad_(False)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(50, (11,))
    slopes = torch.randn(11, dtype=torch.float64)

    logprobs, entropy = token_logprobs(hidden, head, targets, 0.7)
    (logprobs * slopes).sum().backward()  # type: ignore[no-untyped-call]
    ours = hidden.grad
    hidden.grad = None
    plain = functional.log_softmax(head(hidden) / 0.7, dim=-1)
    (plain.gather(1, targets[:, None])[:, 0] * slopes).sum().backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(logprobs.double(), plain.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(plain.exp() * plain).sum(-1), atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad
    torch.testing.assert_close(ours, hidden.grad, atol=1e-5, rtol=1e-5)
