"""TRL's GRPOConfig as an objective, hyperparameters and settings of this package."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from evogrpo.interop.foreign_fields import Fields, Reading, sampling_settings
from evogrpo.interop.training_arguments import read_optimizer, training_argument_names
from evogrpo.interop.trl_fields import ADAPTIVE, CHECKPOINTING, DEFAULTS, INFRASTRUCTURE, VESPO


def read_trl(source: object) -> Reading:
    """Translate TRL's settings.

    Args:
        source: A `GRPOConfig`, or a mapping of its fields. Fields left out of a mapping have TRL's defaults, except
            that the batch is that of one process unless `generation_batch_size` says otherwise.

    Returns:
        What they mean here, with every field that is unknown or means something that this package does not do among
        `refused`. Prompts longer than `max_prompt_length` are left out here and cut short in TRL.

    Raises:
        ValueError: If there are no fields.

    Source: TRL 1.16, `GRPOConfig` and `GRPOTrainer._compute_loss`.
    """
    fields = Fields("TRL field", _values(source), DEFAULTS)
    fields.check_names(INFRASTRUCTURE, VESPO, ADAPTIVE, training_argument_names())
    _refuse(fields)
    samples, batch = _batch(fields)
    loss_type, aggregation = _loss(fields)
    switches: dict[str, Any] = {
        "loss_type": loss_type,
        "aggregation": aggregation,
        "advantage": _advantage(fields),
        "advantage_eps": 1e-4,
        "mask_truncated": fields.flag("mask_truncated_completions"),
        "delta": fields.number("delta"),
        "top_entropy_quantile": fields.number("top_entropy_quantile"),
        "kl_bias_correction": fields.flag("use_bias_correction_kl") and fields.number("beta") != 0,
        # TRL's bonus is a mean over tokens, whatever the loss.
        "entropy_reduction": "mean" if fields.number("entropy_coef") else "loss",
        **_reference(fields),
        **_importance(fields),
    }
    if loss_type == "sapo":
        switches["sapo_tau_positive"] = fields.number("sapo_temperature_pos")
        switches["sapo_tau_negative"] = fields.number("sapo_temperature_neg")
    else:
        fields.ignore("only loss_type 'sapo' reads it", "sapo_temperature_pos", "sapo_temperature_neg")
    given = {
        "lr": fields.number("learning_rate"),
        "clip_coef": fields.number("epsilon"),
        "clip_high": _clip_high(fields, loss_type),
        "group_size": fields.whole("num_generations"),
        "beta": fields.number("beta"),
        "temperature": fields.number("temperature"),
        "update_epochs": fields.whole("num_iterations"),
        "max_grad_norm": fields.number("max_grad_norm"),
        "batch_size": batch,
        "entropy_coef": fields.number("entropy_coef"),
    }
    weights = fields.numbers("reward_weights")
    settings = {
        "samples_per_step": samples,
        "max_output_tokens": fields.count("max_completion_length"),
        "max_prompt_length": fields.count("max_prompt_length"),
        "reward_weights": weights,
        "seed": fields.whole("seed"),
        **sampling_settings(
            top_k=fields.whole("top_k"),
            top_p=fields.number("top_p"),
            min_p=fields.number("min_p"),
            repetition_penalty=fields.number("repetition_penalty"),
        ),
    }
    total = fields.whole("max_steps")
    optimizer = read_optimizer(fields, total if total > 0 else None, constant_warms_up=False)
    _ignore_the_rest(fields)
    return Reading(
        objective=switches,
        hyperparameters={name: value for name, value in given.items() if value is not None},
        optimizer=optimizer,
        settings={name: value for name, value in settings.items() if value is not None},
        ignored=fields.ignored,
        refused=tuple(fields.refused),
    )


def _values(source: object) -> dict[str, Any]:
    """Return the fields by name; of an object those that mean something here, and those not at their default."""
    if isinstance(source, Mapping):
        return dict(source)
    if not dataclasses.is_dataclass(source) or isinstance(source, type):
        raise ValueError(f"expected a TRL GRPOConfig or a mapping of its fields, got {type(source).__name__}")
    values = {}
    for field in dataclasses.fields(source):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(source, field.name)
        if field.name in DEFAULTS or value != default or (field.name in CHECKPOINTING and value):
            values[field.name] = value
    return values


def _refuse(fields: Fields) -> None:
    """Refuse what this package does not do."""
    free = "no grammar constrains what is sampled"
    fields.refuse_unless((None, {}), "give top_k, top_p and the like by name", "generation_kwargs")
    fields.refuse_unless((None,), free, "vllm_structured_outputs_regex", "vllm_guided_decoding_regex")
    fields.refuse_unless(
        (None, {}), "give it to HuggingFaceGym(chat_template_kwargs=...) instead", "chat_template_kwargs"
    )
    fields.refuse_unless((None, 0, 0.0), "no auxiliary loss is added", "router_aux_loss_coef")
    fields.refuse_unless((None,), "no tools are called", "max_tool_calling_iterations")
    fields.refuse_unless((None, 0), "embeddings get no noise", "neftune_noise_alpha")
    fields.refuse_unless((None,), "samples come from the current policy", "off_policy_mask_threshold")
    fields.refuse_unless((False,), "the entropy coefficient is fixed or evolves", "use_adaptive_entropy")


def _batch(fields: Fields) -> tuple[int, int]:
    """Return samples per learning step and per optimizer step."""
    per_device = fields.count("per_device_train_batch_size")
    accumulation = fields.count("gradient_accumulation_steps")
    steps = fields.count("steps_per_generation")
    generation = fields.count("generation_batch_size")
    if generation is None:
        steps = accumulation if steps is None else steps
        generation = per_device * steps
    elif steps is None:
        steps = max(generation // per_device, 1)
    # Of all processes: a GRPOConfig has both, and each process's micro-batches together are one step of a generation.
    micro, rest = divmod(generation, steps)
    batch = micro * accumulation
    if rest or batch > generation:
        fields.refuse(
            f"an optimizer step must be a part of one generation batch, got generation_batch_size {generation} in "
            f"{steps} steps, of which {accumulation} are accumulated: lower gradient_accumulation_steps"
        )
    return generation, batch


def _loss(fields: Fields) -> tuple[str, str | None]:
    """Return the loss type and the aggregation, where it is not the loss type's own."""
    loss = fields.choice("loss_type", ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"))
    level = fields.choice("importance_sampling_level", ("token", "sequence"))
    if loss == "vespo":
        fields.refuse("TRL field loss_type has no counterpart here, got 'vespo': choose another loss type")
        return "dapo", None
    if level == "token":
        if loss == "luspo":
            fields.refuse(
                "TRL's luspo with importance_sampling_level 'token' has no counterpart here: set it to 'sequence', as "
                "its paper has it"
            )
        return str(loss), None
    sequence: dict[str, tuple[str, str | None]] = {
        "grpo": ("gspo", None),
        "luspo": ("luspo", None),
        "dapo": ("gspo", "token-mean"),
        "bnpo": ("gspo", "token-mean"),
        "dr_grpo": ("gspo", "seq-mean-token-sum-norm"),
    }
    if loss not in sequence:
        fields.refuse(
            f"TRL's {loss} with importance_sampling_level 'sequence' has no counterpart here: set it to 'token', or "
            f"choose one of {', '.join(sequence)}"
        )
        return str(loss), None
    return sequence[loss]


def _clip_high(fields: Fields, loss_type: str) -> float | None:
    high: float | None = fields.number("epsilon_high")
    if loss_type != "cispo":
        return high
    # TRL caps the ratio at epsilon_high, by default epsilon; here the cap is 1 + clip_high.
    cap = fields.number("epsilon") if high is None else high
    if cap <= 1:
        fields.refuse(
            f"TRL's cispo caps the ratio itself at epsilon_high, got {cap}: a cap of at most 1 has no counterpart "
            "here, where it is 1 + clip_high; the ScaleRL paper recommends 5.0"
        )
        return high
    return float(cap - 1)


def _advantage(fields: Fields) -> str:
    scale = fields.choice("scale_rewards", ("group", "batch", "none", True, False))
    together = fields.choice("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum"))
    if together == "normalize_then_sum":
        fields.ignore("multi_objective_aggregation 'normalize_then_sum' has its own scale", "scale_rewards")
        return "gdpo"
    return {"group": "outcome", True: "outcome", "batch": "batch_std", "none": "mean_only", False: "mean_only"}[scale]


def _reference(fields: Fields) -> dict[str, Any]:
    if not fields.flag("sync_ref_model"):
        fields.ignore("only sync_ref_model reads it", "ref_model_mixup_alpha", "ref_model_sync_steps")
        return {}
    return {
        "reference": "snapshot",
        "reference_sync_steps": fields.whole("ref_model_sync_steps"),  # of the optimizer, there as here
        "reference_mixing": fields.number("ref_model_mixup_alpha"),
    }


def _importance(fields: Fields) -> dict[str, Any]:
    names = tuple(f"vllm_importance_sampling_{part}" for part in ("mode", "clip_max", "clip_min", "cap"))
    if not fields.flag("use_vllm") or not fields.flag("vllm_importance_sampling_correction"):
        fields.ignore("only a correction for vLLM reads it", *names)
        return {}
    fields.refuse_unless((None,), "weights are bounded above only", "vllm_importance_sampling_clip_min")
    mode = fields.choice(names[0], ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
    if fields.given("vllm_importance_sampling_cap"):
        return {"importance_correction": mode, "importance_cap": fields.number("vllm_importance_sampling_cap")}
    if "vllm_importance_sampling_clip_max" in fields.values and not fields.given("vllm_importance_sampling_clip_max"):
        fields.refuse("vllm_importance_sampling_clip_max must be a number here: unbounded weights are not offered")
    return {"importance_correction": mode, "importance_cap": fields.number("vllm_importance_sampling_clip_max")}


def _ignore_the_rest(fields: Fields) -> None:
    """Note what only steers TRL's machinery."""
    fields.ignore("this package has its own sampler", "use_vllm")
    fields.ignore("only loss_type 'vespo' reads it", *VESPO)
    fields.ignore("only use_adaptive_entropy reads it", *ADAPTIVE)
    fields.ignore("memory is bounded by micro_batch_tokens, with the same results", *CHECKPOINTING)
    for name, value in fields.values.items():
        if name not in DEFAULTS and value is not None:
            fields.ignored.setdefault(name, "it steers TRL's own machinery")
