"""Optimizer: validation, and schedules against transformers and closed forms."""

import math

import pytest
import torch
from transformers import get_scheduler

from evogrpo.config.optimizer import Optimizer
from evogrpo.safe_parsing import load_yaml

INVALID = """
betas: [{betas: [0.9, 1.0]}, {betas: [-0.1, 0.9]}, {betas: [0.9]}, {betas: [0.9, .nan]},
  {betas: 0.9}, {betas: ab}]
eps: [{eps: 0.0}, {eps: .inf}, {eps: "1e-8"}]
weight_decay: [{weight_decay: -0.1}, {weight_decay: .nan}]
warmup_steps: [{warmup_steps: -1}, {warmup_steps: 1.5}]
schedule: [{schedule: exponential}]
total_steps: [{schedule: linear}, {schedule: linear, total_steps: x}, {total_steps: 10},
  {schedule: cosine, warmup_steps: 5, total_steps: 5}]
floor: [{floor: 0.1}, {schedule: linear, total_steps: 9, floor: 1.0}]
cycles: [{schedule: linear, total_steps: 9, cycles: 1.0},
  {schedule: cosine, total_steps: 9, cycles: 0.0}]
"""


def flatten(table):
    """Yield each value of the lists in a table with its key."""
    for name, row in table.items():
        for each in row:
            yield name, each


@pytest.mark.parametrize(
    ("named", "fields"),
    flatten(load_yaml(INVALID, "settings")),
)
def test_invalid_settings_are_rejected(named, fields):
    with pytest.raises(ValueError, match=named):
        Optimizer(**fields)


def test_betas_may_be_a_list():
    assert Optimizer(betas=[0.8, 0.9]) == Optimizer(betas=(0.8, 0.9))
    assert hash(Optimizer(betas=[0.8, 0.9])) == hash(Optimizer(betas=(0.8, 0.9)))


TRANSFORMERS = [
    ("constant_with_warmup", {}, {"schedule": "constant", "total_steps": None}),
    ("linear", {}, {"schedule": "linear"}),
    ("cosine", {}, {"schedule": "cosine"}),
    ("cosine", {"num_cycles": 1.5}, {"schedule": "cosine", "cycles": 1.5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {"schedule": "cosine", "floor": 0.2}),
    (
        "cosine_with_min_lr",
        {"min_lr": 0.3, "num_cycles": 1},
        {"schedule": "cosine", "floor": 0.1, "cycles": 1.0},
    ),
    ("polynomial", {"lr_end": 0.6}, {"schedule": "linear", "floor": 0.2}),
]


@pytest.mark.parametrize(("name", "scheduler_arguments", "settings"), TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_match_transformers(name, scheduler_arguments, settings, warmup):
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3.0)
    optimizer.defaults["lr"] = 3.0
    scheduler = get_scheduler(
        name, optimizer, warmup, 15, scheduler_specific_kwargs=scheduler_arguments
    )
    settings = Optimizer(**{"warmup_steps": warmup, "total_steps": 15} | settings)
    for step in range(16):
        assert 3.0 * settings.factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_momentum_warmup_makes_all_steps_of_adamw_equally_large(beta):
    weights = torch.zeros(100_000)
    optimizer = torch.optim.AdamW([weights], betas=(beta, 0.999), eps=1e-12, weight_decay=0.0)
    settings = Optimizer(betas=(beta, 0.999))
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        before = weights.clone()
        # Signs are independent.
        weights.grad = torch.randint(0, 2, weights.shape, generator=generator) * 2.0 - 1.0
        optimizer.param_groups[0]["lr"] = settings.momentum_warmup(step)
        optimizer.step()
        size = float((weights - before).square().mean().sqrt())
        assert size == pytest.approx(math.sqrt((1 - beta) / (1 + beta)), rel=0.02)
