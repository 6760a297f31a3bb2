"""Names of TRL, AgileRL and Stable-Baselines3 are refused with the name of this library."""

import inspect

import pytest

from evogrpo import GRPO, GymnasiumGroups, HuggingFaceGym, HyperparameterConfig, Objective, RLParameter, evolve
from evogrpo.algorithms.factory import Options
from evogrpo.evolution.strategies import BUILT_IN, Narrowing
from evogrpo.synonyms import unknown_name_error
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
agent group_size: num_generations groupsize
agent beta: kl_coef
agent batch_size: per_device_train_batch_size
agent max_output_tokens: max_completion_length max_new_tokens
agent lora_config: peft_config
agent full_finetuning: full
agent network: net_arch
agent loss_type: loss
schedule run_dir: output_dir tensorboard_log
schedule checkpoint_steps: save_steps
schedule steps_per_generation: evo_steps
schedule max_seconds: timeout time_budget_s
schedule progress: verbose
objective mask_truncated: mask_truncated_completions
strategy truncation_pbt: pbt
strategy tournament: torunament
gymnasium wrappers: env_wrapper
questions validation_dataset: eval_dataset
generate n: num_return_sequences
split validation: val
precision bfloat16: bf16
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


def test_search_spaces_accept_pairs_and_lists():
    assert HyperparameterConfig(lr=(1e-5, 1e-3), group_size=[4, 8]) == HyperparameterConfig(
        lr=RLParameter(min=1e-5, max=1e-3, scale="log"), group_size=RLParameter(choices=[4, 8])
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
