"""Translation of TRL's fields."""

import dataclasses

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.trl import FIELDS, INFRASTRUCTURE

SYNCED = {"sync_ref_model": True, "beta": 0.1, "use_bias_correction_kl": False}
VLLM = {"use_vllm": True}


def imported(**fields):
    return Objective.from_trl(fields)


def objective(**switches):
    return Objective(**{"loss_type": "dapo", **switches})


@pytest.mark.parametrize(
    ("fields", "switches"),
    [
        ({}, {}),
        *(({"loss_type": loss}, {"loss_type": loss}) for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "sapo")),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "cispo"}),
        ({"entropy_coef": 0.1}, {"entropy_reduction": "mean"}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"loss_type": "gspo"}),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"loss_type": "luspo"}),
        ({"importance_sampling_level": "sequence"}, {"loss_type": "gspo", "aggregation": "token-mean"}),
        (
            {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
            {"loss_type": "gspo", "aggregation": "token-mean"},
        ),
        (
            {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
            {"loss_type": "gspo", "aggregation": "seq-mean-token-sum-norm"},
        ),
        (
            {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
            {"loss_type": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0},
        ),
        ({"delta": 1.5}, {"delta": 1.5}),
        ({"scale_rewards": "group"}, {}),
        ({"scale_rewards": True}, {}),
        ({"scale_rewards": "batch"}, {"advantage": "batch_std"}),
        ({"scale_rewards": "none"}, {"advantage": "mean_only"}),
        ({"scale_rewards": False}, {"advantage": "mean_only"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"advantage": "gdpo"}),
        ({"mask_truncated_completions": True}, {"mask_truncated": True}),
        ({"top_entropy_quantile": 0.2}, {"top_entropy_quantile": 0.2}),
        (SYNCED, {"reference": "snapshot", "reference_sync_steps": 512}),
        (
            {**SYNCED, "ref_model_sync_steps": 10, "ref_model_mixup_alpha": 0.9},
            {"reference": "snapshot", "reference_sync_steps": 10, "reference_mixing": 0.9},
        ),
        # Six optimizer steps a learning step, three batches, twice: both count optimizer steps.
        (
            {**SYNCED, "ref_model_sync_steps": 13, "steps_per_generation": 3, "num_iterations": 2},
            {"reference": "snapshot", "reference_sync_steps": 13},
        ),
        (VLLM, {"importance_correction": "sequence_mask", "importance_cap": 3.0}),
        (
            {**VLLM, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.5},
            {"importance_correction": "token_truncate", "importance_cap": 2.5},
        ),
        (
            {**VLLM, "vllm_importance_sampling_cap": 4.0},
            {"importance_correction": "sequence_mask", "importance_cap": 4.0},
        ),
        ({**VLLM, "vllm_importance_sampling_correction": False}, {}),
    ],
)
def test_fields_of_the_objective(fields, switches):
    assert imported(**fields).objective == objective(**switches)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"learning_rate": 1e-5}, {"lr": 1e-5}),
        ({"max_grad_norm": 0.2}, {"max_grad_norm": 0.2}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"beta": 0.04}, {"beta": 0.04}),
        ({"num_iterations": 3}, {"update_epochs": 3}),
        ({"num_generations": 4}, {"group_size": 4}),
        ({"epsilon": 0.1}, {"clip_coef": 0.1}),
        ({"epsilon_high": 0.28}, {"clip_high": 0.28}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"clip_high": 4.0}),  # TRL caps the ratio at 5, not at 1 + 5
        ({"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, {"batch_size": 12}),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 6}, {"batch_size": 4}),
        ({"generation_batch_size": 64}, {"batch_size": 8}),
        # Two processes: 2 x 8 samples a micro-batch, two of which are accumulated.
        (
            {"generation_batch_size": 64, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
            {"batch_size": 32},
        ),
    ],
)
def test_fields_of_hyperparameters(fields, values):
    plain = dict(imported().hyperparameters)
    assert dict(imported(**fields).hyperparameters) == plain | values
    Hyperparameters(**imported(**fields).hyperparameters)


def test_defaults_are_those_of_trl():
    assert dict(imported().hyperparameters) == {
        "lr": 1e-6,
        "clip_coef": 0.2,
        "group_size": 8,
        "beta": 0.0,
        "temperature": 1.0,
        "update_epochs": 1,
        "max_grad_norm": 1.0,
        "batch_size": 8,
        "entropy_coef": 0.0,
    }
    assert dict(imported().settings) == {"samples_per_step": 8, "max_output_tokens": 512, "seed": 42}


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"max_completion_length": 64}, {"max_output_tokens": 64}),
        ({"max_prompt_length": 100}, {"max_prompt_length": 100}),
        ({"seed": 1}, {"seed": 1}),
        ({"top_p": 0.9, "top_k": 50}, {"top_p": 0.9, "top_k": 50}),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"reward_weights": (1.0, 0.5)}, {"reward_weights": [1.0, 0.5]}),
        ({"gradient_accumulation_steps": 4}, {"samples_per_step": 32}),
        ({"steps_per_generation": 4}, {"samples_per_step": 32}),
        ({"generation_batch_size": 64}, {"samples_per_step": 64}),
    ],
)
def test_fields_of_settings(fields, settings):
    assert dict(imported(**fields).settings) == dict(imported().settings) | settings


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_need_max_steps(kind):
    known = imported(lr_scheduler_type=kind, max_steps=100, warmup_steps=10, weight_decay=0.1, adam_beta1=0.8)
    assert (known.optimizer.schedule, known.optimizer.total_steps, known.optimizer.warmup_steps) == (kind, 100, 10)
    assert (known.optimizer.weight_decay, known.optimizer.betas) == (0.1, (0.8, 0.999))
    assert not known.ignored
    unknown = imported(lr_scheduler_type=kind)
    assert unknown.optimizer.schedule == "constant"
    assert "max_steps" in unknown.ignored["lr_scheduler_type"]


def test_constant_schedule_needs_no_max_steps():
    assert not imported(lr_scheduler_type="constant").ignored
    assert "lr_scheduler_type" in imported(lr_scheduler_type="inverse_sqrt", max_steps=100).ignored
    assert "warmup_ratio" in imported(lr_scheduler_type="constant", warmup_ratio=0.1).ignored
    assert "warmup_steps" in imported(lr_scheduler_type="constant", warmup_steps=0.1).ignored
    assert "warmup_steps" in imported(lr_scheduler_type="constant", warmup_steps=5, max_steps=9).ignored
    assert "lr_scheduler_kwargs" in imported(lr_scheduler_type="constant", lr_scheduler_kwargs={"a": 1}).ignored


SCHEDULES = [
    {"lr_scheduler_type": "constant", "warmup_steps": 3},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    {"lr_scheduler_type": "linear", "warmup_steps": 0.21},
    {"lr_scheduler_type": "linear", "warmup_steps": 40},
    {"lr_scheduler_type": "cosine", "warmup_steps": 2, "lr_scheduler_kwargs": {"num_cycles": 0.7}},
    {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"num_cycles": 2}'},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.3, "num_cycles": 1}},
]


@pytest.mark.parametrize("fields", SCHEDULES)
def test_learning_rates_match_trl(fields, tmp_path):
    lr, steps = 1e-3, 20
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=steps, learning_rate=lr, **fields)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        arguments.get_warmup_steps(steps),
        steps,
        arguments.lr_scheduler_kwargs,
    )
    result = imported(max_steps=steps, learning_rate=lr, **fields)
    for step in range(steps):
        expected = scheduler.get_last_lr()[0]
        assert result.hyperparameters["lr"] * result.optimizer.factor(step) == pytest.approx(expected, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_warmup_ratio():
    assert imported(max_steps=30, warmup_ratio=0.11).optimizer.warmup_steps == 4
    assert imported(max_steps=30, warmup_ratio=0.11, warmup_steps=2).optimizer.warmup_steps == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"epsilon_hi": 0.3}, "epsilon_hi.*epsilon_high"),
        ({"num_generation": 4}, "num_generations"),
        ({"learning_rat": 4}, "learning_rate"),
        ({"loss_type": "dapoo"}, "loss_type.*dapoo"),
        ({"loss_type": "vespo"}, "loss_type.*vespo"),
        ({"loss_type": "luspo"}, "importance_sampling_level"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 5.0}, "loss_type.*cispo"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "loss_type.*sapo"),
        ({"loss_type": "cispo"}, "epsilon_high.*0.2"),
        ({"loss_type": "cispo", "epsilon_high": 0.5}, "epsilon_high.*0.5"),
        ({"scale_rewards": "std"}, "scale_rewards"),
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation"),
        ({"mask_truncated_completions": 1}, "mask_truncated_completions"),
        ({"num_iterations": 1.5}, "TRL field num_iterations"),
        ({"beta": "small"}, "TRL field beta"),
        ({"reward_weights": 3}, "TRL field reward_weights"),
        ({"num_generations": 1}, "group_size"),
        ({"delta": 1.1}, "delta"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile"),
        ({"sync_ref_model": True}, "reference.*beta"),
        ({**VLLM, "vllm_importance_sampling_clip_min": 0.5}, "clip_min"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"generation_batch_size": 10, "steps_per_generation": 4}, "generation_batch_size"),
        (
            {"max_steps": 9, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"cycles": 1}},
            "lr_scheduler_kwargs.*'cycles'",
        ),
        ({"max_steps": 9, "lr_scheduler_kwargs": 3}, "lr_scheduler_kwargs"),
        ({"max_steps": 9, "lr_scheduler_type": "cosine_with_min_lr"}, "min_lr and min_lr_rate"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
        ({"max_completion_length": -5}, "max_completion_length must be at least 1, got -5"),
        ({"top_p": 2.0}, "top_p.*2.0"),
        ({"top_k": -7}, "top_k.*-7"),
        ({"optim": "sgd"}, "optim.*'sgd'"),
        *(
            ({name: value}, f"TRL field {name}")
            for name, value in {
                "router_aux_loss_coef": 0.01,
                "generation_kwargs": {"num_beams": 2},
                "chat_template_kwargs": {"enable_thinking": False},
                "max_tool_calling_iterations": 3,
                "vllm_structured_outputs_regex": "a*",
                "neftune_noise_alpha": 5,
                "vllm_guided_decoding_regex": "a*",
                "off_policy_mask_threshold": 0.5,
                "use_adaptive_entropy": True,
            }.items()
        ),
    ],
)
def test_unsupported_fields_are_rejected(fields, named):
    with pytest.raises(ValueError, match=named):
        imported(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0},
        {"top_k": -1, "min_p": 0.0, "generation_kwargs": {}, "router_aux_loss_coef": 0.0},
        {"optim": "adamw_torch_fused"},
    ],
)
def test_unsupported_fields_are_accepted_without_effect(fields):
    result = imported(**fields)
    assert result.objective == objective()
    assert dict(result.hyperparameters) == dict(imported().hyperparameters)


@pytest.mark.parametrize("name", [*INFRASTRUCTURE, "output_dir", "logging_steps", "bf16"])
def test_infrastructure_fields_are_ignored(name):
    result = imported(lr_scheduler_type="constant", **{name: "something"})
    assert set(result.ignored) == {name}
    assert result.objective == objective()


@pytest.mark.parametrize(
    "fields",
    [
        {"ref_model_sync_steps": 3},
        {"ref_model_mixup_alpha": 0.1},
        {"sapo_temperature_pos": 2.0},
        {"vllm_importance_sampling_mode": "token_mask"},
        {"vllm_importance_sampling_clip_max": 5.0},
        {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
    ],
)
def test_fields_without_effect_are_ignored(fields):
    assert set(imported(lr_scheduler_type="constant", **fields).ignored) == {next(iter(fields))}


def test_one_error_names_all_refused_fields():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        imported(loss_type="vespo", top_p=0.5, beta="x", epsilno=1, delta=0.5, learning_rate=-1.0, optim="sgd")
    for part in ("loss_type", "beta", "'epsilno'", "delta", "lr", "optim"):
        assert part in str(caught.value)


def test_defaults_are_not_listed_as_ignored():
    assert imported(**{name: key.default for name, key in FIELDS.items()}) == imported()


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
    result = Objective.from_trl(Settings(loss_type="grpo", epsilon_high=0.3, output_dir="out"))
    plain = {"loss_type": "grpo", "epsilon_high": 0.3, "output_dir": "out", "lr_scheduler_type": "constant"}
    assert result == Objective.from_trl(plain)
    assert set(result.ignored) == {"output_dir"}


def test_default_fields_of_objects_are_translated():
    assert Objective.from_trl(Settings(beta=0.1)).objective.kl_bias_correction
    assert not Objective.from_trl(Settings(beta=0.1, use_bias_correction_kl=False)).objective.kl_bias_correction
    assert Objective.from_trl({"beta": 0.1}).objective.kl_bias_correction, "TRL's default"
    assert not Objective.from_trl({}).objective.kl_bias_correction, "there is no KL term to correct"


def test_unknown_fields_are_rejected_unless_default():
    assert not Objective.from_trl(Settings()).ignored
    with pytest.raises(ValueError, match="unknown TRL field 'brand_new'"):
        Objective.from_trl(Settings(brand_new=2))


@pytest.mark.parametrize("source", [3, "dapo", None, Settings])
def test_sources_without_fields_are_rejected(source):
    with pytest.raises(ValueError, match="GRPOConfig"):
        Objective.from_trl(source)


def test_grpo_config_is_translated(tmp_path):
    trl = pytest.importorskip("trl")
    own = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert own >= {"loss_type", "epsilon_high", "scale_rewards", "sync_ref_model", "delta"}
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, num_generations=4, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, steps_per_generation=4, scale_rewards=False, max_steps=30, epsilon_high=0.3,
    )  # fmt: skip
    result = Objective.from_trl(config)
    assert result.objective == objective(advantage="mean_only")
    values = result.hyperparameters
    assert (values["group_size"], values["batch_size"], values["clip_high"]) == (4, 8, 0.3)
    assert result.settings["samples_per_step"] == 16
    assert (result.optimizer.schedule, result.optimizer.total_steps) == ("linear", 30)
    assert {"output_dir", "use_cpu"} <= set(result.ignored)
    assert config.gradient_checkpointing
    assert "micro_batch_tokens" in result.ignored["gradient_checkpointing"], "a default of TRL that costs time"
