"""Translation of ROLL's keys."""

import pytest
import yaml

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.roll import IGNORED, KEYS, UNSUPPORTED

# The GRPO page of ROLL's documentation.
EXAMPLE = """
# grpo
rollout_batch_size: 64 # prompt
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096

adv_estimator: "grpo"
ppo_epochs: 1
use_kl_loss: true
kl_loss_coef: 0.001
loss_agg_mode: "seq-mean-token-mean"

# ppo related
# advantage
whiten_advantages: true
advantage_clip: 2.0
dual_clip_loss: true

# clip
reward_clip: 10
# normalize
reward_norm: null
reward_shift: false
reward_scale: false

# reward
add_token_level_kl: false
"""
PLAIN = {"adv_estimator": "grpo"}
BATCH = {"advantage": "reinforce", "reward_norm": "batch"}
IN_REWARD = {"add_token_level_kl": True}
BASE = {
    "aggregation": "seq-mean-token-mean",
    "advantage_eps": 1e-6,
}


def imported(**keys):
    return Objective.from_roll({**PLAIN, **keys})


def objective(**switches):
    return Objective(**{**BASE, **switches})


def test_documented_example():
    result = Objective.from_roll(EXAMPLE)
    assert result.objective == objective(whiten_advantages=True, reward_clip=10.0, dual_clip=1.4)
    expected = {
        "group_size": 8,
        "beta": 0.001,
        "update_epochs": 1,
        "advantage_clip": 2.0,
        "clip_coef": 0.2,
        "max_grad_norm": 1.0,
        "entropy_coef": 0.0,
        "gamma": 1.0,  # ROLL's defaults
    }
    assert dict(result.hyperparameters) == expected
    assert dict(result.settings) == {"samples_per_step": 512, "max_output_tokens": 4096, "max_prompt_length": 2048}
    assert not result.ignored


def test_mapping_path_and_text_are_equal(tmp_path):
    path = tmp_path / "example_grpo.yaml"
    path.write_text(EXAMPLE)
    read = [Objective.from_roll(source) for source in (EXAMPLE, yaml.safe_load(EXAMPLE), path, str(path))]
    assert all(each == read[0] for each in read)
    assert Objective.from_roll("adv_estimator: grpo").objective == objective()


@pytest.mark.parametrize(
    ("keys", "switches"),
    [
        ({}, {}),
        *(
            ({"loss_agg_mode": mode}, {"aggregation": mode})
            for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
        ),
        ({"importance_sampling": "seq"}, {"loss_type": "gspo"}),
        ({"whiten_advantages": True}, {"whiten_advantages": True}),
        ({"dual_clip_loss": True}, {"dual_clip": 1.4}),
        ({"dual_clip_loss": True, "pg_clip": 0.3}, {"dual_clip": 1.6}),
        ({"reward_clip": 5}, {"reward_clip": 5.0}),
        ({"reward_clip": 0}, {}),
        ({"max_len_mask": True}, {"mask_truncated": True}),
        ({"difficulty_mask": True}, {"min_group_reward": 0.0, "max_group_reward": 1.0}),
        (
            {"difficulty_mask": True, "difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.95},
            {"min_group_reward": 0.1, "max_group_reward": 0.95},
        ),
        ({"adv_estimator": "reinforce"}, {"advantage": "reinforce"}),
        ({"adv_estimator": "reinforce", "reward_norm": "None"}, {"advantage": "reinforce"}),
        ({"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch"}, BATCH),
        ({"adv_estimator": "reinforce", "norm_mean_type": "batch"}, BATCH | {"reward_shift": True}),
        ({"adv_estimator": "reinforce", "norm_std_type": "batch"}, BATCH | {"reward_scale": True}),
        ({"adv_estimator": "reinforce", "reward_norm": "running"}, BATCH | {"reward_norm": "running"}),
        (
            {"adv_estimator": "reinforce", "reward_norm": "running", "reward_scale": True},
            BATCH | {"reward_norm": "running", "reward_scale": True},
        ),
        (
            {"adv_estimator": "reinforce", "norm_std_type": "group"},
            BATCH | {"reward_norm": "group", "reward_scale": True},
        ),
        (IN_REWARD, {"kl_placement": "reward", "kl_estimator": "k1"}),
        ({**IN_REWARD, "kl_penalty": "abs"}, {"kl_placement": "reward", "kl_estimator": "abs"}),
        ({**IN_REWARD, "kl_penalty": "mse"}, {"kl_placement": "reward", "kl_estimator": "k2"}),
        (
            {**IN_REWARD, "target_kl": 0.05, "kl_horizon": 500},
            {"kl_placement": "reward", "kl_estimator": "k1", "kl_target": 0.05, "kl_horizon": 500},
        ),
        ({"reward_shift": True}, {"advantage": "mean_only"}),
        ({"adv_estimator": "reinforce", "reward_norm": "group"}, {}),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "group"}, {}),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group"}, {"advantage": "mean_only"}),
        (
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch"},
            {"advantage": "batch_std"},
        ),
        (
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "running"},
            {"advantage": "mean_only", "reward_norm": "running", "reward_scale": True},
        ),
    ],
)
def test_keys_of_the_objective(keys, switches):
    assert imported(**keys).objective == objective(**switches)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"ppo_epochs": 4}, {"update_epochs": 4}),
        ({"max_grad_norm": 0.3}, {"max_grad_norm": 0.3}),
        ({"gamma": 0.9}, {"gamma": 0.9}),
        ({"pg_clip": 0.3}, {"clip_coef": 0.3}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {"beta": 0.01}),
        (IN_REWARD, {"beta": 0.2}),
        ({**IN_REWARD, "init_kl_coef": "1e-3"}, {"beta": 1e-3}),
        ({"entropy_loss_coef": 0.01}, {"entropy_coef": 0.01}),
        ({"advantage_clip": 2.0}, {"advantage_clip": 2.0}),
        ({"rollout_batch_size": 4, "num_return_sequences_in_group": 16}, {"group_size": 16}),
        ({"actor_train": {"training_args": {"learning_rate": "1e-6"}}}, {"lr": 1e-6}),
        ({"actor_infer": {"generating_args": {"temperature": 0.9, "top_p": 1.0, "top_k": 0}}}, {"temperature": 0.9}),
    ],
)
def test_keys_of_hyperparameters(keys, values):
    plain = dict(imported().hyperparameters)
    assert dict(imported(**keys).hyperparameters) == plain | values
    Hyperparameters(**imported(**keys).hyperparameters)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({}, {}),
        ({"rollout_batch_size": 4, "num_return_sequences_in_group": 16}, {"samples_per_step": 64}),
        ({"prompt_length": 100}, {"max_prompt_length": 100}),
        ({"response_length": 200}, {"max_output_tokens": 200}),
        ({"seed": 7}, {"seed": 7}),
        ({"actor_infer": {"generating_args": {"temperature": 1.0}}}, {"top_k": 50, "top_p": 0.7}),  # ROLL's defaults
        ({"actor_infer": {"generating_args": {"top_k": -1, "top_p": 1}}}, {}),
        (
            {"actor_infer": {"generating_args": {"top_k": 100, "top_p": 0.99, "repetition_penalty": 1.1}}},
            {"top_k": 100, "top_p": 0.99, "repetition_penalty": 1.1},
        ),
        ({"prompt_length": "${most}", "most": 90}, {"max_prompt_length": 90}),
    ],
)
def test_keys_of_settings(keys, settings):
    assert dict(imported(**keys).settings) == settings


def test_keys_of_the_optimizer():
    arguments = {"weight_decay": 0.1, "warmup_steps": 5, "gradient_accumulation_steps": 8, "bf16": True}
    result = imported(actor_train={"training_args": arguments, "strategy_args": {"strategy_name": "fsdp2_train"}})
    optimizer = result.optimizer
    assert (optimizer.weight_decay, optimizer.warmup_steps, optimizer.schedule) == (0.1, 5, "constant")
    assert result.hyperparameters["lr"] == 5e-5, "ROLL's default"
    assert set(result.ignored) == {
        *("actor_train.strategy_args", "actor_train.training_args.bf16"),
        "actor_train.training_args.gradient_accumulation_steps",
    }


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"adv_estimater": "grpo"}, "adv_estimater.*adv_estimator"),
        ({"loss_agg_mod": 1}, "loss_agg_mode"),
        ({"actor_train": {"training_args": {"learning_rat": 1}}}, "learning_rate"),
        ({"actor_infer": {"generating_args": {"temprature": 1}}}, "temperature"),
        ({"loss_agg_mode": "token-sum"}, "loss_agg_mode"),
        ({"adv_estimator": "gae"}, "adv_estimator.*'gae'"),
        ({"adv_estimator": None}, "adv_estimator.*'gae'"),
        (
            {"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "running"},
            "norm_mean_type 'batch' and norm_std_type 'running'",
        ),
        ({"reward_norm": "group", "norm_mean_type": "group", "adv_estimator": "reinforce"}, "norm_mean_type"),
        ({"reward_shift": True, "reward_scale": True}, "reward_shift and reward_scale"),
        ({"kl_penalty": "full", **IN_REWARD}, "kl_penalty.*'full'"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, **IN_REWARD}, "use_kl_loss and add_token_level_kl"),
        ({"rollout_batch_size": 8}, "rollout_batch_size and num_return_sequences_in_group"),
        ({"rollout_batch_size": 0, "num_return_sequences_in_group": 8}, "rollout_batch_size must be at least 1, got 0"),
        ({"response_length": -1}, "response_length must be at least 1"),
        ({"actor_infer": {"generating_args": {"top_p": 0.0}}}, "top_p"),
        ({"ppo_epochs": 1.5}, "ROLL key ppo_epochs"),
        ({"whiten_advantages": "yes"}, "ROLL key whiten_advantages"),
        ({"pg_clip": "wide"}, "ROLL key pg_clip.*'wide'"),
        ({"pg_clip": 2.0}, "clip_coef"),
        ({"importance_sampling": "seq", **IN_REWARD}, "kl_placement"),
        ({"importance_sampling": "seq", "gamma": 0.9}, "gamma"),
        ({"actor_infer": {"generating_args": {"num_beams": 3}}}, "num_beams.*3"),
        ({"seed": "${ned}", "ned": "${seed}"}, "seed -> ned -> seed|ned -> seed -> ned"),
        ({"actor_infer": 3}, "actor_infer must be a mapping"),
        ({"actor_infer": {"generating_args": 3}}, "actor_infer.generating_args must be a mapping"),
    ],
)
def test_unsupported_keys_are_rejected(keys, named):
    with pytest.raises(ValueError, match=named):
        imported(**keys)


@pytest.mark.parametrize("name", [name for name in UNSUPPORTED if "." not in name])
def test_unsupported_keys_are_accepted_without_effect(name):
    off = UNSUPPORTED[name][0][0]
    assert imported(**{name: off}).objective == objective()
    with pytest.raises(ValueError, match=f"ROLL key {name}"):
        imported(**{name: True if off is False else "topr" if off == "ppo" else 0.5})


@pytest.mark.parametrize("name", [name for name in IGNORED if "." not in name])
def test_infrastructure_keys_are_ignored(name):
    result = imported(**{name: "something"})
    assert set(result.ignored) == {name}
    assert result.ignored[name]
    assert (result.objective, result.settings) == (imported().objective, imported().settings)


@pytest.mark.parametrize(
    "keys",
    [
        *({name: "running"} for name in ("reward_norm", "norm_mean_type", "norm_std_type")),
        {"reward_scale": True},
        {"kl_loss_coef": 0.1},
        {"init_kl_coef": 0.1},
        {"kl_penalty": "abs"},
        {"target_kl": 0.1},
        {"kl_horizon": 5},
        {"difficulty_low_threshold": 0.1},
        {"difficulty_high_threshold": 0.9},
    ],
)
def test_keys_without_effect_are_ignored(keys):
    result = imported(**keys)
    assert set(result.ignored) == set(keys)
    assert result.objective == objective()
    assert dict(result.hyperparameters) == dict(imported().hyperparameters)


# Like ROLL's own examples: plain REINFORCE, whitened, easy and hard questions masked, truncated sampling.
PIPELINE = """
defaults:
  - ../config/deepspeed_zero@_here_
exp_name: "sums-${rank}"
rank: 16
response_length: 4096
prompt_length: 2048
rollout_batch_size: 64
num_return_sequences_in_group: 8
adv_estimator: "reinforce"
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
norm_mean_type: ~
norm_std_type: ~
max_len_mask: true
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.95
error_max_len_clip: false
difficulty_loss_weight: false
add_token_level_kl: false
whiten_advantages: true
actor_train:
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, warmup_steps: 20, per_device_train_batch_size: 1}
  model_args: {lora_rank: "${rank}"}
actor_infer:
  generating_args:
    max_new_tokens: ${response_length}
    top_p: 0.99
    top_k: 100
    num_beams: 1
    temperature: 0.99
    num_return_sequences: ${num_return_sequences_in_group}
rewards:
  math_rule: {tag_included: [sums], model_args: {model_name_or_path: "${reward_pretrain}"}}
"""


def test_complete_pipeline():
    result = Objective.from_roll(PIPELINE)
    assert result.objective == objective(
        advantage="reinforce", reward_clip=10.0, dual_clip=1.4, mask_truncated=True, min_group_reward=0.1,
        max_group_reward=0.95, whiten_advantages=True,
    )  # fmt: skip
    assert (result.hyperparameters["lr"], result.hyperparameters["temperature"]) == (1e-6, 0.99)
    assert result.optimizer.warmup_steps == 20
    assert dict(result.settings) == {
        "samples_per_step": 512, "max_output_tokens": 4096, "max_prompt_length": 2048, "top_k": 100, "top_p": 0.99,
    }  # fmt: skip
    assert "rank" in result.ignored


def test_one_error_names_all_refused_keys():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Objective.from_roll(
            {"adv_estimator": "gae", "lambda": 1, "rl_loss_coef": 0.1, "pg_clip": 3.0, "ppo_epochs": "two"}
        )
    for part in ("adv_estimator", "'lambda'", "rl_loss_coef", "clip_coef", "ppo_epochs"):
        assert part in str(caught.value)


def test_defaults_are_not_listed_as_ignored():
    written = {name: key.default for name, key in KEYS.items() if "." not in name and name != "adv_estimator"}
    assert imported(**written) == imported()


@pytest.mark.parametrize("source", ["[1, 2]\n", 3, None])
def test_sources_without_keys_are_rejected(source):
    with pytest.raises(ValueError, match="ROLL keys"):
        Objective.from_roll(source)


def test_yaml_never_builds_objects():
    with pytest.raises(ValueError, match="constructor"):
        Objective.from_roll("adv_estimator: !!python/object/apply:os.system ['true']")
