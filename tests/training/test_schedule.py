"""Validation of schedules."""

import warnings

import pytest

from evogrpo import HyperparameterConfig, RLParameter, evolve
from evogrpo.training.schedule import Schedule
from evogrpo.validation import dump
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import tiny_env, tiny_population


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, "A run needs a limit"),
        ({"target_fitness": 0.5}, "A run needs a limit"),
        ({"generations": 0}, "generations must be at least 1, got 0"),
        ({"generations": 1, "steps_per_generation": 0}, "steps_per_generation must be at least 1"),
        ({"max_timesteps": 0}, "max_timesteps must be at least 1"),
        ({"max_tokens": -1}, "max_tokens must be at least 1"),
        ({"max_seconds": 0.0}, "max_seconds must be above 0"),
        ({"max_seconds": float("nan")}, "max_seconds must be finite"),
        ({"generations": 1, "validation_questions": 1}, "validation_questions must be at least 2, got 1"),
        ({"generations": 1, "test_questions": 1}, "test_questions must be 0 or at least 2, got 1"),
        ({"generations": 1, "test_questions": -1}, "test_questions must be at least 0"),
        ({"generations": 1, "samples_per_step": 1}, "samples_per_step must be at least 2"),
    ],
)
def test_invalid_schedules_are_refused(fields, rule):
    with pytest.raises(ValueError, match=rule):
        Schedule(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"generations": 3}, {"max_timesteps": 5}, {"max_tokens": 10}, {"max_seconds": 0.5, "test_questions": 0}],
)
def test_one_limit_suffices_and_schedules_round_trip(fields):
    schedule = Schedule(**fields)
    assert Schedule(**dump(schedule)) == schedule


@pytest.mark.parametrize(
    ("group_size", "space", "expected"),
    [
        (8, {}, 4),
        (8, {"group_size": RLParameter(choices=[4, 16])}, 8),
        (2, {"group_size": RLParameter(choices=[4, 16])}, 16),  # a member outside the search space counts
        (8, {"group_size": RLParameter(min=3, max=20)}, 8),  # 4 is the smallest divisor of 32 in the range
    ],
)
def test_the_block_holds_the_questions_of_the_smallest_group_size(group_size, space, expected):
    hp_config = HyperparameterConfig(**space) if space else None
    population = tiny_population(2, group_size=4, hp_config=hp_config, samples_per_step=32)
    population[0].group_size, population[1].group_size = group_size, 16
    assert Schedule(generations=1, samples_per_step=32).block(population) == expected


def test_group_sizes_must_divide_the_samples():
    population = tiny_population(2, group_size=4)
    population[1].group_size = 6
    with pytest.raises(ValueError, match=r"got 6 \(member 1\): use one of 2, 4, 8, 16, 32"):
        Schedule(generations=1, samples_per_step=32).block(population)
    population = tiny_population(
        2, group_size=4, hp_config=HyperparameterConfig(group_size=RLParameter(choices=[4, 5]))
    )
    population[0].group_size = population[1].group_size = 4
    with pytest.raises(ValueError, match=r"every choice of group_size must divide samples_per_step=32, got \[5\]"):
        Schedule(generations=1, samples_per_step=32).block(population)


CLIP = {"clip_coef": RLParameter(min=0.1, max=0.3)}


@pytest.mark.parametrize(
    ("options", "space", "neutral"),
    [
        ({}, CLIP, True),
        ({"batch_size": 64}, CLIP, True),
        ({"batch_size": 63}, CLIP, False),
        ({"update_epochs": 2}, CLIP, False),
        ({}, CLIP | {"update_epochs": RLParameter(choices=[1, 2])}, False),
        ({}, CLIP | {"batch_size": RLParameter(choices=[32, 64])}, False),
        ({}, CLIP | {"batch_size": RLParameter(choices=[64, 128])}, True),
        ({}, {"lr": RLParameter(min=1e-4, max=1e-3)}, False),
    ],
)
def test_an_evolving_clip_that_never_binds_warns(options, space, neutral):
    population = tiny_population(2, hp_config=HyperparameterConfig(**space), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Schedule(generations=1, samples_per_step=64).warn_neutral(population, shared=False)
    assert sum(str(warning.message).startswith("clip_coef evolves") for warning in caught) == neutral
    with warnings.catch_warnings():  # shared samples come from other policies, so that ratios differ from 1
        warnings.filterwarnings("error", message="clip_coef evolves")
        warnings.filterwarnings("ignore", message="batch_size evolves")
        Schedule(generations=1, samples_per_step=64).warn_neutral(population, shared=True)


def test_all_ineffective_hyperparameters_are_in_one_warning():
    space = HyperparameterConfig(batch_size=RLParameter(choices=[64, 128]), **CLIP)
    population = tiny_population(2, hp_config=space)
    with pytest.warns(UserWarning, match="evolves without effect") as caught:
        Schedule(generations=1, samples_per_step=64).warn_neutral(population, shared=False)
    assert [str(warning.message).split()[0] for warning in caught] == ["clip_coef", "batch_size"]


def test_unknown_arguments_of_evolve_are_refused():
    with pytest.raises(ValueError, match="did you mean 'generations'"):
        evolve(tiny_population(2), tiny_env(), generation=3)


@pytest.mark.parametrize(("split", "remedy"), [("validation", "validation_size"), ("test", "or give test_questions=0")])
def test_one_held_out_start_is_refused(split, remedy):
    env = cart_pole(**{"validation_size": 2, "test_size": 2} | {f"{split}_size": 1})
    with pytest.raises(ValueError, match=f"the {split} split must hold at least 2 starts, got 1: .*{remedy}"):
        evolve(step_population(2, env), env, generations=1)
    if split == "test":
        evolve(step_population(2, env), env, generations=1, test_questions=0)


def test_explicit_sizes_beyond_the_held_out_questions_warn():
    env = cart_pole(validation_size=4, test_size=2)
    with pytest.warns(UserWarning, match="validation_questions=5, but the validation split has 4: "):
        evolve(step_population(2, env), env, generations=1, validation_questions=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evolve(step_population(2, env), env, generations=1, validation_questions=4, test_questions=2)
