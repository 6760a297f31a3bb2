"""AdamW and gradient clipping against PyTorch."""

import math

import pytest
import torch

from evogrpo.functional.optim import adamw_step_, clip_by_norm_


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adamw_matches_torch(weight_decay, betas):
    random = torch.Generator().manual_seed(0)
    # In float64: moments cancel, so rounding in float32 could exceed the tolerance.
    weights = torch.randn(50, generator=random, dtype=torch.float64)
    parameter = torch.nn.Parameter(weights.clone())
    exp_avg, exp_avg_sq = (torch.zeros(50, dtype=torch.float64) for _ in range(2))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=betas, eps=1e-6, weight_decay=weight_decay)
    for step in range(1, 11):
        gradient = torch.randn(50, generator=random, dtype=torch.float64) * 10.0 ** (step % 4 - 3)
        gradient[:5] = 0.0  # the root of a zero second moment
        lr = 1e-2 / step
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        adamw_step_(
            weights, gradient, exp_avg, exp_avg_sq, step, lr=lr, betas=betas, eps=1e-6, weight_decay=weight_decay
        )
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-10, atol=1e-12)
    state = optimizer.state[parameter]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 1e6])
@pytest.mark.parametrize("max_norm", [0.5, 3.0])
def test_clipping_matches_torch(scale, max_norm):
    gradient = scale * torch.linspace(-1, 1, 33)
    parameter = torch.nn.Parameter(torch.zeros(33))
    parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    norm = clip_by_norm_(gradient, max_norm)
    assert norm == pytest.approx(float(expected))
    torch.testing.assert_close(gradient, parameter.grad)
    assert float(gradient.norm()) <= max_norm * (1 + 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_of_non_finite_gradient_is_not_finite(bad):
    assert not math.isfinite(clip_by_norm_(torch.tensor([1.0, bad]), 1.0))
