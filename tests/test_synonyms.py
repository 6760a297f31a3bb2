"""Names of TRL, AgileRL and Stable-Baselines3 are refused with the name of this library."""

import inspect
import pydoc

import pytest

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HuggingFaceGym,
    HyperparameterConfig,
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

VALID = {
    "agent": list(Options.__annotations__),
    "schedule": [*Schedule.__dataclass_fields__, *inspect.signature(evolve).parameters],
    "objective": list(Objective.__dataclass_fields__),
    "strategy": list(BUILT_IN),
    "gymnasium": list(inspect.signature(GymnasiumGroups).parameters),
    "questions": list(inspect.signature(HuggingFaceGym).parameters),
    "generate": ["prompts", "n", "max_output_tokens"],
    "split": ["train", "validation", "test"],
    "precision": ["float32", "bfloat16", "nf4"],
    "task": ["dataset", "reward", "form"],
}
# Arguments of, name here: names in other libraries, and typing errors.
NAMES_HERE = """
agent lr: learning_rate
agent clip_coef: epsilon clip_range
agent clip_high: epsilon_high
agent group_size: num_generations groupsize
agent beta: kl_coef
agent update_epochs: num_iterations n_epochs
agent batch_size: per_device_train_batch_size
agent entropy_coef: ent_coef
agent max_output_tokens: max_completion_length max_new_tokens
agent lora_config: peft_config
agent full_finetuning: full
agent network: net_arch
agent gamma: discount
agent max_grad_norm: grad_clip
agent loss_type: loss
schedule run_dir: output_dir tensorboard_log
schedule checkpoint_steps: save_steps
schedule keep_checkpoints: save_total_limit
schedule max_timesteps: total_timesteps
schedule steps_per_generation: evo_steps
schedule samples_per_step: generation_batch_size
schedule target_fitness: reward_threshold target_reward
schedule max_seconds: timeout time_budget_s
schedule strategy: scheduler
schedule progress: verbose
objective mask_truncated: mask_truncated_completions
objective loss_type: loss
strategy truncation_pbt: pbt
strategy successive_halving: asha
strategy tournament: torunament
gymnasium wrappers: env_wrapper
questions validation_dataset: eval_dataset
questions tokenizer: processing_class
generate n: num_return_sequences
generate max_output_tokens: max_tokens
split validation: val
precision bfloat16: bf16
precision nf4: int4
task reward: reward_funcs
"""


@pytest.mark.parametrize("line", NAMES_HERE.strip().splitlines())
def test_names_of_other_libraries_are_translated(line):
    (valid, name), typed = (part.split() for part in line.split(":"))
    for each in typed:
        assert f"{name!r}" in str(unknown_name_error("argument", each, VALID[valid]))


@pytest.mark.parametrize(
    "typed",
    [
        *("wandb_project", "foo", "reward_model", "trainer", "x", "generation_kwargs", "num_generations_eval", "state"),
        *("resume_from_checkpoint", "checkpoint_path", "sapo_temperature_pos", "overwrite_checkpoints", "wrap"),
    ],
)
def test_dissimilar_names_get_no_suggestion(typed):
    for names in (VALID["agent"], VALID["schedule"], VALID["objective"]):
        assert "did you mean" not in str(unknown_name_error("argument", typed, names))


@pytest.mark.parametrize("typed", ["sise", "siez", "szie", "siize", "sie", "ize", "size_"])
def test_typing_errors_get_a_suggestion(typed):
    assert "did you mean 'size'" in str(unknown_name_error("argument", typed, ["size", "seed", "beta"]))


def test_search_spaces_accept_pairs_lists_and_optuna_distributions():
    distributions = pytest.importorskip("optuna").distributions
    assert HyperparameterConfig(
        lr=distributions.FloatDistribution(1e-5, 1e-3, log=True),
        update_epochs=distributions.IntDistribution(1, 4),
        loss_type=distributions.CategoricalDistribution(["grpo", "dapo"]),
        gamma=(0.9, 1.0),
        group_size=[4, 8],
    ) == HyperparameterConfig(
        lr=RLParameter(min=1e-5, max=1e-3, scale="log"),
        update_epochs=RLParameter(min=1, max=4),
        loss_type=RLParameter(choices=["grpo", "dapo"]),
        gamma=RLParameter(min=0.9, max=1.0),
        group_size=RLParameter(choices=[4, 8]),
    )


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
