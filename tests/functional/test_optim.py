"""AdamW, gradient clipping and schedules against PyTorch and closed forms."""

import math

import pytest
import torch
from transformers import get_scheduler

from evogrpo.functional.optim import adamw_step_, clip_by_norm_, schedule_factor


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_ten_adamw_steps_equal_pytorchs(weight_decay, betas):
    random = torch.Generator().manual_seed(0)
    # In float64, whose rounding nobody could take for an error: moments cancel, and are near 0 after sums near 1.
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
def test_clipping_equals_pytorchs(scale, max_norm):
    gradient = scale * torch.linspace(-1, 1, 33)
    parameter = torch.nn.Parameter(torch.zeros(33))
    parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    norm = clip_by_norm_(gradient, max_norm)
    assert norm == pytest.approx(float(expected))
    torch.testing.assert_close(gradient, parameter.grad)
    assert float(gradient.norm()) <= max_norm * (1 + 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_a_norm_that_is_not_finite(bad):
    assert not math.isfinite(clip_by_norm_(torch.tensor([1.0, bad]), 1.0))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_linearly_from_0(kind):
    factors = [schedule_factor(step, kind=kind, warmup_steps=4, total_steps=20) for step in range(5)]
    assert factors == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


TRANSFORMERS = [
    ("constant_with_warmup", {}, {"kind": "constant"}),
    ("linear", {}, {"kind": "linear"}),
    ("cosine", {}, {"kind": "cosine"}),
    ("cosine", {"num_cycles": 1.5}, {"kind": "cosine", "cycles": 1.5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {"kind": "cosine", "floor": 0.2}),
    ("cosine_with_min_lr", {"min_lr": 0.3, "num_cycles": 1}, {"kind": "cosine", "floor": 0.1, "cycles": 1.0}),
    ("polynomial", {"lr_end": 0.6}, {"kind": "linear", "floor": 0.2}),
]


@pytest.mark.parametrize(("name", "given", "own"), TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_every_step_of_a_schedule_is_that_of_transformers(name, given, own, warmup):
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3.0)
    optimizer.defaults["lr"] = 3.0
    scheduler = get_scheduler(name, optimizer, warmup, 15, scheduler_specific_kwargs=given)
    for step in range(16):
        factor = schedule_factor(step, warmup_steps=warmup, total_steps=15, **own)
        assert 3.0 * factor == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_without_a_warm_up_a_constant_schedule_is_one_for_ever():
    for step in (0, 1, 10**6):
        assert schedule_factor(step, kind="constant", warmup_steps=0, total_steps=None) == 1.0


@pytest.mark.parametrize("warmup", [0, 4])
def test_decays_pass_through_their_closed_forms_and_stay_at_zero(warmup):
    def factor(kind, step):
        return schedule_factor(step, kind=kind, warmup_steps=warmup, total_steps=warmup + 12)

    assert factor("linear", warmup) == factor("cosine", warmup) == 1.0
    assert factor("linear", warmup + 3) == pytest.approx(0.75)
    assert factor("linear", warmup + 6) == pytest.approx(0.5)
    assert factor("cosine", warmup + 6) == pytest.approx(0.5)
    assert factor("cosine", warmup + 4) == pytest.approx(0.75)  # (1 + cos 60°) / 2
    for kind in ("linear", "cosine"):
        assert factor(kind, warmup + 12) == pytest.approx(0.0, abs=1e-15)
        assert factor(kind, warmup + 500) == pytest.approx(0.0, abs=1e-15)
