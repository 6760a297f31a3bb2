"""Hyperparameters, their search space, and group sizes of equal cost."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from evogrpo.config.search_space import (
    HyperparameterConfig,
    RLParameter,
    check_group_size,
    feasible_group_sizes,
)
from evogrpo.safe_parsing import load_yaml
from evogrpo.validation import whole_number

INVALID_RANGES = """
- [{}, {min: 1}, {max: 1}, {min: 2, max: 1}, {min: 1, max: 1},
   {min: .nan, max: 1}, {min: 0, max: .inf}]
- [{min: "1e-6", max: 1}, {min: 0, max: 1, scale: log}, {min: 1, max: 2, scale: lgo},
   {min: 1, max: 2, factor: 1.0}]
- [{min: 1, max: 2, factor: .nan}, {min: 1, max: 2, choices: [1, 2]}, {choices: [1, 2], scale: log}]
- [{choices: [1, 2], factor: 2.0}, {choices: [1]}, {choices: []}, {choices: [1, 1]},
   {choices: 4}, {choices: "48"}]
- [{choices: [1, true]}, {choices: [1, .nan]}, {choices: [grpo]}, {choices: [grpo, grpo]},
   {choices: [grpo, 1]}]
- [{choices: [grpo, dapo], scale: log}, {choices: [1, 2], founders: [1, 2]},
   {min: 1, max: 4, founders: [0.5, 2]}]
- [{min: 1, max: 4, founders: [2, 5]}, {min: 1, max: 4, founders: [3, 2]},
   {min: 1, max: 4, founders: [1, 2, 3]}]
"""
INVALID_SPACES = """
- [clip_coef, {min: 0.1, max: 1.5}]
- [lr, {min: 0, max: 1}]
- [group_size, {choices: [1, 2]}]
- [group_size, {min: 2.5, max: 8}]
- [update_epochs, {choices: [1, 1.5]}]
- [lr, {choices: [fast, slow]}]
- [loss_type, {choices: [grpo, ppo]}]
- [loss_type, {choices: [1, 2]}]
- [advantage, {min: 0.1, max: 1}]
- [clip_low, {min: 0.1, max: 1.1}]
- [gamma, {choices: [0.9, 1.1]}]
"""


class TestHyperparameters:
    @pytest.mark.parametrize("name", HYPERPARAMETER_NAMES)
    def test_only_finite_positive_numbers_and_known_names_are_accepted(self, name):
        for value in (float("nan"), float("inf"), -1, True, "1e-4", [1], 1j):
            with pytest.raises(ValueError, match=name):
                Hyperparameters(**{name: value})

    @pytest.mark.parametrize("name", HYPERPARAMETER_NAMES)
    def test_none_is_accepted_where_it_has_a_meaning(self, name):
        if name in (
            "clip_coef",
            "clip_low",
            "clip_high",
            "advantage_clip",
            "target_kl",
            "loss_type",
            "advantage",
        ):
            assert getattr(Hyperparameters(**{name: None}), name) is None
        else:
            with pytest.raises(ValueError, match=name):
                Hyperparameters(**{name: None})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(
                (name, 0)
                for name in (
                    "lr",
                    "clip_coef",
                    "temperature",
                    "update_epochs",
                    "max_grad_norm",
                    "batch_size",
                )
            ),
            ("clip_low", 0),
            ("clip_high", 0),
            ("advantage_clip", 0),
            ("clip_coef", 1),
            ("group_size", 1),
            ("group_size", 4.5),
            ("update_epochs", np.float64(2.5)),
            ("clip_low", 1.01),
            ("gamma", 1.01),
            ("loss_type", "GRPO"),
            ("loss_type", "gdpo"),
            ("advantage", "grpo"),
            ("advantage", 1),
        ],
    )
    def test_values_of_a_wrong_range_or_type_are_refused(self, name, value):
        with pytest.raises(ValueError, match=f"{name} must .*got"):
            Hyperparameters(**{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("beta", 0),
            ("group_size", 2),
            ("update_epochs", 1),
            ("batch_size", 1),
            ("clip_coef", 0.999),
            ("lr", 1e-300),
            ("clip_low", 1),
            ("clip_high", 5),
            ("entropy_coef", 0),
            ("gamma", 0),
            ("gamma", 1),
            ("advantage_clip", 1e-9),
        ],
    )
    def test_values_at_the_bounds_are_accepted(self, name, value):
        assert getattr(Hyperparameters(**{name: value}), name) == value

    @pytest.mark.parametrize("name", ["learning", "loss_type", "task.style"])
    def test_only_numeric_hyperparameters_have_a_number(self, name):
        record = Hyperparameters(loss_type="grpo", task_settings={"task.style": "brief"})
        with pytest.raises(ValueError, match=name):
            record.number(name)

    def test_numpy_scalars_become_plain_numbers(self):
        record = Hyperparameters(lr=np.float32(0.5), group_size=np.int64(4), beta=0)
        assert (type(record.lr), type(record.group_size), type(record.beta)) == (float, int, float)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, (0.3, 0.3)),
            ({"clip_low": 0.1}, (0.1, 0.3)),
            ({"clip_high": 0.5}, (0.3, 0.5)),
            ({"clip_low": 1.0, "clip_high": 4.0}, (1.0, 4.0)),
        ],
    )
    def test_clip_bounds_default_to_clip_coef(self, fields, expected):
        assert Hyperparameters(clip_coef=0.3, **fields).clip_bounds == expected


class TestRLParameter:
    @pytest.mark.parametrize(
        "fields", list(chain.from_iterable(load_yaml(INVALID_RANGES, "ranges")))
    )
    def test_invalid_ranges_and_choices_are_refused(self, fields):
        with pytest.raises(ValueError, match=r"min|max|choices|scale|factor|founders"):
            RLParameter(**fields)

    def test_founders_are_part_of_the_range_and_of_its_json(self):
        parameter = RLParameter(min=1, max=4, founders=[1, 2])
        assert parameter.founders == (1, 2)
        assert RLParameter(**parameter.to_json()) == parameter
        with pytest.raises(ValueError, match="group_size must not set founders"):
            HyperparameterConfig(group_size=RLParameter(min=2, max=8, founders=(2, 4)))

    def test_names_keep_their_order_and_have_no_bounds(self):
        parameter = RLParameter(choices=["sapo", "grpo", "dapo"])
        assert parameter.choices == parameter.names == ("sapo", "grpo", "dapo")
        assert parameter.numbers == ()
        with pytest.raises(ValueError, match="names have no bounds"):
            _ = parameter.bounds
        assert RLParameter(choices=[2, 1]).numbers == (1, 2)
        assert RLParameter(choices=[2, 1]).names == RLParameter(min=1, max=2).names == ()

    @pytest.mark.parametrize(
        "parameter",
        [
            RLParameter(min=1e-6, max=1, scale="log"),
            RLParameter(choices=[2, 4]),
            RLParameter(choices=["sapo", "grpo"]),
        ],
    )
    def test_json_round_trip(self, parameter):
        assert RLParameter(**json.loads(json.dumps(parameter.to_json()))) == parameter


class TestHyperparameterConfig:
    @pytest.mark.parametrize(
        ("name", "parameter"),
        [
            ("lr", 0.1),
            *(
                (name, RLParameter(**fields))
                for name, fields in load_yaml(INVALID_SPACES, "spaces")
            ),
        ],
    )
    def test_bounds_and_choices_must_be_valid_values(self, name, parameter):
        with pytest.raises(ValueError, match=f"{name}"):
            HyperparameterConfig(**{name: parameter})


class TestGroupSizeLadder:
    @given(samples_per_step=st.integers(2, 500))
    def test_feasible_group_sizes_are_the_divisors_from_two(self, samples_per_step):
        ladder = feasible_group_sizes(samples_per_step)
        assert all(size >= 2 and samples_per_step % size == 0 for size in ladder)
        # Divisors are pairs d and n/d, so with 1 the list maps onto itself.
        assert {1, *ladder} == {samples_per_step // size for size in (1, *ladder)}

    @pytest.mark.parametrize("samples_per_step", [1, 0, -4, 8.5, True])
    def test_a_step_without_a_group_is_refused(self, samples_per_step):
        with pytest.raises(ValueError, match="samples_per_step must be"):
            feasible_group_sizes(samples_per_step)

    @pytest.mark.parametrize("samples_per_step", [2, 12, 13, 64])
    def test_exactly_the_feasible_group_sizes_are_accepted(self, samples_per_step):
        for size in range(2, samples_per_step + 3):
            if size in feasible_group_sizes(samples_per_step):
                check_group_size(size, samples_per_step)
            else:
                with pytest.raises(
                    ValueError, match=rf"={samples_per_step},.*got {size} \(member 7\)\. Use "
                ):
                    check_group_size(size, samples_per_step, owner="member 7")

    def test_choices_that_do_not_divide_are_refused(self):
        space = HyperparameterConfig(group_size=RLParameter(choices=[4, 6, 8]))
        with pytest.raises(ValueError, match=r"got \[6\]. Use 2, 4, 8, 16, 32, 64"):
            space.for_samples_per_step(64)

    def test_a_range_becomes_the_divisors_inside_it(self):
        space = HyperparameterConfig(
            lr=RLParameter(min=0.1, max=1), group_size=RLParameter(min=3, max=12)
        )
        resolved = space.for_samples_per_step(24)
        assert resolved["group_size"].choices == (3, 4, 6, 8, 12)
        assert resolved["lr"] == space["lr"]
        assert resolved.for_samples_per_step(24) == resolved

    def test_a_range_without_two_divisors_is_refused(self):
        space = HyperparameterConfig(group_size=RLParameter(min=5, max=8))
        with pytest.raises(ValueError, match=r"got \[8\] in \[5, 8\]"):
            space.for_samples_per_step(64)


@pytest.mark.parametrize("value", [1e4, np.float64(10_000), np.int64(10_000)])
def test_whole_floats_are_integers(value):
    assert whole_number("total_timesteps", value) == 10_000
    assert type(whole_number("total_timesteps", value)) is int
