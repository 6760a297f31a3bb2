"""TRL's GRPOConfig, and transformers' training arguments in it, as keyword arguments of this package's records."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.checks import finite_number, unknown_name_error, whole_number

# Fields that are translated, with TRL's defaults.
DEFAULTS: Mapping[str, Any] = {
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "max_steps": -1,
    "seed": 42,
    "num_generations": 8,
    "max_completion_length": 512,
    "max_prompt_length": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "importance_sampling_level": "token",
    "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_cap": None,
    "use_bias_correction_kl": True,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
}
# Fields whose effect is not implemented: the values without effect (the first is TRL's default), and advice.
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "generation_kwargs": ((None, {}), "give top_k, top_p and the like by name"),
    "chat_template_kwargs": ((None, {}), "give it to HuggingFaceGym(chat_template_kwargs=...)"),
    "vllm_structured_outputs_regex": ((None,), "sampling is not constrained by a grammar"),
    "vllm_guided_decoding_regex": ((None,), "sampling is not constrained by a grammar"),
    "router_aux_loss_coef": ((None, 0), "there is no auxiliary loss"),
    "max_tool_calling_iterations": ((None,), "there are no tool calls"),
    "neftune_noise_alpha": ((None, 0), "embeddings get no noise"),
    "off_policy_mask_threshold": ((None,), "samples come from the current policy"),
    "use_adaptive_entropy": ((False,), "the entropy coefficient is fixed or evolves"),
    "vllm_importance_sampling_clip_min": ((None,), "importance weights have no lower bound"),
}
# Fields of GRPOConfig that change nothing here, or that only unsupported features read.
INFRASTRUCTURE = (
    *("model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32", "num_generations_eval"),
    *("ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of", "cache_implementation", "vllm_mode"),
    *("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    *("vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
    *("vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_dtype", "vllm_device", "log_completions"),
    *("log_multimodal", "num_completions_to_print", "log_unique_prompts", "wandb_log_unique_prompts"),
    *("log_completions_hub_repo", "use_transformers_continuous_batching", "use_transformers_paged"),
    *("transformers_continuous_batching_config", "use_liger_loss", "use_liger_kernel"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
)
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
# Schedules of transformers that are translated, and the `lr_scheduler_kwargs` of each.
SCHEDULE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Settings of another library as keyword arguments.

    Attributes:
        objective: Arguments of `Objective`.
        hyperparameters: Arguments of `Hyperparameters`.
        optimizer: Arguments of `Optimizer`.
        settings: Settings of other sections of a configuration, by name.
        ignored: Fields that were given and have no counterpart, with the reason.
        refused: One sentence for each field that is unknown, invalid or not supported.
    """

    objective: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    ignored: Mapping[str, str]
    refused: Sequence[str]


@dataclass
class Fields:
    """Fields of another library's settings, checked as they are read.

    A refused field is noted and its default is used, so that one error names all refused fields.

    Attributes:
        kind: Name of a field in messages, such as "TRL field".
        values: Given values by name; None counts as left out.
        defaults: The other library's defaults.
        ignored: Reasons by name, filled by `ignore`.
        refused: Sentences, filled by `refuse`.
    """

    kind: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    ignored: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def section(self, kind: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> "Fields":
        """Return the fields of a section, with shared lists of ignored and refused fields."""
        return Fields(kind, values, defaults, self.ignored, self.refused)

    def refuse(self, reason: str) -> None:
        """Note one sentence about a field that cannot be translated."""
        if reason not in self.refused:
            self.refused.append(reason)

    def ignore(self, reason: str, *names: str) -> None:
        """Note given fields that differ from their default and change nothing here."""
        for name in names:
            if self.given(name) and (name not in self.defaults or self.values[name] != self.defaults[name]):
                self.ignored[name] = reason

    def check_names(self, *known: Iterable[str]) -> None:
        """Refuse unknown names."""
        names = [name for group in (self.defaults, *known) for name in group]
        for name in self.values:
            if name not in names:
                self.refuse(str(unknown_name_error(self.kind, name, names)))

    def check_unsupported(self, unsupported: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Refuse fields whose effect is not implemented, unless their value has no effect."""
        for name, (neutral, reason) in unsupported.items():
            if self.given(name) and self.values[name] not in neutral:
                self.refuse(f"{self.kind} {name} is not supported, got {self.values[name]!r:.80}: {reason}")

    def given(self, name: str) -> bool:
        """Return True for a value that is neither None nor the text "None", which YAML does not read as null."""
        value = self.values.get(name)
        return value is not None and value != "None"

    def get(self, name: str) -> Any:
        """Return a field, or its default."""
        return self.values[name] if self.given(name) else self.defaults[name]

    def number(self, name: str) -> Any:
        """Return a finite number, or None where that is the default. Reads text, since YAML takes 1e-6 for text."""

        def parse(what: str, value: Any) -> float:
            with suppress(ValueError):
                value = float(value) if isinstance(value, str) else value
            return finite_number(what, value)

        return self._checked(name, parse)

    def whole(self, name: str, minimum: int | None = None) -> Any:
        """Return an integer of at least `minimum`, or None where that is the default."""

        def check(what: str, value: Any) -> int:
            number = whole_number(what, value)
            if minimum is not None and number < minimum:
                raise ValueError(f"{what} must be at least {minimum}, got {number}")
            return number

        return self._checked(name, check)

    def flag(self, name: str) -> Any:
        """Return a boolean."""

        def check(what: str, value: Any) -> bool:
            if not isinstance(value, bool):
                raise ValueError(f"{what} must be true or false, got {value!r:.80}")
            return value

        return self._checked(name, check)

    def choice(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of `choices`."""

        def check(what: str, value: Any) -> Any:
            if value not in choices:
                raise unknown_name_error(f"value of {what}:", value, [str(choice) for choice in choices])
            return value

        return self._checked(name, check)

    def _checked(self, name: str, check: Callable[[str, Any], Any]) -> Any:
        value = self.get(name)
        if value is None:
            return None
        try:
            return check(f"{self.kind} {name}", value)
        except ValueError as error:
            self.refuse(str(error))
            return self.defaults[name]

    def truncation(self) -> dict[str, Any]:
        """Return the sampling options that differ from the whole distribution. Other libraries' top_k -1 means all."""
        top_k = self.whole("top_k")
        options = {
            "top_k": (None if top_k == -1 else top_k, 0),
            "top_p": (self.number("top_p"), 1.0),
            "min_p": (self.number("min_p") if "min_p" in self.defaults else None, 0.0),
            "repetition_penalty": (self.number("repetition_penalty"), 1.0),
        }
        return {name: value for name, (value, neutral) in options.items() if value is not None and value != neutral}


def read_trl(source: object) -> Translation:
    """Translate TRL's settings.

    Args:
        source: A `GRPOConfig`, or a mapping of its fields. Fields left out of a mapping have TRL's defaults, except
            that the batch is that of one process unless `generation_batch_size` is given.

    Returns:
        The keyword arguments, and every field that is unknown or not supported in `refused`. Prompts longer than
        `max_prompt_length` are left out here and cut in TRL.

    Raises:
        ValueError: If `source` has no fields.

    Source: TRL 1.16, `GRPOConfig` and `GRPOTrainer._compute_loss`.
    """
    fields = Fields("TRL field", _values(source), DEFAULTS)
    fields.check_names(UNSUPPORTED, INFRASTRUCTURE, training_argument_names())
    fields.check_unsupported(UNSUPPORTED)

    # 1. The objective.
    loss_type, aggregation = _loss(fields)
    entropy_coef, beta = fields.number("entropy_coef"), fields.number("beta")
    objective: dict[str, Any] = {
        "loss_type": loss_type,
        "aggregation": aggregation,
        "advantage_eps": 1e-4,
        "mask_truncated": fields.flag("mask_truncated_completions"),
        "delta": fields.number("delta"),
        "top_entropy_quantile": fields.number("top_entropy_quantile"),
        "kl_bias_correction": fields.flag("use_bias_correction_kl") and beta != 0,
        # TRL's entropy bonus is a mean over tokens for every loss type.
        "entropy_reduction": "mean" if entropy_coef else "loss",
        **_importance(fields),
    }
    scale = fields.choice("scale_rewards", ("group", "batch", "none", True, False))
    scales = {"group": "outcome", True: "outcome", "batch": "batch_std", "none": "mean_only", False: "mean_only"}
    objective["advantage"] = scales[scale]
    sums = ("sum_then_normalize", "normalize_then_sum")
    if fields.choice("multi_objective_aggregation", sums) == "normalize_then_sum":
        fields.ignore("multi_objective_aggregation 'normalize_then_sum' has its own scale", "scale_rewards")
        objective["advantage"] = "gdpo"
    if loss_type == "sapo":
        objective["sapo_tau_positive"] = fields.number("sapo_temperature_pos")
        objective["sapo_tau_negative"] = fields.number("sapo_temperature_neg")
    else:
        fields.ignore("used by loss_type 'sapo' only", "sapo_temperature_pos", "sapo_temperature_neg")
    if fields.flag("sync_ref_model"):
        objective["reference"] = "snapshot"
        objective["reference_sync_steps"] = fields.whole("ref_model_sync_steps")  # optimizer steps, as in TRL
        objective["reference_mixing"] = fields.number("ref_model_mixup_alpha")
    else:
        fields.ignore("used with sync_ref_model only", "ref_model_mixup_alpha", "ref_model_sync_steps")

    # 2. Hyperparameters and settings of other sections.
    samples, batch = _batch(fields)
    hyperparameters = {
        "lr": fields.number("learning_rate"),
        "clip_coef": fields.number("epsilon"),
        "clip_high": _clip_high(fields, loss_type),
        "group_size": fields.whole("num_generations"),
        "beta": beta,
        "temperature": fields.number("temperature"),
        "update_epochs": fields.whole("num_iterations"),
        "max_grad_norm": fields.number("max_grad_norm"),
        "batch_size": batch,
        "entropy_coef": entropy_coef,
    }
    weights = fields.get("reward_weights")
    if weights is not None:
        try:
            weights = [finite_number("TRL field reward_weights", weight) for weight in weights]
        except (TypeError, ValueError):
            fields.refuse(f"TRL field reward_weights must be a list of numbers, got {weights!r:.80}")
    settings = {
        "samples_per_step": samples,
        "max_output_tokens": fields.whole("max_completion_length", 1),
        "max_prompt_length": fields.whole("max_prompt_length", 1),
        "reward_weights": weights,
        "seed": fields.whole("seed"),
        **fields.truncation(),
    }

    # 3. The optimizer, and everything that only concerns TRL's own machinery.
    total = fields.whole("max_steps")
    optimizer = read_optimizer(fields, total if total > 0 else None, constant_warms_up=False)
    fields.ignore("sampling does not use vLLM", "use_vllm")
    fields.ignore("memory is bounded by micro_batch_tokens, with the same results", *CHECKPOINTING)
    for name, value in fields.values.items():
        if name not in DEFAULTS and name not in UNSUPPORTED and value is not None:
            fields.ignored.setdefault(name, "only concerns TRL's own machinery")
    return Translation(
        objective=objective,
        hyperparameters={name: value for name, value in hyperparameters.items() if value is not None},
        optimizer=optimizer,
        settings={name: value for name, value in settings.items() if value is not None},
        ignored=fields.ignored,
        refused=fields.refused,
    )


def _values(source: object) -> dict[str, Any]:
    """Return given fields by name: of a GRPOConfig those that are translated, and those not at their default."""
    if isinstance(source, Mapping):
        return dict(source)
    if not dataclasses.is_dataclass(source) or isinstance(source, type):
        raise ValueError(f"expected a TRL GRPOConfig or a mapping of its fields, got {type(source).__name__}")
    values = {}
    for each in dataclasses.fields(source):
        default = each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        value = getattr(source, each.name)
        if each.name in DEFAULTS or value != default or (each.name in CHECKPOINTING and value):
            values[each.name] = value
    return values


def _batch(fields: Fields) -> tuple[int, int]:
    """Return samples per learning step and per optimizer step."""
    per_device = fields.whole("per_device_train_batch_size", 1)
    accumulation = fields.whole("gradient_accumulation_steps", 1)
    steps = fields.whole("steps_per_generation", 1)
    generation = fields.whole("generation_batch_size", 1)
    if generation is None:
        steps = accumulation if steps is None else steps
        generation = per_device * steps
    elif steps is None:
        steps = max(generation // per_device, 1)
    # A GRPOConfig's generation batch is that of all processes. One of its steps is one micro-batch of each process.
    micro, rest = divmod(generation, steps)
    batch = micro * accumulation
    if rest or batch > generation:
        fields.refuse(
            f"TRL field generation_batch_size ({generation}) must be a multiple of steps_per_generation ({steps}) and "
            f"at least one optimizer step: lower gradient_accumulation_steps, got {accumulation}"
        )
    return generation, batch


def _loss(fields: Fields) -> tuple[str, str | None]:
    """Return the loss type, and the aggregation where it is not the loss type's own."""
    loss = fields.choice("loss_type", ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"))
    level = fields.choice("importance_sampling_level", ("token", "sequence"))
    if loss == "vespo":
        fields.refuse("TRL field loss_type 'vespo' is not supported: choose another loss type")
        return "dapo", None
    if level == "token":
        if loss == "luspo":
            fields.refuse("TRL field loss_type 'luspo' needs importance_sampling_level 'sequence', as in its paper")
        return str(loss), None
    sequence: dict[str, tuple[str, str | None]] = {
        "grpo": ("gspo", None),
        "luspo": ("luspo", None),
        "dapo": ("gspo", "token-mean"),
        "bnpo": ("gspo", "token-mean"),
        "dr_grpo": ("gspo", "seq-mean-token-sum-norm"),
    }
    if loss not in sequence:
        known = ", ".join(sequence)
        fields.refuse(f"TRL field importance_sampling_level 'sequence' needs loss_type {known}, got {loss!r}")
        return str(loss), None
    return sequence[loss]


def _clip_high(fields: Fields, loss_type: str) -> float | None:
    high: float | None = fields.number("epsilon_high")
    if loss_type != "cispo":
        return high
    # TRL caps the ratio at epsilon_high, by default epsilon. Here the cap is 1 + clip_high.
    cap = fields.number("epsilon") if high is None else high
    if cap <= 1:
        fields.refuse(f"TRL field epsilon_high must be above 1 with loss_type 'cispo', got {cap}: try 5.0 (ScaleRL)")
        return high
    return float(cap - 1)


def _importance(fields: Fields) -> dict[str, Any]:
    """Return the importance weights between vLLM and the trainer."""
    mode, cap, bound = (f"vllm_importance_sampling_{part}" for part in ("mode", "cap", "clip_max"))
    if not fields.flag("use_vllm") or not fields.flag("vllm_importance_sampling_correction"):
        fields.ignore("used by a correction for vLLM only", mode, bound, cap)
        return {}
    if bound in fields.values and not fields.given(bound) and not fields.given(cap):
        fields.refuse(f"TRL field {bound} must be a number: importance weights need an upper bound")
    return {
        "importance_correction": fields.choice(
            mode, ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        ),
        "importance_cap": fields.number(cap if fields.given(cap) else bound),
    }


# ---- transformers' training arguments


def training_argument_names() -> tuple[str, ...]:
    """Return the names of the fields of transformers' TrainingArguments."""
    from transformers import TrainingArguments

    return tuple(TrainingArguments.__dataclass_fields__)


def read_optimizer(fields: Fields, total_steps: int | None, *, constant_warms_up: bool) -> dict[str, Any]:
    """Return the arguments of `Optimizer` that transformers' training arguments give.

    Args:
        fields: Training arguments.
        total_steps: Optimizer steps of the run, if known.
        constant_warms_up: Warm up with the schedule "constant" as well; transformers does not.

    Source: transformers 5, `TrainingArguments.get_warmup_steps` and `get_scheduler`.
    """
    kind = fields.get("lr_scheduler_type")
    kind = str(getattr(kind, "value", kind))  # a member of an enumeration, or its value
    name = fields.values.get("optim") or "adamw"
    if not str(getattr(name, "value", name)).startswith("adamw"):
        fields.check_unsupported({"optim": (("adamw_torch",), "the optimizer is AdamW; leave it out")})
    warmup = _warmup(fields, total_steps)
    if kind == "constant" and warmup and not constant_warms_up:
        names = [name for name in ("warmup_steps", "warmup_ratio") if fields.given(name) and fields.number(name)]
        fields.ignored.update(dict.fromkeys(names, "lr_scheduler_type 'constant' has no warm-up"))
        warmup = 0
    return {
        "betas": (fields.number("adam_beta1"), fields.number("adam_beta2")),
        "eps": fields.number("adam_epsilon"),
        "weight_decay": fields.number("weight_decay"),
        "warmup_steps": warmup,
        **_decay(fields, kind, total_steps, warmup),
    }


def _warmup(fields: Fields, total_steps: int | None) -> int:
    """Return warm-up steps; `warmup_steps` below 1, or else `warmup_ratio`, is a fraction of the run."""
    steps = fields.number("warmup_steps") or 0
    name, share = ("warmup_ratio", fields.number("warmup_ratio") or 0) if steps == 0 else ("warmup_steps", steps)
    if steps:
        fields.ignore("warmup_steps takes precedence", "warmup_ratio")
    if steps >= 1 or share <= 0:
        return int(steps)
    if total_steps is None:
        fields.ignored[name] = "a fraction of a run of unknown length: set warmup_steps"
        return 0
    return math.ceil(total_steps * share)


def _decay(fields: Fields, kind: str, total_steps: int | None, warmup: int) -> dict[str, Any]:
    """Return schedule, cycles, floor and total_steps of `Optimizer`."""
    if kind in ("constant", "constant_with_warmup"):
        fields.ignore(f"lr_scheduler_type {kind!r} has no arguments", "lr_scheduler_kwargs")
        return {}
    if kind not in SCHEDULE_ARGUMENTS or total_steps is None:
        reason = "is not supported" if kind not in SCHEDULE_ARGUMENTS else "needs max_steps"
        fields.ignored["lr_scheduler_type"] = f"{kind!r} {reason}: set schedule and total_steps of the optimizer"
        fields.ignore("its lr_scheduler_type is ignored", "lr_scheduler_kwargs")
        return {}
    what = f"{fields.kind} lr_scheduler_kwargs"

    # 1. The arguments of the schedule, which may be JSON text.
    given = fields.get("lr_scheduler_kwargs")
    if isinstance(given, str):
        with suppress(json.JSONDecodeError):  # refused below
            given = json.loads(given)
    arguments: dict[str, float] = {}
    if given is not None and not isinstance(given, Mapping):
        fields.refuse(f"{what} must be a mapping, got {given!r:.80}")
        given = None
    for name, value in (given or {}).items():
        if name not in SCHEDULE_ARGUMENTS[kind]:
            fields.refuse(str(unknown_name_error(f"key of {what} for {kind!r}:", name, SCHEDULE_ARGUMENTS[kind])))
        elif value is not None:
            try:
                arguments[name] = finite_number(f"{what}: {name}", value)
            except ValueError as error:
                fields.refuse(str(error))

    # 2. The shape.
    shape: dict[str, Any] = {"schedule": "cosine"}
    lr = fields.number("learning_rate")
    if kind == "linear":
        shape = {"schedule": "linear"}
    elif kind == "polynomial":
        shape = {"schedule": "linear", "floor": arguments.get("lr_end", 1e-7) / lr}
        if arguments.get("power", 1.0) != 1.0:
            fields.refuse(f"{what}: power must be 1, got {arguments['power']}: choose lr_scheduler_type 'cosine'")
    elif kind == "cosine_with_restarts":
        if arguments.get("num_cycles", 1) != 1:
            fields.refuse(f"{what}: num_cycles of 'cosine_with_restarts' must be 1, got {arguments['num_cycles']}")
    else:
        shape["cycles"] = arguments.get("num_cycles", 0.5)
        if kind == "cosine_with_min_lr":
            if ("min_lr" in arguments) == ("min_lr_rate" in arguments):
                fields.refuse(f"{what} of 'cosine_with_min_lr' must have one of min_lr and min_lr_rate")
                return {}
            shape["floor"] = arguments["min_lr_rate"] if "min_lr_rate" in arguments else arguments["min_lr"] / lr
    # A run that ends within its warm-up never decays.
    return {} if total_steps <= warmup else {**shape, "total_steps": total_steps}
