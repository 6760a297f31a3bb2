"""Clipping and AdamW against PyTorch."""

import math

import pytest
import torch

from evogrpo.functional.optim import clipped_adamw_steps_


def randn(*shape, seed=0):
    # In float64: moments cancel, so rounding in float32 could exceed the tolerance.
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("fused", [False, True])
def test_clipped_steps_match_torch(weight_decay, betas, fused):
    count = 1 if fused else 2
    weights = randn(2, 50)[:count]
    moments = [torch.zeros_like(weights) for _ in range(2)]
    parameters = [torch.nn.Parameter(row.clone()) for row in weights]
    options = {"betas": betas, "weight_decay": weight_decay}
    optimizers = [torch.optim.AdamW([each], eps=1e-6, **options) for each in parameters]
    max_norms = [1.0, 3.0][:count]
    for step in range(1, 11):
        gradients = randn(2, 50, seed=step)[:count] * 10.0 ** (step % 4 - 3)
        gradients[:, :5] = 0.0  # the root of a zero second moment
        lrs = [1e-2 / step, 1e-3 * step][:count]
        for row, (parameter, optimizer) in enumerate(zip(parameters, optimizers, strict=True)):
            parameter.grad = gradients[row].clone()
            torch.nn.utils.clip_grad_norm_([parameter], max_norms[row])
            optimizer.param_groups[0]["lr"] = lrs[row]
            optimizer.step()
        expected = gradients.norm(dim=1).tolist()
        norms = clipped_adamw_steps_(
            weights,
            gradients,
            *moments,
            steps=[step] * count,
            lrs=lrs,
            max_norms=max_norms,
            eps=1e-6,
            fused=fused,
            **options,
        )
        assert norms == pytest.approx(expected)
        for row, parameter in zip(weights, parameters, strict=True):
            torch.testing.assert_close(row, parameter.detach(), rtol=1e-10, atol=1e-12)


def test_rows_without_a_finite_gradient_or_a_learning_rate_keep_weights_and_moments():
    weights = randn(3, 8)
    moments = [randn(3, 8, seed=1), randn(3, 8, seed=2).abs()]
    before = [matrix.clone() for matrix in (weights, *moments)]
    gradients = randn(3, 8, seed=3)
    gradients[0, 2] = math.inf
    norms = clipped_adamw_steps_(
        weights,
        gradients,
        *moments,
        steps=[4, 4, 4],
        lrs=[0.1, None, 0.1],
        max_norms=[1.0] * 3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
    )
    assert [math.isnan(norm) for norm in norms] == [True, True, False]
    for matrix, old in zip((weights, *moments), before, strict=True):
        assert torch.equal(matrix[:2], old[:2])
        assert not torch.equal(matrix[2], old[2])
