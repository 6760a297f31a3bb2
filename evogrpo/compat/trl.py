"""TRL's GRPOConfig, with its fields from transformers, as records of this package."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from evogrpo.compat.translation import (
    Imported,
    Key,
    Translation,
    Unsupported,
    count,
    number,
    one_of,
    top_k,
)
from evogrpo.extras import require
from evogrpo.functional.loss_types import IMPORTANCE_CORRECTIONS
from evogrpo.synonyms import unknown_name_error
from evogrpo.text import class_name, shown
from evogrpo.validation import finite_number, flag, whole_number


def _numbers(what: str, value: Any) -> list[float]:
    """Return a list of finite numbers, or raise ValueError."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{what} must be a list of numbers, got {shown(value)}.")
    return [finite_number(what, weight) for weight in value]


def _text(what: str, value: Any) -> str:
    """Return the value of an enumeration member, or any other value, as text."""
    return str(getattr(value, "value", value))


def _texts(what: str, value: Any) -> list[str]:
    """Return one or several texts as a list."""
    texts = [value] if isinstance(value, str) else value
    are_texts = isinstance(texts, list | tuple) and all(isinstance(each, str) for each in texts)
    if not are_texts:
        raise ValueError(f"{what} must be a text or a list of texts, got {shown(value)}.")
    return list(texts)


def _token_ids(what: str, value: Any) -> list[int]:
    """Return one or several token ids as a list."""
    ids = value if isinstance(value, list | tuple) else [value]
    return [whole_number(what, each) for each in ids]


def _trackers(what: str, value: Any) -> list[str] | None:
    """Return the names of trackers; None if there are none."""
    names = _texts(what, value)
    return [name for name in names if name != "none"] or None


def _adamw(what: str, value: Any) -> str:
    """Return the name of an AdamW optimizer; raise ValueError for any other."""
    name = _text(what, value)
    if not name.startswith("adamw"):
        raise ValueError(f"{what} must be a variant of AdamW, got {shown(name)}. Leave it out.")
    return name


def _arguments(what: str, value: Any) -> Mapping[str, Any]:
    """Return the arguments of a schedule from a mapping or JSON text."""
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):  # refused below
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a mapping, got {shown(value)}.")
    arguments = {}
    for name, each in value.items():
        if each is not None:
            arguments[name] = finite_number(f"{what}: {name}", each)
    return arguments


FIELDS: Mapping[str, Key] = {
    # Hyperparameters.
    "learning_rate": Key(1e-6, number, "hyperparameters.lr"),
    "max_grad_norm": Key(1.0, number, "hyperparameters.max_grad_norm"),
    "num_generations": Key(8, whole_number, "hyperparameters.group_size"),
    "temperature": Key(1.0, number, "hyperparameters.temperature"),
    "beta": Key(0.0, number, "hyperparameters.beta"),
    "num_iterations": Key(1, whole_number, "hyperparameters.update_epochs"),
    "epsilon": Key(0.2, number, "hyperparameters.clip_coef"),
    "epsilon_high": Key(None, number, "hyperparameters.clip_high"),
    "entropy_coef": Key(0.0, number, "hyperparameters.entropy_coef"),
    "per_device_train_batch_size": Key(8, count),
    "gradient_accumulation_steps": Key(1, count),
    "generation_batch_size": Key(None, count),
    "steps_per_generation": Key(None, count),
    # The objective.
    "loss_type": Key("dapo", one_of("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo")),
    "importance_sampling_level": Key("token", one_of("token", "sequence")),
    "delta": Key(None, number, "objective.delta"),
    "sapo_temperature_pos": Key(1.0, number),
    "sapo_temperature_neg": Key(1.05, number),
    "scale_rewards": Key("group", one_of("group", "batch", "none", True, False)),
    "multi_objective_aggregation": Key(
        "sum_then_normalize", one_of("sum_then_normalize", "normalize_then_sum")
    ),
    "mask_truncated_completions": Key(False, flag, "objective.mask_truncated"),
    "top_entropy_quantile": Key(1.0, number, "objective.top_entropy_quantile"),
    "sync_ref_model": Key(False, flag),
    "ref_model_mixup_alpha": Key(0.6, number),
    "ref_model_sync_steps": Key(512, whole_number),  # optimizer steps, as here
    "use_bias_correction_kl": Key(True, flag),
    "use_vllm": Key(False, flag),
    "vllm_importance_sampling_correction": Key(True, flag),
    "vllm_importance_sampling_mode": Key("sequence_mask", one_of(*IMPORTANCE_CORRECTIONS)),
    "vllm_importance_sampling_clip_max": Key(3.0, number),
    "vllm_importance_sampling_cap": Key(None, number),
    # Settings of other sections.
    "seed": Key(42, whole_number, "settings.seed"),
    "max_completion_length": Key(512, count, "settings.max_output_tokens"),
    "max_prompt_length": Key(None, count, "settings.max_prompt_length"),
    "reward_weights": Key(None, _numbers, "settings.reward_weights"),
    "top_p": Key(1.0, number, "settings.top_p"),
    "top_k": Key(0, top_k, "settings.top_k"),
    "min_p": Key(0.0, number, "settings.min_p"),
    "repetition_penalty": Key(1.0, number, "settings.repetition_penalty"),
    "report_to": Key(None, _trackers, "settings.trackers"),
    "generation_kwargs.stop": Key(None, _texts, "settings.stop_strings"),
    "generation_kwargs.min_tokens": Key(None, count, "settings.min_output_tokens"),
    "generation_kwargs.stop_token_ids": Key(None, _token_ids, "settings.eos_token_ids"),
    "generation_kwargs.skip_special_tokens": Key(None, flag, "settings.skip_special_tokens"),
    # The optimizer.
    "optim": Key("adamw_torch", _adamw),
    "weight_decay": Key(0.0, number, "optimizer.weight_decay"),
    "adam_beta1": Key(0.9, number),
    "adam_beta2": Key(0.999, number),
    "adam_epsilon": Key(1e-8, number, "optimizer.eps"),
    "lr_scheduler_type": Key("linear", _text),
    "lr_scheduler_kwargs": Key(None, _arguments),
    "warmup_steps": Key(0, number),
    "warmup_ratio": Key(None, number),
    "max_steps": Key(-1, whole_number),
}
"""Fields that are translated."""
UNSUPPORTED: Unsupported = {
    "chat_template_kwargs": ((None, {}), "give it to HuggingFaceGym(chat_template_kwargs=...)"),
    "vllm_structured_outputs_regex": ((None,), "sampling is not constrained by a grammar"),
    "vllm_guided_decoding_regex": ((None,), "sampling is not constrained by a grammar"),
    "router_aux_loss_coef": ((None, 0), "there is no auxiliary loss"),
    "max_tool_calling_iterations": ((None,), "set max_turns of the task to this number plus 1"),
    "neftune_noise_alpha": ((None, 0), "embeddings get no noise"),
    "off_policy_mask_threshold": ((None,), "samples come from the current policy"),
    "use_adaptive_entropy": ((False,), "the entropy coefficient is fixed or evolves"),
    "vllm_importance_sampling_clip_min": ((None,), "importance weights have no lower bound"),
}
"""Fields whose effect is not implemented."""
GENERATION: Mapping[str, str] = {
    "stop": "generation_kwargs.stop",
    "stop_strings": "generation_kwargs.stop",
    "min_tokens": "generation_kwargs.min_tokens",
    "min_new_tokens": "generation_kwargs.min_tokens",
    "stop_token_ids": "generation_kwargs.stop_token_ids",
    "eos_token_id": "generation_kwargs.stop_token_ids",
    "skip_special_tokens": "generation_kwargs.skip_special_tokens",
    "max_tokens": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Keys of `generation_kwargs`, of vLLM and transformers, and the fields that they replace."""
SAME_GENERATION: Mapping[str, Any] = {
    "do_sample": True,
    "n": 1,
    "num_beams": 1,
    "include_stop_str_in_output": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "use_cache": True,
}
"""Keys of `generation_kwargs` that can have one value only: what sampling does here."""
_INFRASTRUCTURE = """
    model_init_kwargs trust_remote_code disable_dropout cast_lm_head_to_fp32 num_generations_eval
    ds3_gather_for_generation shuffle_dataset pad_to_multiple_of cache_implementation vllm_mode
    vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
    vllm_max_model_len vllm_tensor_parallel_size vllm_dtype vllm_device log_completions
    log_multimodal num_completions_to_print log_unique_prompts wandb_log_unique_prompts
    log_completions_hub_repo use_transformers_continuous_batching use_transformers_paged
    transformers_continuous_batching_config use_liger_loss use_liger_kernel
"""
INFRASTRUCTURE = tuple(_INFRASTRUCTURE.split())
"""Fields of GRPOConfig that change nothing here."""
UNLIMITED = ("max_completion_length", "vllm_importance_sampling_clip_max")
"""Fields in which None means no limit, which is not supported; a missing one has its default."""
GRADIENT_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
SEQUENCE_LOSSES: Mapping[str, tuple[str, str | None]] = {
    "grpo": ("gspo", None),
    "luspo": ("luspo", None),
    "dapo": ("gspo", "token-mean"),
    "bnpo": ("gspo", "token-mean"),
    "dr_grpo": ("gspo", "seq-mean-token-sum-norm"),
}
"""Loss type and aggregation here, by TRL's loss type with importance_sampling_level "sequence"."""
SCALES = {
    "group": "outcome",
    True: "outcome",
    "batch": "batch_std",
    "none": "mean_only",
    False: "mean_only",
}
"""Advantage here, by TRL's scale_rewards."""
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
}
"""Schedules of transformers that are translated, and the `lr_scheduler_kwargs` of each."""


def from_trl(source: object) -> Imported:
    """Translate TRL's settings.

    Prompts longer than `max_prompt_length` are left out here and cut in TRL.

    Args:
        source: A `GRPOConfig`, or a mapping of its fields. Missing fields of a mapping have TRL's
            defaults for a single process.

    Raises:
        ValueError: If `source` has no fields, or with one line for every setting that is unknown,
            not supported or out of range.

    Source: TRL 1.16, `GRPOConfig` and `GRPOTrainer._compute_loss`.
    """
    require("from_trl", "transformers")
    from transformers import TrainingArguments

    # 1. Read the fields.
    given = _given_fields(source)
    generation = given.pop("generation_kwargs", None) or {}
    if not isinstance(generation, Mapping):
        raise ValueError(f"TRL field generation_kwargs must be a mapping, got {shown(generation)}.")
    for name, value in generation.items():
        if name in GENERATION:
            given[GENERATION[name]] = value
    trl = Translation("TRL field", given, FIELDS)
    for name in generation:
        what = "key of TRL field generation_kwargs"
        if name in SAME_GENERATION:
            if generation[name] != SAME_GENERATION[name]:
                trl.refuse(f"generation_kwargs.{name}", f"must be {SAME_GENERATION[name]} here")
        elif name not in GENERATION:
            trl.refused.append(str(unknown_name_error(what, name, GENERATION)))
    # `Translation` leaves out None, which means "no limit" for these fields.
    unlimited = [name for name in UNLIMITED if given.get(name, 0) in (None, "None")]
    for name in unlimited:
        is_used = trl["use_vllm"] and trl["vllm_importance_sampling_cap"] is None
        if is_used or name == "max_completion_length":
            trl.refuse(name, "must be a number here, got None (no limit)")
    infrastructure = {*INFRASTRUCTURE, *TrainingArguments.__dataclass_fields__}
    infrastructure -= {*FIELDS, *UNSUPPORTED}
    reason = "only concerns TRL's own infrastructure"
    trl.check(UNSUPPORTED, dict.fromkeys(sorted(infrastructure), reason))
    reason = "memory is bounded by micro_batch_tokens, with the same results"
    trl.ignore(reason, *GRADIENT_CHECKPOINTING)
    trl.ignore("set sampler to sample with vLLM", "use_vllm")
    # 2. Translate the fields that depend on each other; fields with a target in `FIELDS` follow.
    samples, batch = _batch(trl)
    objective = {**_objective(trl), **_importance(trl)}
    hyperparameters: dict[str, Any] = {"batch_size": batch}
    if objective["loss_type"] == "cispo":
        hyperparameters["clip_high"] = _clip_high(trl)
    betas = (trl["adam_beta1"], trl["adam_beta2"])
    return trl.imported(
        objective=objective,
        hyperparameters=hyperparameters,
        optimizer={"betas": betas, **_schedule(trl)},
        settings={"samples_per_step": samples},
    )


def _given_fields(source: object) -> dict[str, Any]:
    """Return fields by name.

    Of a GRPOConfig: all that are translated, those that differ from their default, and gradient
    checkpointing.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not dataclasses.is_dataclass(source) or isinstance(source, type):
        raise ValueError(
            f"source must be a TRL GRPOConfig or a mapping of its fields, got {class_name(source)}."
        )
    values = {}
    for field in dataclasses.fields(source):
        if field.default_factory is dataclasses.MISSING:
            default = field.default
        else:
            default = field.default_factory()
        value = getattr(source, field.name)
        # On by default in TRL. It costs time there, so that it is listed as ignored here.
        is_checkpointing = field.name in GRADIENT_CHECKPOINTING and value
        if field.name in FIELDS or value != default or is_checkpointing:
            values[field.name] = value
    return values


def _objective(trl: Translation) -> dict[str, Any]:
    """Return the switches of loss, advantages and reference."""
    # 1. Switches that follow from one field each.
    loss_type = trl["loss_type"]
    objective = {
        "advantage_eps": 1e-4,
        "advantage": SCALES[trl["scale_rewards"]],
        "kl_bias_correction": trl["use_bias_correction_kl"] and trl["beta"] != 0,
        "entropy_reduction": "loss",
    }
    if trl["entropy_coef"]:
        # TRL's entropy bonus is a mean over tokens for every loss type.
        objective["entropy_reduction"] = "mean"
    # 2. The loss type. Ratios of whole sequences make TRL's losses those that GSPO or LUSPO have
    #    here.
    if trl["importance_sampling_level"] == "sequence":
        if loss_type not in SEQUENCE_LOSSES:
            known = ", ".join(SEQUENCE_LOSSES)
            trl.refuse(
                "importance_sampling_level",
                f"'sequence' needs loss_type {known}, got {shown(loss_type)}",
            )
        loss_type, objective["aggregation"] = SEQUENCE_LOSSES.get(loss_type, (loss_type, None))
    elif loss_type == "luspo":
        trl.refuse("loss_type", "'luspo' needs importance_sampling_level 'sequence'")
    objective["loss_type"] = loss_type
    # 3. Fields that count only with another one.
    if trl["multi_objective_aggregation"] == "normalize_then_sum":
        objective["advantage"] = "gdpo"
        reason = "multi_objective_aggregation 'normalize_then_sum' has its own scale"
        trl.ignore(reason, "scale_rewards")
    if loss_type == "sapo":
        objective["sapo_tau_positive"] = trl["sapo_temperature_pos"]
        objective["sapo_tau_negative"] = trl["sapo_temperature_neg"]
    else:
        trl.ignore("used by loss_type 'sapo' only", "sapo_temperature_pos", "sapo_temperature_neg")
    if trl["sync_ref_model"]:
        objective["reference"] = "snapshot"
        objective["reference_sync_steps"] = trl["ref_model_sync_steps"]
        objective["reference_mixing"] = trl["ref_model_mixup_alpha"]
    else:
        trl.ignore("used with sync_ref_model only", "ref_model_mixup_alpha", "ref_model_sync_steps")
    return objective


def _importance(trl: Translation) -> dict[str, Any]:
    """Return the importance weights between vLLM and the trainer."""
    mode = "vllm_importance_sampling_mode"
    cap = "vllm_importance_sampling_cap"
    bound = "vllm_importance_sampling_clip_max"
    if not trl["use_vllm"] or not trl["vllm_importance_sampling_correction"]:
        trl.ignore("used by a correction for vLLM only", mode, bound, cap)
        return {}
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if trl[name] != FIELDS[name].default:
            trl.refuse(
                "vllm_importance_sampling_correction",
                f"compares with the whole distribution, got {name} {trl[name]}: set it to False, or"
                f" leave out {name}",
            )
    # Both fields bound the weights; the cap takes precedence.
    largest = trl[bound]
    if trl[cap] is not None:
        largest = trl[cap]
    return {"importance_correction": trl[mode], "importance_cap": largest}


def _batch(trl: Translation) -> tuple[int, int]:
    """Return samples per learning step and per optimizer step."""
    accumulation = trl["gradient_accumulation_steps"]
    generation = trl["generation_batch_size"]
    steps = trl["steps_per_generation"]
    if generation is None:
        steps = steps or accumulation
        generation = trl["per_device_train_batch_size"] * steps
    steps = steps or max(generation // trl["per_device_train_batch_size"], 1)
    # The generation batch of a GRPOConfig is that of all processes; a step has one micro-batch of
    # each process.
    micro, rest = divmod(generation, steps)
    batch = micro * accumulation
    if rest:
        trl.refuse(
            "generation_batch_size",
            f"must be a multiple of steps_per_generation {steps}, got {generation}",
        )
    elif batch > generation:
        trl.refuse(
            "gradient_accumulation_steps",
            f"must be at most steps_per_generation {steps}, got {accumulation}: an optimizer step"
            f" would need more than the {generation} samples of a generation batch",
        )
    return generation, batch


def _clip_high(trl: Translation) -> float | None:
    """Return the upper half-width of clipping of cispo.

    TRL caps the ratio at epsilon_high, by default epsilon. Here the cap is 1 + clip_high.
    """
    cap: float = trl["epsilon"]
    if trl["epsilon_high"] is not None:
        cap = trl["epsilon_high"]
    if cap > 1:
        return cap - 1
    trl.refuse("epsilon_high", f"must be above 1 with loss_type 'cispo', got {cap}: try 5.0")
    return None


def _schedule(trl: Translation) -> dict[str, Any]:
    """Return warm-up and schedule of `Optimizer`.

    Source: transformers 5, `TrainingArguments.get_warmup_steps` and `get_scheduler`.
    """
    kind = trl["lr_scheduler_type"]
    total = max(trl["max_steps"], 0)
    # 1. Read the warm-up: `warmup_steps` below 1, or else `warmup_ratio`, is a fraction of the run.
    if trl["warmup_steps"]:
        name = "warmup_steps"
        trl.ignore("warmup_steps takes precedence", "warmup_ratio")
    else:
        name = "warmup_ratio"
    length = trl[name] or 0
    if length >= 1:
        warmup = int(length)
    else:
        warmup = math.ceil(total * length)
    if kind == "constant":
        trl.ignore("lr_scheduler_type 'constant' has no warm-up", "warmup_steps", "warmup_ratio")
        warmup = 0
    elif 0 < length < 1 and not total:
        trl.ignored[name] = "a fraction of a run of unknown length: set warmup_steps"
    # 2. Return without a decay if there is none, or if it cannot be translated.
    if kind in ("constant", "constant_with_warmup"):
        trl.ignore(f"lr_scheduler_type {kind!r} has no arguments", "lr_scheduler_kwargs")
        return {"warmup_steps": warmup}
    if kind not in SCHEDULES or not total:
        reason = "is not supported"
        if kind in SCHEDULES:
            reason = "needs max_steps"
        trl.ignored["lr_scheduler_type"] = (
            f"{kind!r} {reason}: set schedule and total_steps of the optimizer"
        )
        trl.ignore("its lr_scheduler_type is ignored", "lr_scheduler_kwargs")
        return {"warmup_steps": warmup}
    # 3. Read the shape of the decay and its arguments.
    arguments = trl["lr_scheduler_kwargs"] or {}
    for name in arguments:
        if name not in SCHEDULES[kind]:
            what = "key of TRL field lr_scheduler_kwargs"
            trl.refused.append(str(unknown_name_error(what, name, SCHEDULES[kind])))
    if kind == "linear":
        shape = {"schedule": "linear"}
    else:
        shape = {"schedule": "cosine", "cycles": arguments.get("num_cycles", 0.5)}
    if kind == "cosine_with_min_lr":
        if ("min_lr" in arguments) == ("min_lr_rate" in arguments):
            trl.refuse("lr_scheduler_kwargs", "must have one of min_lr and min_lr_rate")
        if "min_lr_rate" in arguments:
            shape["floor"] = arguments["min_lr_rate"]
        elif trl["learning_rate"]:  # 0 is refused elsewhere
            shape["floor"] = arguments.get("min_lr", 0.0) / trl["learning_rate"]
    # If the run ends within the warm-up, the learning rate never decays.
    if total <= warmup:
        return {"warmup_steps": warmup}
    return {"warmup_steps": warmup, "total_steps": total, **shape}
