"""Names of other libraries are refused with the name here or with what to use instead."""

import dataclasses
import inspect
import re
from operator import attrgetter

import pytest

import evogrpo
from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HuggingFaceGym,
    HyperparameterConfig,
    Objective,
    RLParameter,
    evolve,
)
from evogrpo.algorithms.factory import Options
from evogrpo.cli import main
from evogrpo.evolution.strategies import BUILT_IN, Narrowing
from evogrpo.synonyms import unknown_name_error
from evogrpo.training.configuration.reading import override, parse_config
from evogrpo.training.schedule import Schedule
from tests.tiny_steps import step_agent

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
agent stop_strings: stop stop_words
agent lora_config: peft_config
agent full_finetuning: full
agent network: net_arch
agent loss_type: loss
schedule run_dir: output_dir tensorboard_log
schedule checkpoint_steps: save_steps
schedule steps_per_generation: evo_steps
schedule max_seconds: timeout time_budget_s
schedule progress: verbose
schedule trackers: report_to log_with
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
        "wandb_project",
        "foo",
        "reward_model",
        "trainer",
        "x",
        "num_generations_eval",
        "state",
        "resume_from_checkpoint",
        "checkpoint_path",
        "sapo_temperature_pos",
        "overwrite_checkpoints",
        "wrap",
    ],
)
def test_dissimilar_names_get_no_suggestion(typed):
    for names in (VALID["agent"], VALID["schedule"], VALID["objective"]):
        assert "did you mean" not in str(unknown_name_error("argument", typed, names))


@pytest.mark.parametrize(
    ("typed", "names"), [("7", ["0", "1"]), ("v", ["t"]), ("12", ["11", "13"])]
)
def test_other_numbers_and_letters_are_no_typing_errors(typed, names):
    """Names may be values of a column."""
    answer = str(unknown_name_error("value", typed, names))
    assert "did you mean" not in answer
    assert all(name in answer for name in names)


@pytest.mark.parametrize("typed", ["sise", "siez", "szie", "siize", "sie", "ize", "size_"])
def test_typing_errors_get_a_suggestion(typed):
    assert "did you mean 'size'" in str(
        unknown_name_error("argument", typed, ["size", "seed", "beta"])
    )


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
    population = GRPO.population(
        2, **spaces, group_size=4, hp_config=HyperparameterConfig(lr=(1e-4, 1e-2))
    )
    schedule = {
        "generations": 1,
        "steps_per_generation": 1,
        "samples_per_step": 4,
        "test_questions": 0,
    }
    run = evolve(population, env, strategy=given, **schedule)
    assert isinstance(run.trainer.strategy, Narrowing)


AGILERL = """
INIT_HP MUT_P POP_SIZE LEARNING_RATE LR BATCH_SIZE GAMMA GROUP_SIZE BETA CLIP_COEF ENT_COEF
MAX_GRAD_NORM UPDATE_EPOCHS
MAX_STEPS EVO_STEPS EVAL_STEPS EVAL_LOOP NUM_ENVS TARGET_SCORE TOURN_SIZE ELITISM LEARN_STEP TAU
NO_MUT ARCH_MUT
NEW_LAYER PARAMS_MUT ACT_MUT RL_HP_MUT MUT_SD RAND_SEED MIN_LR MAX_LR MIN_BATCH_SIZE MAX_BATCH_SIZE
ENV_NAME ALGO
pop max_steps evo_steps eval_loop target tournament mutation wb checkpoint checkpoint_path
save_elite elite_path
wandb_api_key max_reward evaluation_interval num_epochs pretrained_model_path net_config
tournament_size no_mutation
new_layer_prob mutation_sd rand_seed use_vllm vllm_config micro_batch_size_per_gpu
cosine_lr_schedule_config
"""
VERL_ROLL_OPENRLHF = """
train_batch_size ppo_mini_batch_size rollout_n use_kl_loss kl_loss_coef entropy_coeff
clip_ratio_high loss_agg_mode
norm_adv_by_std_in_grpo adv_estimator total_epochs test_freq save_freq n_gpus_per_node
gpu_memory_utilization
max_response_length train_files val_files project_name experiment_name ppo_epochs param_offload
truncation
rollout_batch_size num_return_sequences_in_group pg_clip response_length dual_clip_loss
logging_steps pretrain
n_samples_per_prompt micro_train_batch_size num_episodes max_epochs prompt_max_len generate_max_len
init_kl_coef
advantage_estimator eps_clip prompt_data input_key apply_chat_template lora_rank zero_stage
reward_pretrain ckpt_path
"""
RAY = (
    "num_samples scheduler perturbation_interval hyperparam_mutations quantile_fraction param_space"
    " metric mode stop"
)


def names_of(library: str) -> list[str]:
    """Return the settings of another library: of its installed version, or listed above."""
    if library == "TRL":
        trl = pytest.importorskip("trl")
        trainer = set(inspect.signature(trl.GRPOTrainer.__init__).parameters) - {"self", "args"}
        return [field.name for field in dataclasses.fields(trl.GRPOConfig)] + sorted(trainer)
    if library == "Stable-Baselines3":
        parameters = inspect.signature(
            pytest.importorskip("stable_baselines3").PPO.__init__
        ).parameters
        return [name for name in parameters if name not in ("self", "_init_setup_model")]
    if library == "PEFT":
        return [field.name for field in dataclasses.fields(pytest.importorskip("peft").LoraConfig)]
    return {"AgileRL": AGILERL, "others": VERL_ROLL_OPENRLHF, "Ray Tune": RAY}[library].split()


def assert_public(message: str) -> None:
    """Assert that every suggested call takes the named argument, and public names exist."""
    for holder, argument in re.findall(r"([\w.]+)\((\w+)=\.\.\.\)", message):
        assert (
            argument
            in inspect.signature(attrgetter(holder.removeprefix("evogrpo."))(evogrpo)).parameters
        ), message
    for name in re.findall(r"evogrpo\.(\w+)", message):
        assert hasattr(evogrpo, name), message


LIBRARIES = ["TRL", "Stable-Baselines3", "AgileRL", "PEFT", "others", "Ray Tune"]
QUESTIONS = {"task": {"dataset": {"train": "a.jsonl"}, "reward": "r.py:f", "form": "agilerl"}}
# A value of each setting that the command line may suggest in place of the name of a section.
SECTION_VALUES = {
    "task.name": "two_digit_sums", "schedule.generations": 2, "hyperparameters.lr": 0.1,
    "population.size": 4,
    "agent.max_output_tokens": 9, "agent.lora.r": 4, "agent.objective.loss_type": "dapo",
    "agent.optimizer.weight_decay": 0.1, "logging.keep_checkpoints": 1,
    "task.dataset.train": "b.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("place", [evolve, GRPO.population, HuggingFaceGym])
def test_arguments_of_other_libraries_have_a_true_answer(library, place):
    valid = list(inspect.signature(place).parameters)
    unanswered = []
    for name in names_of(library):
        if name in valid:
            continue
        message = str(unknown_name_error("argument", name, valid))
        assert_public(message)
        renamed = re.search(r"it is called '(\w+)'", message)
        assert renamed is None or renamed[1] in valid
        if "Valid names" in message or message.endswith(f"{name!r}"):
            unanswered.append(name)
    assert unanswered == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_keys_of_other_libraries_have_an_answer_in_configurations(library):
    unanswered = []
    for name in names_of(library):
        try:
            parse_config({**QUESTIONS, name: 1})
        except ValueError as error:
            paths = re.findall(
                r"\b(?:schedule|hyperparameters|agent|population|logging)\.[\w.]*\w(?! \(only)\b",
                str(error),
            )
            for path in paths:
                with pytest.raises(ValueError, match=path):
                    # The key is known, its value is wrong.
                    parse_config(override(QUESTIONS, [f"{path}={{x: <nothing>}}"]))
            if "Valid names" in str(error):
                unanswered.append(name)
    assert unanswered == []


@pytest.mark.parametrize("path", SECTION_VALUES)
def test_an_option_with_the_name_of_a_section_suggests_a_setting_that_works(path, capsys):
    section = path.rpartition(".")[0]
    with pytest.raises(SystemExit):
        main(["train", "c.yaml", f"--{section.rpartition('.')[2]}", "1"])
    assert f"write {path}=VALUE" in capsys.readouterr().err
    values = {} if path == "task.name" else QUESTIONS
    assert parse_config(override(values, [f"{path}={SECTION_VALUES[path]}"])) is not None


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("GRPOTrainer", "evolve"),
        ("GRPOConfig", "GRPO"),
        ("PPO", "train"),
        ("TournamentSelection", "Tournament"),
        ("create_population", "GRPO.population"),
        ("finetune_llm", "evolve"),
        ("make_vec_env", "GymnasiumGroups"),
        ("Grpo", "GRPO"),
        ("HuggingFaceGim", "HuggingFaceGym"),
    ],
)
def test_imports_of_other_names_are_answered(name, answer):
    assert not hasattr(evogrpo, name)
    with pytest.raises(ImportError, match=answer):
        exec(f"from evogrpo import {name}")  # noqa: S102 - the statement itself has a message of its own
    with pytest.raises(AttributeError, match=answer):
        getattr(evogrpo, name)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("save", "save_checkpoint"),
        ("train", "evolve"),
        ("num_generations", "group_size"),
        ("set_env", "test"),
    ],
)
def test_attributes_of_other_libraries_are_answered(name, answer):
    agent = step_agent()
    assert not hasattr(agent, name)
    with pytest.raises(AttributeError, match=answer):
        getattr(agent, name)
    with pytest.raises(AttributeError, match=answer):
        setattr(agent, name, 1)


def test_methods_of_agents_are_named_by_populations():
    env = GymnasiumGroups("CartPole-v1")
    population = GRPO.population(2, env.observation_space, env.action_space)
    with pytest.raises(AttributeError, match=r"best\.save_checkpoint"):
        population.save("folder")


@pytest.mark.parametrize(("given", "match"), [((1000,), "train"), ((), "total_timesteps")])
def test_learn_names_what_trains_in_an_environment(given, match):
    with pytest.raises(ValueError, match=match):
        step_agent().learn(*given, **({} if given else {"total_timesteps": 9}))
