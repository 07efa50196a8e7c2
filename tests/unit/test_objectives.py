"""The clipped surrogate and its metrics against a few lines of float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from learner.logprobs import token_logprobs
from learner.objectives.ppo_clip import ClipSums, ppo_clip

RATIOS = np.array([0.5, 0.5, 0.9, 1.0, 1.25, 1.6, 1.6])
ADVANTAGES = np.array([-1.0, 2.0, 1.0, -0.5, 3.0, 1.5, -1.5])
WEIGHTS = np.array([1.0, 1.0, 0.5, 1.0, 2.0, 1.0, 1.0])


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    behaviour = torch.linspace(-3, -0.5, len(RATIOS), dtype=torch.float64)
    logprobs = (behaviour + torch.from_numpy(np.log(RATIOS))).requires_grad_()
    return logprobs, behaviour, torch.from_numpy(ADVANTAGES), torch.from_numpy(WEIGHTS)


def test_ppo_clip_equals_the_formula_and_its_gradient() -> None:
    logprobs, behaviour, advantages, weights = inputs()
    loss, sums = ppo_clip(logprobs, behaviour, advantages, weights, clip_low=0.2, clip_high=0.28, step_tokens=10)
    loss.backward()  # type: ignore[no-untyped-call]

    clipped = np.clip(RATIOS, 0.8, 1.28)
    surrogate = np.minimum(RATIOS * ADVANTAGES, clipped * ADVANTAGES)
    assert loss.item() == pytest.approx(-(WEIGHTS * surrogate).sum() / 10)
    # Clipped away: ratio 0.5 with a negative advantage, ratio 1.6 with a positive one.
    passes = np.array([0, 1, 1, 1, 1, 0, 1])
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), -WEIGHTS * passes * RATIOS * ADVANTAGES / 10, rtol=1e-12)

    assert sums.ratio.item() == pytest.approx(RATIOS.sum())
    assert sums.clipped_low.item() == 1
    assert sums.clipped_high.item() == 1
    assert sums.k1.item() == pytest.approx(-np.log(RATIOS).sum())
    assert sums.k3.item() == pytest.approx((RATIOS - 1 - np.log(RATIOS)).sum())
    assert not sums.k3.requires_grad


def test_the_loss_of_a_step_does_not_depend_on_how_it_is_split() -> None:
    whole = inputs()
    loss, sums = ppo_clip(*whole, clip_low=0.2, clip_high=0.28, step_tokens=7)
    total, added = torch.zeros(()), ClipSums.none(torch.device("cpu"))
    for part in (slice(0, 3), slice(3, 7)):
        piece, more = ppo_clip(*(each[part] for each in whole), clip_low=0.2, clip_high=0.28, step_tokens=7)
        total = total + piece
        added += more
    assert total.item() == pytest.approx(loss.item())
    assert added.k3.item() == pytest.approx(sums.k3.item())


def test_an_absurd_ratio_stays_finite() -> None:
    logprobs = torch.tensor([-0.1, -900.0], requires_grad=True)
    behaviour = torch.tensor([-900.0, -0.1])
    ones = torch.ones(2)
    loss, sums = ppo_clip(logprobs, behaviour, -ones, ones, clip_low=0.2, clip_high=0.28, step_tokens=2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert torch.isfinite(sums.k3)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


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
