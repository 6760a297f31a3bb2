"""Optimizer refuses what makes no sense and keeps what does."""

import dataclasses

import pytest

from evogrpo.config.optimizer import Optimizer


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, float("nan"))}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"schedule": "exponential"}, "schedule"),
        ({"schedule": "linear"}, "total_steps"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps"),
        ({"total_steps": 10}, "total_steps"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": "ab"}, "betas must be two numbers"),
        ({"betas": ("a", 0.9)}, "each of betas must be a number"),
        ({"eps": "1e-8"}, "eps must be a number"),
        ({"schedule": "linear", "total_steps": "x"}, "total_steps must be an integer"),
        ({"floor": 0.1}, "floor.*constant"),
        ({"schedule": "linear", "total_steps": 9, "floor": 1.0}, r"floor must lie in \[0, 1\)"),
        ({"schedule": "linear", "total_steps": 9, "cycles": 1.0}, "cycles.*linear"),
        ({"schedule": "cosine", "total_steps": 9, "cycles": 0.0}, "cycles must be above 0"),
    ],
)
def test_an_optimizer_that_makes_no_sense_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        Optimizer(**fields)


def test_the_record_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Optimizer().eps = 1.0
    with pytest.raises(TypeError):
        Optimizer((0.9, 0.9))


def test_betas_may_come_as_a_list():
    assert Optimizer(betas=[0.8, 0.9]) == Optimizer(betas=(0.8, 0.9))
    assert hash(Optimizer(betas=[0.8, 0.9])) == hash(Optimizer(betas=(0.8, 0.9)))


def test_extremes_that_make_sense_are_kept():
    Optimizer(betas=(0.0, 0.0), weight_decay=0.0, warmup_steps=3, schedule="linear", total_steps=4)
