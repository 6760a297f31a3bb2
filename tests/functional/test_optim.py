"""AdamW against PyTorch."""

import pytest
import torch

from evogrpo.functional.optim import adamw_step_


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adamw_matches_torch(weight_decay, betas):
    random = torch.Generator().manual_seed(0)
    # In float64: moments cancel, so rounding in float32 could exceed the tolerance.
    weights = torch.randn(50, generator=random, dtype=torch.float64)
    parameter = torch.nn.Parameter(weights.clone())
    exp_avg, exp_avg_sq = (torch.zeros(50, dtype=torch.float64) for _ in range(2))
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=betas, eps=1e-6, weight_decay=weight_decay
    )
    for step in range(1, 11):
        gradient = torch.randn(50, generator=random, dtype=torch.float64) * 10.0 ** (step % 4 - 3)
        gradient[:5] = 0.0  # the root of a zero second moment
        lr = 1e-2 / step
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        adamw_step_(
            weights,
            gradient,
            exp_avg,
            exp_avg_sq,
            step,
            lr=lr,
            betas=betas,
            eps=1e-6,
            weight_decay=weight_decay,
        )
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-10, atol=1e-12)
    state = optimizer.state[parameter]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-10, atol=1e-12)
