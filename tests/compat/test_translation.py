"""Translation of TRL's fields and of ROLL's keys."""

import dataclasses

import pytest
import torch
import yaml
from transformers import TrainingArguments, get_scheduler

from evogrpo import from_roll, from_trl
from evogrpo.compat import roll, trl
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.safe_parsing import load_yaml

# What each library's settings mean without any key.
PLAIN = {"trl": {}, "roll": {"adv_estimator": "grpo"}}
OBJECTIVES = {
    "trl": {"loss_type": "dapo"},
    "roll": {"aggregation": "seq-mean-token-mean", "advantage_eps": 1e-6},
}
SYNCED = "sync_ref_model: true, beta: 0.1, use_bias_correction_kl: false"
FREE = "adv_estimator: reinforce"
# library | keys -> fields of the objective
OBJECTIVE_ROWS = f"""
trl |  ->
trl | loss_type: dr_grpo -> loss_type: dr_grpo
trl | loss_type: cispo, epsilon_high: 5.0 -> loss_type: cispo
trl | entropy_coef: 0.1 -> entropy_reduction: mean
trl | loss_type: grpo, importance_sampling_level: sequence -> loss_type: gspo
trl | loss_type: luspo, importance_sampling_level: sequence -> loss_type: luspo
trl | importance_sampling_level: sequence -> loss_type: gspo, aggregation: token-mean
trl | loss_type: bnpo, importance_sampling_level: sequence
  -> loss_type: gspo, aggregation: token-mean
trl | loss_type: dr_grpo, importance_sampling_level: sequence
  -> loss_type: gspo, aggregation: seq-mean-token-sum-norm
trl | loss_type: sapo, sapo_temperature_pos: 2.0 -> loss_type: sapo, sapo_tau_positive: 2.0
trl | scale_rewards: true -> {{}}
trl | scale_rewards: batch -> advantage: batch_std
trl | scale_rewards: false -> advantage: mean_only
trl | multi_objective_aggregation: normalize_then_sum -> advantage: gdpo
trl | delta: 1.5, mask_truncated_completions: true -> delta: 1.5, mask_truncated: true
trl | top_entropy_quantile: 0.2 -> top_entropy_quantile: 0.2
trl | {SYNCED} -> reference: snapshot, reference_sync_steps: 512
trl | {SYNCED}, ref_model_sync_steps: 9, ref_model_mixup_alpha: 0.9
  -> {{reference: snapshot, reference_mixing: 0.9,
  reference_sync_steps: 9}}
trl | {SYNCED}, ref_model_sync_steps: 13, steps_per_generation: 3, num_iterations: 2
  -> {{reference: snapshot,
  reference_sync_steps: 13}}
trl | use_vllm: true -> importance_correction: sequence_mask, importance_cap: 3.0
trl | use_vllm: true, vllm_importance_sampling_mode: token_truncate,
  vllm_importance_sampling_clip_max: 2.5
  -> {{
  importance_correction: token_truncate, importance_cap: 2.5}}
trl | use_vllm: true, vllm_importance_sampling_cap: 4.0
  -> importance_correction: sequence_mask, importance_cap: 4.0
trl | use_vllm: true, vllm_importance_sampling_correction: false -> {{}}
trl | use_vllm: true, top_p: 1, top_k: -1, min_p: 0.0
  -> importance_correction: sequence_mask, importance_cap: 3.0
roll |  -> {{}}
roll | loss_agg_mode: seq-mean-token-sum-norm -> aggregation: seq-mean-token-sum-norm
roll | importance_sampling: seq -> loss_type: gspo
roll | dual_clip_loss: true, pg_clip: 0.3 -> dual_clip: 1.6
roll | reward_clip: 0 -> {{}}
roll | whiten_advantages: true, reward_clip: 5, max_len_mask: true
  -> {{whiten_advantages: true, reward_clip: 5.0,
  mask_truncated: true}}
roll | difficulty_mask: true -> min_group_reward: 0.0, max_group_reward: 1.0
roll | difficulty_mask: true, difficulty_low_threshold: 0.1, difficulty_high_threshold: 0.95 -> {{
  min_group_reward: 0.1, max_group_reward: 0.95}}
roll | {FREE}, reward_norm: None -> advantage: reinforce
roll | {FREE}, norm_mean_type: batch, norm_std_type: batch
  -> advantage: reinforce, reward_norm: batch
roll | {FREE}, norm_mean_type: batch -> advantage: reinforce, reward_norm: batch, reward_shift: true
roll | {FREE}, reward_norm: running -> advantage: reinforce, reward_norm: running
roll | {FREE}, reward_norm: running, reward_scale: true
  -> {{advantage: reinforce, reward_norm: running,
  reward_scale: true}}
roll | {FREE}, norm_std_type: group -> advantage: reinforce, reward_norm: group, reward_scale: true
roll | add_token_level_kl: true -> kl_placement: reward, kl_estimator: k1
roll | add_token_level_kl: true, kl_penalty: abs -> kl_placement: reward, kl_estimator: abs
roll | add_token_level_kl: true, kl_penalty: mse -> kl_placement: reward, kl_estimator: k2
roll | add_token_level_kl: true, target_kl: 0.05, kl_horizon: 500
  -> {{kl_placement: reward, kl_estimator: k1,
  kl_target: 0.05, kl_horizon: 500}}
roll | reward_shift: true -> advantage: mean_only
roll | {FREE}, reward_norm: group -> {{}}
roll | {FREE}, norm_mean_type: group, norm_std_type: batch -> advantage: batch_std
roll | {FREE}, norm_mean_type: group, norm_std_type: running
  -> {{advantage: mean_only, reward_norm: running,
  reward_scale: true}}
"""
# Keys in one row do not depend on each other.
HYPERPARAMETER_ROWS = """
trl | learning_rate: 1.0e-5, max_grad_norm: 0.2, temperature: 0.7, beta: 0.04, num_iterations: 3
  -> {lr: 1.0e-5,
  max_grad_norm: 0.2, temperature: 0.7, beta: 0.04, update_epochs: 3}
trl | num_generations: 4, epsilon: 0.1, epsilon_high: 0.28, entropy_coef: 0.01
  -> {group_size: 4, clip_coef: 0.1,
  clip_high: 0.28, entropy_coef: 0.01}
trl | loss_type: cispo, epsilon_high: 5.0 -> clip_high: 4.0  # TRL caps the ratio at 5, not at 1 + 5
trl | per_device_train_batch_size: 4, gradient_accumulation_steps: 3 -> batch_size: 12
trl | per_device_train_batch_size: 4, steps_per_generation: 6 -> batch_size: 4
trl | generation_batch_size: 64 -> batch_size: 8
trl | generation_batch_size: 64, steps_per_generation: 4, gradient_accumulation_steps: 2
  -> batch_size: 32
roll | ppo_epochs: 4, max_grad_norm: 0.3, gamma: 0.9, pg_clip: 0.3, entropy_loss_coef: 0.01
  -> {update_epochs: 4,
  max_grad_norm: 0.3, gamma: 0.9, clip_coef: 0.3, entropy_coef: 0.01}
roll | use_kl_loss: true, kl_loss_coef: 0.01, advantage_clip: 2.0 -> beta: 0.01, advantage_clip: 2.0
roll | add_token_level_kl: true -> beta: 0.2
roll | add_token_level_kl: true, init_kl_coef: '1e-3' -> beta: 0.001
roll | rollout_batch_size: 4, num_return_sequences_in_group: 16 -> group_size: 16
roll | actor_train: {training_args: {learning_rate: '1e-6'}} -> lr: 1.0e-6
roll | actor_infer: {generating_args: {temperature: 0.9, top_p: 1.0, top_k: 0}} -> temperature: 0.9
"""
SETTING_ROWS = """
trl | max_completion_length: 64, max_prompt_length: 100, seed: 1, top_p: 0.9, top_k: 50
  -> {max_output_tokens: 64,
  max_prompt_length: 100, seed: 1, top_p: 0.9, top_k: 50}
trl | min_p: 0.1, repetition_penalty: 1.1, reward_weights: [1.0, 0.5]
  -> {min_p: 0.1, repetition_penalty: 1.1,
  reward_weights: [1.0, 0.5]}
trl | generation_kwargs: {stop: ['Q:'], top_p: 0.9, max_new_tokens: 9}
  -> {stop_strings: ['Q:'], top_p: 0.9, max_output_tokens: 9}
trl | generation_kwargs: {stop_strings: 'Q:'} -> stop_strings: ['Q:']
trl | generation_kwargs: {min_tokens: 2, stop_token_ids: 5, skip_special_tokens: false, n: 1}
  -> {min_output_tokens: 2, eos_token_ids: [5], skip_special_tokens: false}
trl | gradient_accumulation_steps: 4 -> samples_per_step: 32
trl | steps_per_generation: 4 -> samples_per_step: 32
trl | generation_batch_size: 64 -> samples_per_step: 64
roll | rollout_batch_size: 4, num_return_sequences_in_group: 16 -> samples_per_step: 64
roll | prompt_length: 100, response_length: 200, seed: 7
  -> {max_prompt_length: 100, max_output_tokens: 200, seed: 7}
roll | actor_infer: {generating_args: {temperature: 1.0}} -> top_k: 50, top_p: 0.7
roll | actor_infer: {generating_args: {top_k: -1, top_p: 1}} -> {}
roll | actor_infer: {generating_args: {top_k: 9, top_p: 0.9, repetition_penalty: 1.1}}
  -> {top_k: 9, top_p: 0.9,
  repetition_penalty: 1.1}
roll | prompt_length: '${most}', most: 90 -> max_prompt_length: 90
"""
# library | keys -> words of the error
REFUSED_ROWS = """
trl | epsilon_hi: 0.3 -> epsilon_hi.*epsilon_high
trl | loss_type: vespo -> loss_type.*vespo
trl | loss_type: luspo -> importance_sampling_level
trl | loss_type: cispo, importance_sampling_level: sequence, epsilon_high: 5.0 -> loss_type.*cispo
trl | loss_type: cispo, epsilon_high: 0.5 -> epsilon_high.*0.5
trl | scale_rewards: std -> scale_rewards
trl | multi_objective_aggregation: sum -> multi_objective_aggregation
trl | mask_truncated_completions: 1 -> mask_truncated_completions
trl | num_iterations: 1.5 -> TRL field num_iterations
trl | num_generations: 1 -> group_size
trl | delta: 1.1 -> delta
trl | top_entropy_quantile: 0.0 -> top_entropy_quantile
trl | sync_ref_model: true -> reference.*beta
trl | use_vllm: true, vllm_importance_sampling_clip_min: 0.5 -> clip_min
trl | use_vllm: true, vllm_importance_sampling_clip_max: null
  -> vllm_importance_sampling_clip_max.*None
trl | max_completion_length: null -> max_completion_length.*None
trl | steps_per_generation: 2, gradient_accumulation_steps: 4 -> gradient_accumulation_steps
trl | generation_batch_size: 10, steps_per_generation: 4 -> generation_batch_size
trl | max_steps: 9, lr_scheduler_type: cosine, lr_scheduler_kwargs: {cycles: 1}
  -> lr_scheduler_kwargs.*'cycles'
trl | max_steps: 9, lr_scheduler_kwargs: 3 -> lr_scheduler_kwargs
trl | max_steps: 9, lr_scheduler_type: cosine_with_min_lr -> min_lr and min_lr_rate
trl | max_steps: 9, lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1},
  learning_rate: 0
  -> lr must
trl | per_device_train_batch_size: 0 -> per_device_train_batch_size must be at least 1, got 0
trl | top_p: 2.0 -> top_p.*2.0
trl | use_vllm: true, top_p: 0.8 -> vllm_importance_sampling_correction.*top_p 0.8
trl | use_vllm: true, repetition_penalty: 1.1
  -> vllm_importance_sampling_correction.*repetition_penalty 1.1
trl | optim: sgd -> optim.*'sgd'
trl | generation_kwargs: {num_beams: 2} -> TRL field generation_kwargs.*num_beams
trl | generation_kwargs: 3 -> TRL field generation_kwargs
trl | generation_kwargs: {stop: 3} -> generation_kwargs.stop
trl | generation_kwargs: {do_sample: false} -> generation_kwargs.do_sample
trl | generation_kwargs: {eos_token_id: end} -> generation_kwargs.stop_token_ids
trl | use_adaptive_entropy: true -> TRL field use_adaptive_entropy
roll | adv_estimater: grpo -> adv_estimater.*adv_estimator
roll | actor_train: {training_args: {learning_rat: 1}} -> learning_rate
roll | loss_agg_mode: token-sum -> loss_agg_mode
roll | adv_estimator: gae -> adv_estimator.*'gae'
roll | adv_estimator: null -> adv_estimator.*'gae'
roll | adv_estimator: reinforce, norm_mean_type: batch, norm_std_type: running
  -> 'batch' and norm_std_type 'running'
roll | reward_norm: group, norm_mean_type: group, adv_estimator: reinforce -> norm_mean_type
roll | reward_shift: true, reward_scale: true -> reward_shift and reward_scale
roll | kl_penalty: full, add_token_level_kl: true -> kl_penalty.*'full'
roll | use_kl_loss: true, kl_loss_coef: 0.1, add_token_level_kl: true
  -> use_kl_loss and add_token_level_kl
roll | rollout_batch_size: 8 -> rollout_batch_size and num_return_sequences_in_group
roll | actor_infer: {generating_args: {top_p: 0.0}} -> top_p
roll | pg_clip: wide -> ROLL key pg_clip.*'wide'
roll | pg_clip: 2.0 -> clip_coef
roll | importance_sampling: seq, add_token_level_kl: true -> kl_placement
roll | actor_infer: {generating_args: {num_beams: 3}} -> num_beams.*3
roll | seed: '${ned}', ned: '${seed}' -> seed -> ned -> seed|ned -> seed -> ned
roll | actor_infer: {generating_args: 3} -> actor_infer.generating_args must be a mapping
"""
# Names of keys without effect beside these values come first.
IGNORED_ROWS = """
trl | ref_model_sync_steps: 3
trl | ref_model_mixup_alpha: 0.1
trl | sapo_temperature_pos: 2.0
trl | vllm_importance_sampling_mode: token_mask
trl | vllm_importance_sampling_clip_max: 5.0
trl | scale_rewards: none, multi_objective_aggregation: normalize_then_sum
roll | reward_norm: running
roll | norm_mean_type: running
roll | norm_std_type: running
roll | reward_scale: true
roll | kl_loss_coef: 0.1
roll | init_kl_coef: 0.1
roll | kl_penalty: abs
roll | target_kl: 0.1
roll | kl_horizon: 5
roll | difficulty_low_threshold: 0.1
roll | difficulty_high_threshold: 0.9
"""
INFRASTRUCTURE = {
    "trl": list(trl.INFRASTRUCTURE),
    "roll": [name for name in roll.IGNORED if "." not in name],
}
# Keys of features that are missing here, with values that switch them off.
SWITCHED_OFF = [
    ("trl", {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}),
    ("trl", {"top_k": -1, "min_p": 0.0, "generation_kwargs": {}, "router_aux_loss_coef": 0.0}),
    ("trl", {"optim": "adamw_torch_fused"}),
    *(("roll", {name: off[0][0]}) for name, off in roll.UNSUPPORTED.items() if "." not in name),
]


def rows(text):
    """Return the cells of a table; an indented line continues the one before."""
    result = []
    for row in text.strip().replace("\n  ", " ").splitlines():
        library, cells = row.split(" |", 1)
        result.append((library.strip(), *(cell.strip() for cell in cells.split("->", 1))))
    return result


def mapping(cell):
    return load_yaml(cell if cell.startswith("{") else f"{{{cell.partition('  #')[0]}}}", "table")


def imported(library, keys):
    return {"trl": from_trl, "roll": from_roll}[library]({**PLAIN[library], **keys})


def objective(library, **switches):
    return Objective(**{**OBJECTIVES[library], **switches})


@pytest.mark.parametrize(("library", "keys", "switches"), rows(OBJECTIVE_ROWS))
def test_keys_of_the_objective_are_translated(library, keys, switches):
    assert imported(library, mapping(keys)).objective == objective(library, **mapping(switches))


@pytest.mark.parametrize(("library", "keys", "values"), rows(HYPERPARAMETER_ROWS))
def test_keys_of_hyperparameters_are_translated(library, keys, values):
    result = imported(library, mapping(keys)).hyperparameters
    assert dict(result) == dict(imported(library, {}).hyperparameters) | mapping(values)
    Hyperparameters(**result)


@pytest.mark.parametrize(("library", "keys", "settings"), rows(SETTING_ROWS))
def test_keys_of_settings_are_translated(library, keys, settings):
    assert dict(imported(library, mapping(keys)).settings) == dict(
        imported(library, {}).settings
    ) | mapping(settings)


@pytest.mark.parametrize(("library", "keys", "words"), rows(REFUSED_ROWS))
def test_unsupported_keys_are_refused(library, keys, words):
    with pytest.raises(ValueError, match=words):
        imported(library, mapping(keys))


@pytest.mark.parametrize(("library", "keys"), SWITCHED_OFF)
def test_unsupported_keys_are_accepted_without_effect(library, keys):
    result = imported(library, keys)
    assert result.objective == objective(library)
    assert dict(result.hyperparameters) == dict(imported(library, {}).hyperparameters)
    if library == "roll":
        ((name, off),) = keys.items()
        with pytest.raises(ValueError, match=f"ROLL key {name}"):
            imported(library, {name: True if off is False else "topr" if off == "ppo" else 0.5})


@pytest.mark.parametrize(("library", "keys"), rows(IGNORED_ROWS))
def test_keys_without_effect_are_ignored(library, keys):
    keys = mapping(keys)
    result = imported(
        library, keys | ({"lr_scheduler_type": "constant"} if library == "trl" else {})
    )
    assert set(result.ignored) == {next(iter(keys))}
    assert result.objective == objective(
        library, **({"advantage": "gdpo"} if "scale_rewards" in keys else {})
    )


@pytest.mark.parametrize("library", PLAIN)
def test_infrastructure_keys_and_defaults_are_ignored(library):
    constant = {"lr_scheduler_type": "constant"} if library == "trl" else {}
    result = imported(library, constant | dict.fromkeys(INFRASTRUCTURE[library], "something"))
    assert set(result.ignored) == set(INFRASTRUCTURE[library])
    assert all(result.ignored.values())
    assert (result.objective, result.settings) == (
        objective(library),
        imported(library, {}).settings,
    )
    if library == "trl":
        known = trl.FIELDS
    else:
        known = {name: key for name, key in roll.KEYS.items() if "." not in name}
    assert imported(
        library, {name: key.default for name, key in known.items()} | PLAIN[library]
    ) == imported(library, {})


def test_one_error_names_all_refused_keys():
    wrong_trl = {
        "loss_type": "vespo",
        "top_p": 0.5,
        "beta": "x",
        "epsilno": 1,
        "delta": 0.5,
        "optim": "sgd",
    }
    wrong_roll = {
        "adv_estimator": "gae",
        "lambda": 1,
        "rl_loss_coef": 0.1,
        "pg_clip": 3.0,
        "ppo_epochs": "two",
    }
    for library, keys, names in (
        (
            "trl",
            wrong_trl | {"learning_rate": -1.0},
            ("loss_type", "beta", "'epsilno'", "delta", "lr", "optim"),
        ),
        (
            "roll",
            wrong_roll,
            ("adv_estimator", "'lambda'", "rl_loss_coef", "clip_coef", "ppo_epochs"),
        ),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            imported(library, keys)
        assert all(name in str(caught.value) for name in names)


# --- TRL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_need_max_steps(kind):
    fields = {"max_steps": 100, "warmup_steps": 10, "weight_decay": 0.1, "adam_beta1": 0.8}
    known = imported("trl", {"lr_scheduler_type": kind, **fields})
    assert (
        known.optimizer.schedule,
        known.optimizer.total_steps,
        known.optimizer.warmup_steps,
    ) == (kind, 100, 10)
    assert (known.optimizer.weight_decay, known.optimizer.betas) == (0.1, (0.8, 0.999))
    assert not known.ignored
    unknown = imported("trl", {"lr_scheduler_type": kind})
    assert unknown.optimizer.schedule == "constant"
    assert "max_steps" in unknown.ignored["lr_scheduler_type"]


def test_constant_schedule_needs_no_max_steps():
    constant = {"lr_scheduler_type": "constant"}
    assert not imported("trl", constant).ignored
    assert (
        "lr_scheduler_type"
        in imported("trl", {"lr_scheduler_type": "inverse_sqrt", "max_steps": 100}).ignored
    )
    for name, keys in (
        ("warmup_ratio", {"warmup_ratio": 0.1}),
        ("warmup_steps", {"warmup_steps": 0.1}),
        ("warmup_steps", {"warmup_steps": 5, "max_steps": 9}),
        ("lr_scheduler_kwargs", {"lr_scheduler_kwargs": {"a": 1}}),
    ):
        assert name in imported("trl", constant | keys).ignored


@pytest.mark.parametrize(
    "fields",
    [
        {"lr_scheduler_type": "constant", "warmup_steps": 3},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
        {"lr_scheduler_type": "linear", "warmup_steps": 0.21},
        {
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "lr_scheduler_kwargs": {"num_cycles": 0.7},
        },
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.3, "num_cycles": 1},
        },
    ],
)
def test_learning_rates_match_trl(fields, tmp_path):
    lr = 1e-3
    steps = 20
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=steps, learning_rate=lr, **fields
    )
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    warmup = arguments.get_warmup_steps(steps)
    kwargs = arguments.lr_scheduler_kwargs
    scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer, warmup, steps, kwargs)
    result = imported("trl", {"max_steps": steps, "learning_rate": lr, **fields})
    for step in range(steps):
        expected = scheduler.get_last_lr()[0]
        assert result.hyperparameters["lr"] * result.optimizer.factor(step) == pytest.approx(
            expected, abs=1e-15
        )
        optimizer.step()
        scheduler.step()


def test_warmup_ratio_becomes_warmup_steps_unless_they_are_given():
    assert imported("trl", {"max_steps": 30, "warmup_ratio": 0.11}).optimizer.warmup_steps == 4
    assert (
        imported(
            "trl", {"max_steps": 30, "warmup_ratio": 0.11, "warmup_steps": 2}
        ).optimizer.warmup_steps
        == 2
    )


@dataclasses.dataclass
class Settings:
    """A small GRPOConfig with an unknown field."""

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon_high: float | None = None
    output_dir: str | None = None
    lr_scheduler_type: str = "constant"
    use_bias_correction_kl: bool = True
    brand_new: int = 1
    report_to: list = dataclasses.field(default_factory=list)


def test_objects_are_read_like_mappings():
    result = from_trl(Settings(loss_type="grpo", epsilon_high=0.3, output_dir="out"))
    plain = {
        "loss_type": "grpo",
        "epsilon_high": 0.3,
        "output_dir": "out",
        "lr_scheduler_type": "constant",
    }
    assert result == from_trl(plain)
    assert set(result.ignored) == {"output_dir"}
    assert not from_trl(Settings()).ignored
    with pytest.raises(ValueError, match="unknown TRL field 'brand_new'"):
        from_trl(Settings(brand_new=2))


def test_kl_bias_correction_follows_trls_default():
    assert from_trl(Settings(beta=0.1)).objective.kl_bias_correction
    assert not from_trl(
        Settings(beta=0.1, use_bias_correction_kl=False)
    ).objective.kl_bias_correction
    assert imported("trl", {"beta": 0.1}).objective.kl_bias_correction, "TRL's default"
    assert not imported("trl", {}).objective.kl_bias_correction, "there is no KL term to correct"


@pytest.mark.parametrize("source", [3, "dapo", None, Settings])
def test_sources_without_fields_are_refused(source):
    with pytest.raises(ValueError, match="GRPOConfig"):
        from_trl(source)


def test_grpo_config_is_translated(tmp_path):
    library = pytest.importorskip("trl")
    trl_fields = {field.name for field in dataclasses.fields(library.GRPOConfig)}
    assert trl_fields >= {"loss_type", "epsilon_high", "scale_rewards", "sync_ref_model", "delta"}
    config = library.GRPOConfig(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        scale_rewards=False,
        max_steps=30,
        epsilon_high=0.3,
    )
    result = from_trl(config)
    assert result.objective == objective("trl", advantage="mean_only")
    values = result.hyperparameters
    assert (values["group_size"], values["batch_size"], values["clip_high"]) == (4, 8, 0.3)
    assert result.settings["samples_per_step"] == 16
    assert (result.optimizer.schedule, result.optimizer.total_steps) == ("linear", 30)
    assert {"output_dir", "use_cpu"} <= set(result.ignored)
    assert config.gradient_checkpointing
    assert "micro_batch_tokens" in result.ignored["gradient_checkpointing"], (
        "a default of TRL that costs time"
    )


# --- ROLL -----------------------------------------------------------------------------------------

# The GRPO page of ROLL's documentation.
EXAMPLE = """
rollout_batch_size: 64 # prompt
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
adv_estimator: "grpo"
ppo_epochs: 1
use_kl_loss: true
kl_loss_coef: 0.001
loss_agg_mode: "seq-mean-token-mean"
whiten_advantages: true
advantage_clip: 2.0
dual_clip_loss: true
reward_clip: 10
reward_norm: null
reward_shift: false
reward_scale: false
add_token_level_kl: false
"""


def test_the_documented_example_is_read_as_file_text_or_mapping(tmp_path):
    (tmp_path / "example_grpo.yaml").write_text(EXAMPLE)
    result = from_roll(tmp_path / "example_grpo.yaml")
    (tmp_path / "run:1.yaml").write_text(EXAMPLE)
    assert result == from_roll(str(tmp_path / "run:1.yaml"))
    assert result == from_roll(EXAMPLE) == from_roll(yaml.safe_load(EXAMPLE))
    assert result.objective == objective(
        "roll", whiten_advantages=True, reward_clip=10.0, dual_clip=1.4
    )
    assert dict(result.hyperparameters) == {
        "group_size": 8,
        "beta": 0.001,
        "update_epochs": 1,
        "advantage_clip": 2.0,
        "clip_coef": 0.2,
        "max_grad_norm": 1.0,
        "entropy_coef": 0.0,
        "gamma": 1.0,  # ROLL's defaults
    }
    assert dict(result.settings) == {
        "samples_per_step": 512,
        "max_output_tokens": 4096,
        "max_prompt_length": 2048,
    }
    assert not result.ignored


def test_keys_of_rolls_optimizer_are_translated():
    arguments = {
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "gradient_accumulation_steps": 8,
        "bf16": True,
    }
    actor = {"training_args": arguments, "strategy_args": {"strategy_name": "fsdp2_train"}}
    result = imported("roll", {"actor_train": actor})
    optimizer = result.optimizer
    assert (optimizer.weight_decay, optimizer.warmup_steps, optimizer.schedule) == (
        0.1,
        5,
        "constant",
    )
    assert result.hyperparameters["lr"] == 5e-5, "ROLL's default"
    ignored = ("strategy_args", "training_args.bf16", "training_args.gradient_accumulation_steps")
    assert set(result.ignored) == {f"actor_train.{name}" for name in ignored}


@pytest.mark.parametrize(
    "source", ["[1, 2]\n", 3, None, "adv_estimator: !!python/object/apply:os.system ['true']"]
)
def test_sources_without_plain_keys_are_refused(source):
    with pytest.raises(ValueError, match=r"ROLL keys|constructor"):
        from_roll(source)
