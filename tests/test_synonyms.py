"""Names of TRL, AgileRL and Stable-Baselines3 are refused with the name of this library."""

import inspect
import pydoc

import pytest

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HuggingFaceGym,
    HyperparameterConfig,
    Hyperparameters,
    MultiAgentGRPO,
    Objective,
    RLParameter,
    Tournament,
    evolve,
    resume,
    train,
)
from evogrpo.algorithms.factory import Options
from evogrpo.evolution.strategies import BUILT_IN, Narrowing
from evogrpo.synonyms import unknown_name_error
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.schedule import Schedule

AGENT = list(Options.__annotations__)
SCHEDULE = [*Schedule.__dataclass_fields__, "run_dir", "checkpoint_steps", "keep_checkpoints", "strategy", "progress"]
GYM = list(inspect.signature(GymnasiumGroups).parameters)
QUESTIONS_GYM = list(inspect.signature(HuggingFaceGym).parameters)
OBJECTIVE = list(Objective.__dataclass_fields__)
RIGHT = [
    (AGENT, "learning_rate", "lr"),
    (AGENT, "epsilon", "clip_coef"),
    (AGENT, "clip_range", "clip_coef"),
    (AGENT, "epsilon_high", "clip_high"),
    (AGENT, "num_generations", "group_size"),
    (AGENT, "kl_coef", "beta"),
    (AGENT, "num_iterations", "update_epochs"),
    (AGENT, "n_epochs", "update_epochs"),
    (AGENT, "per_device_train_batch_size", "batch_size"),
    (AGENT, "ent_coef", "entropy_coef"),
    (AGENT, "max_completion_length", "max_output_tokens"),
    (AGENT, "max_new_tokens", "max_output_tokens"),
    (AGENT, "peft_config", "lora_config"),
    (AGENT, "net_arch", "network"),
    (AGENT, "discount", "gamma"),
    (AGENT, "grad_clip", "max_grad_norm"),
    (SCHEDULE, "output_dir", "run_dir"),
    (SCHEDULE, "tensorboard_log", "run_dir"),
    (SCHEDULE, "save_steps", "checkpoint_steps"),
    (SCHEDULE, "save_total_limit", "keep_checkpoints"),
    (SCHEDULE, "total_timesteps", "max_timesteps"),
    (SCHEDULE, "evo_steps", "steps_per_generation"),
    (SCHEDULE, "generation_batch_size", "samples_per_step"),
    (SCHEDULE, "reward_threshold", "target_fitness"),
    (SCHEDULE, "verbose", "progress"),
    (OBJECTIVE, "mask_truncated_completions", "mask_truncated"),
    (list(BUILT_IN), "pbt", "truncation_pbt"),
    (list(BUILT_IN), "asha", "successive_halving"),
    (list(BUILT_IN), "torunament", "tournament"),
    (AGENT, "groupsize", "group_size"),
    (AGENT, "loss", "loss_type"),
    (OBJECTIVE, "loss", "loss_type"),
    (SCHEDULE, "timeout", "max_seconds"),
    (SCHEDULE, "time_budget_s", "max_seconds"),
    (SCHEDULE, "target_reward", "target_fitness"),
    (SCHEDULE, "scheduler", "strategy"),
    (GYM, "env_wrapper", "wrappers"),
    (QUESTIONS_GYM, "eval_dataset", "validation_dataset"),
    (QUESTIONS_GYM, "processing_class", "tokenizer"),
    (["prompts", "n", "max_output_tokens"], "num_return_sequences", "n"),
    (["prompts", "n", "max_output_tokens"], "max_tokens", "max_output_tokens"),
    (["train", "validation", "test"], "val", "validation"),
    (["float32", "bfloat16", "nf4"], "bf16", "bfloat16"),
    (["float32", "bfloat16", "nf4"], "int4", "nf4"),
    (["dataset", "reward", "form"], "reward_funcs", "reward"),
]


@pytest.mark.parametrize(("valid", "typed", "name"), RIGHT)
def test_names_of_other_libraries_are_translated(valid, typed, name):
    assert f"{name!r}" in str(unknown_name_error("argument", typed, valid))


@pytest.mark.parametrize(
    "typed",
    [
        *("wandb_project", "foo", "reward_model", "trainer", "x", "generation_kwargs", "num_generations_eval", "state"),
        *("resume_from_checkpoint", "checkpoint_path", "sapo_temperature_pos", "overwrite_checkpoints", "wrap"),
    ],
)
def test_dissimilar_names_get_no_suggestion(typed):
    for names in (AGENT, SCHEDULE, OBJECTIVE):
        assert "did you mean" not in str(unknown_name_error("argument", typed, names))


@pytest.mark.parametrize("typed", ["sise", "siez", "szie", "siize", "sie", "ize", "size_"])
def test_typing_errors_get_a_suggestion(typed):
    assert "did you mean 'size'" in str(unknown_name_error("argument", typed, ["size", "seed", "beta"]))


class Float:
    """As optuna.distributions.FloatDistribution."""

    low, high, log = 1e-5, 1e-3, True


class Categorical:
    """As optuna.distributions.CategoricalDistribution."""

    choices = ("grpo", "dapo")


def test_search_spaces_accept_pairs_lists_and_optuna_distributions():
    space = HyperparameterConfig(
        lr=(1e-5, 1e-3), clip_low=Float(), gamma=(0.9, 1.0), group_size=[4, 8], loss_type=Categorical()
    )
    assert space == HyperparameterConfig(
        lr=RLParameter(min=1e-5, max=1e-3, scale="log"),
        clip_low=RLParameter(min=1e-5, max=1e-3, scale="log"),
        gamma=RLParameter(min=0.9, max=1.0),
        group_size=RLParameter(choices=[4, 8]),
        loss_type=RLParameter(choices=["grpo", "dapo"]),
    )


def test_optuna_distributions_are_ranges():
    distributions = pytest.importorskip("optuna").distributions
    space = HyperparameterConfig(
        lr=distributions.FloatDistribution(1e-5, 1e-3, log=True),
        update_epochs=distributions.IntDistribution(1, 4),
        group_size=distributions.CategoricalDistribution([4, 8]),
    )
    assert (space["lr"].scale, space["update_epochs"].max, space["group_size"].choices) == ("log", 4, (4, 8))


@pytest.mark.parametrize("value", [1e-4, (1e-4,), (1, 2, 3), "1e-4", {"min": 1, "maxx": 2}, None])
def test_invalid_search_spaces_are_refused(value):
    with pytest.raises(ValueError, match="lr"):
        HyperparameterConfig(lr=value)


@pytest.mark.parametrize("given", ["narrowing", Narrowing, Narrowing()])
def test_strategies_are_names_classes_or_objects(given):
    env = GymnasiumGroups("CartPole-v1", validation_size=2, test_size=2)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    population = GRPO.population(2, **spaces, group_size=4, hp_config=HyperparameterConfig(lr=(1e-4, 1e-2)))
    schedule = {"generations": 1, "steps_per_generation": 1, "samples_per_step": 4, "test_questions": 0}
    run = evolve(population, env, strategy=given, **schedule)
    assert isinstance(run.trainer.strategy, Narrowing)


def test_unknown_strategies_are_refused_with_a_suggestion():
    env = GymnasiumGroups("CartPole-v1", validation_size=2, test_size=2)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    with pytest.raises(ValueError, match="tournament"):
        evolve(GRPO.population(2, **spaces), env, strategy="tournamnet", generations=1)


def test_strategies_are_names_in_yaml():
    values = {"task": {"env": "CartPole-v1"}, "strategy": "tournament"}
    assert isinstance(parse_config(values).strategy, Tournament)


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (GRPO, {"lr": 1e-4, "group_size": 8, "beta": 0.0, "max_output_tokens": 128, "hp_config": None}),
        (GRPO.population, {"size": None, "lr": 1e-4, "loss_type": None, "top_p": 1.0}),
        (MultiAgentGRPO, {"lr": 1e-4, "policies": "shared", "agent_ids": False}),
        (evolve, {"generations": None, "steps_per_generation": 8, "samples_per_step": 64}),
        (resume, {"generations": None, "target_fitness": None}),
        (train, {"lr": 1e-4, "steps_per_generation": 8, "target_fitness": None}),
    ],
)
def test_help_lists_every_option_with_its_default(function, defaults):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in defaults} == defaults
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert "lr=" in pydoc.render_doc(GRPO)


def test_whole_floats_are_accepted_as_counts():
    assert Schedule(max_timesteps=1e4).max_timesteps == 10_000
    assert Hyperparameters(group_size=8.0).group_size == 8
