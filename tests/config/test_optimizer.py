"""Optimizer: validation, and schedules against transformers and closed forms."""

import dataclasses

import pytest
import torch
from transformers import get_scheduler

from evogrpo.config.hyperparameters import Optimizer


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, float("nan"))}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"betas": "ab"}, "betas"),
        ({"betas": ("a", 0.9)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"eps": "1e-8"}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 1.5}, "warmup_steps"),
        ({"schedule": "exponential"}, "schedule"),
        ({"schedule": "linear"}, "total_steps"),
        ({"schedule": "linear", "total_steps": "x"}, "total_steps"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps"),
        ({"total_steps": 10}, "total_steps"),
        ({"floor": 0.1}, "floor"),
        ({"schedule": "linear", "total_steps": 9, "floor": 1.0}, "floor"),
        ({"schedule": "linear", "total_steps": 9, "cycles": 1.0}, "cycles"),
        ({"schedule": "cosine", "total_steps": 9, "cycles": 0.0}, "cycles"),
    ],
)
def test_invalid_settings_are_rejected(fields, named):
    with pytest.raises(ValueError, match=named):
        Optimizer(**fields)


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Optimizer().eps = 1.0
    with pytest.raises(TypeError):
        Optimizer((0.9, 0.9))


def test_betas_as_a_list():
    assert Optimizer(betas=[0.8, 0.9]) == Optimizer(betas=(0.8, 0.9))
    assert hash(Optimizer(betas=[0.8, 0.9])) == hash(Optimizer(betas=(0.8, 0.9)))


def test_extreme_values_are_accepted():
    Optimizer(betas=(0.0, 0.0), weight_decay=0.0, warmup_steps=3, schedule="linear", total_steps=4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_from_0(schedule):
    optimizer = Optimizer(schedule=schedule, warmup_steps=4, total_steps=None if schedule == "constant" else 20)
    assert [optimizer.factor(step) for step in range(5)] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


TRANSFORMERS = [
    ("constant_with_warmup", {}, {"schedule": "constant", "total_steps": None}),
    ("linear", {}, {"schedule": "linear"}),
    ("cosine", {}, {"schedule": "cosine"}),
    ("cosine", {"num_cycles": 1.5}, {"schedule": "cosine", "cycles": 1.5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {"schedule": "cosine", "floor": 0.2}),
    ("cosine_with_min_lr", {"min_lr": 0.3, "num_cycles": 1}, {"schedule": "cosine", "floor": 0.1, "cycles": 1.0}),
    ("polynomial", {"lr_end": 0.6}, {"schedule": "linear", "floor": 0.2}),
]


@pytest.mark.parametrize(("name", "scheduler_arguments", "settings"), TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_match_transformers(name, scheduler_arguments, settings, warmup):
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3.0)
    optimizer.defaults["lr"] = 3.0
    scheduler = get_scheduler(name, optimizer, warmup, 15, scheduler_specific_kwargs=scheduler_arguments)
    settings = Optimizer(**{"warmup_steps": warmup, "total_steps": 15} | settings)
    for step in range(16):
        assert 3.0 * settings.factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_constant_schedule_is_one():
    for step in (0, 1, 10**6):
        assert Optimizer().factor(step) == 1.0


@pytest.mark.parametrize("warmup", [0, 4])
def test_decays_match_closed_forms_and_stay_at_zero(warmup):
    def factor(schedule, step):
        return Optimizer(schedule=schedule, warmup_steps=warmup, total_steps=warmup + 12).factor(step)

    assert factor("linear", warmup) == factor("cosine", warmup) == 1.0
    assert factor("linear", warmup + 3) == pytest.approx(0.75)
    assert factor("linear", warmup + 6) == pytest.approx(0.5)
    assert factor("cosine", warmup + 6) == pytest.approx(0.5)
    assert factor("cosine", warmup + 4) == pytest.approx(0.75)  # (1 + cos 60°) / 2
    for schedule in ("linear", "cosine"):
        assert factor(schedule, warmup + 12) == pytest.approx(0.0, abs=1e-15)
        assert factor(schedule, warmup + 500) == pytest.approx(0.0, abs=1e-15)
