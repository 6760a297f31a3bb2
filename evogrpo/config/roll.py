"""ROLL's RLVR configuration as keyword arguments of this package's records."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evogrpo.bounded_yaml import bounded_yaml
from evogrpo.config.loss_types import AGGREGATIONS
from evogrpo.config.trl import Fields, Translation, read_optimizer, training_argument_names

# Keys that are translated, with ROLL's defaults.
DEFAULTS: Mapping[str, Any] = {
    "rollout_batch_size": None,
    "num_return_sequences_in_group": None,
    "prompt_length": None,
    "response_length": None,
    "seed": None,
    "adv_estimator": "gae",
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "gamma": 1.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "add_token_level_kl": False,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "target_kl": None,
    "kl_horizon": 10_000,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "importance_sampling": "token",
    "pg_clip": 0.2,
    "dual_clip_loss": False,
    "whiten_advantages": False,
    "advantage_clip": None,
    "reward_clip": None,
    "reward_norm": None,
    "reward_shift": False,
    "reward_scale": False,
    "norm_mean_type": None,
    "norm_std_type": None,
    "max_len_mask": False,
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0,
    "actor_train": None,
    "actor_infer": None,
}
TRAINING: Mapping[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
}
"""Keys of actor_train.training_args."""
GENERATING: Mapping[str, Any] = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "repetition_penalty": 1.0}
"""Keys of actor_infer.generating_args."""

# Keys whose effect is not implemented: the values without effect, and the reason.
_TERM = "this term of the loss does not exist"
_WEIGHT = "samples have no such weight"
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pg_variant": (("ppo",), "choose ppo"),
    "rl_loss_coef": ((1.0,), _TERM),
    "positive_loss_coef": ((0,), _TERM),
    "use_topr_neg_loss_coef": ((0,), _TERM),
    "difficulty_loss_weight": ((False,), _WEIGHT),
    "length_loss_weight": ((False,), _WEIGHT),
    "error_max_len_clip": ((False,), _WEIGHT),
}
UNSUPPORTED_GENERATING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "completions are sampled"),
    "do_sample": ((True,), "completions are sampled"),
}
REPEATED = ("max_new_tokens", "max_length", "num_return_sequences")  # generating arguments that other keys give
# Keys that change nothing here, with the reason.
_MACHINERY = "only concerns where and how ROLL runs"
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("lambd", "value_clip", "critic", "reward_pretrain"), "there is no critic or reward model"),
    **dict.fromkeys(("reference", "rewards", "reward_model", "validation"), "set up in the task section"),
    **dict.fromkeys(
        (
            *("defaults", "hydra", "exp_name", "rpc_timeout", "output_dir", "logging_dir", "track_with"),
            *("tracker_kwargs", "max_steps", "save_steps", "logging_steps", "eval_steps", "resume_from_checkpoint"),
            *("checkpoint_config", "profiler_output_dir", "system_envs", "num_gpus_per_node", "model_download_type"),
            *("rollout_mock", "is_num_return_sequences_expand", "pretrain", "async_generation_ratio"),
            *("global_template", "offload_nccl", "reward_system_config"),
        ),
        _MACHINERY,
    ),
}

# Advantage switches by the statistics of the mean that is subtracted and of the standard deviation that divides.
_NORMALISED = {
    (norm if mean else None, norm if std else None): {"advantage": "reinforce", "reward_norm": norm, **switch}
    for norm in ("batch", "running", "group")
    for mean, std, switch in ((1, 1, {}), (1, 0, {"reward_shift": True}), (0, 1, {"reward_scale": True}))
}
ADVANTAGES: Mapping[tuple[str | None, str | None], dict[str, Any]] = {
    **_NORMALISED,
    (None, None): {"advantage": "reinforce"},
    ("group", "group"): {"advantage": "outcome"},
    ("group", None): {"advantage": "mean_only"},
    ("group", "batch"): {"advantage": "batch_std"},
    ("group", "running"): {"advantage": "mean_only", "reward_norm": "running", "reward_scale": True},
}


def read_roll(source: Mapping[str, Any] | str | Path) -> Translation:
    """Translate the keys of a ROLL RLVR configuration.

    Keys left out have ROLL's defaults. Sizes and lengths that are left out are not returned, nor are training and
    generating arguments without their section. The order in which rewards become advantages is ROLL's (see
    `Objective`). Aggregation modes do what their names say; ROLL's token-mean forgets the mask, and its
    seq-mean-token-sum-norm divides by the padded width.

    Args:
        source: A mapping of keys, the path of a YAML file, or YAML text. References such as `${response_length}` are
            resolved.

    Returns:
        The keyword arguments, and every key that is unknown or not supported in `refused`.

    Raises:
        ValueError: If `source` has no keys.

    Source: ROLL, `RLVRConfig`, `reward_postprocess`, `compute_advantage` and `ActorWorker.loss_func`.
    """
    values, referenced = _resolved(source)
    fields = Fields("ROLL key", values, DEFAULTS)
    fields.check_names(UNSUPPORTED, IGNORED, referenced)
    fields.check_unsupported(UNSUPPORTED)
    for name in values:
        if name in IGNORED:
            fields.ignore(IGNORED[name], name)
        elif name in referenced and name not in DEFAULTS and name not in UNSUPPORTED:
            fields.ignored[name] = "used by references of other keys only"
    training = _section(fields, "actor_train", "training_args", TRAINING)
    training.check_names(training_argument_names())
    generating = _section(fields, "actor_infer", "generating_args", GENERATING)
    generating.check_names(UNSUPPORTED_GENERATING, REPEATED)
    generating.check_unsupported(UNSUPPORTED_GENERATING)
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    for section, place in ((training, "actor_train.training_args"), (generating, "actor_infer.generating_args")):
        for name in section.values:
            if name in sizes:
                reason = "depends on ROLL's data-parallel size: set batch_size, the samples per optimizer step"
                fields.ignored[f"{place}.{name}"] = reason
            elif name not in section.defaults and name not in UNSUPPORTED_GENERATING:
                fields.ignored[f"{place}.{name}"] = "repeats another key" if name in REPEATED else _MACHINERY

    # 1. The objective.
    beta, kl = _kl(fields)
    clip = fields.number("pg_clip")
    objective = {
        "loss_type": "gspo" if fields.choice("importance_sampling", ("token", "seq")) == "seq" else "grpo",
        "aggregation": fields.choice("loss_agg_mode", AGGREGATIONS),
        "advantage_eps": 1e-6,
        "mask_truncated": fields.flag("max_len_mask"),
        "whiten_advantages": fields.flag("whiten_advantages"),
        "reward_clip": fields.number("reward_clip") or None,  # 0 means no clip in ROLL
        "dual_clip": 1 + 2 * clip if fields.flag("dual_clip_loss") else None,
        **kl,
        **_advantage(fields),
    }
    if fields.flag("difficulty_mask"):
        objective["min_group_reward"] = fields.number("difficulty_low_threshold")
        objective["max_group_reward"] = fields.number("difficulty_high_threshold")
    else:
        fields.ignore("used with difficulty_mask only", "difficulty_low_threshold", "difficulty_high_threshold")

    # 2. Hyperparameters and settings of other sections.
    group = fields.whole("num_return_sequences_in_group")
    hyperparameters = {
        "lr": training.number("learning_rate"),
        "group_size": group,
        "temperature": generating.number("temperature"),
        "beta": beta,
        "update_epochs": fields.whole("ppo_epochs"),
        "max_grad_norm": fields.number("max_grad_norm"),
        "entropy_coef": fields.number("entropy_loss_coef"),
        "advantage_clip": fields.number("advantage_clip"),
        "gamma": fields.number("gamma"),
        "clip_coef": clip,
    }
    prompts = fields.whole("rollout_batch_size", 1)
    if (prompts is None) != (group is None):
        fields.refuse(
            "ROLL keys rollout_batch_size and num_return_sequences_in_group must be given together, got "
            f"{prompts} and {group}"
        )
        prompts = None
    settings = {
        "samples_per_step": None if prompts is None else prompts * group,
        "max_output_tokens": fields.whole("response_length", 1),
        "max_prompt_length": fields.whole("prompt_length", 1),
        "seed": fields.whole("seed"),
        **generating.truncation(),
    }
    return Translation(
        objective=objective,
        hyperparameters={name: value for name, value in hyperparameters.items() if value is not None},
        # The number of optimizer steps depends on ROLL's data-parallel size.
        optimizer=read_optimizer(training, None, constant_warms_up=True) if training.values else {},
        settings={name: value for name, value in settings.items() if value is not None},
        ignored=fields.ignored,
        refused=fields.refused,
    )


def _section(fields: Fields, role: str, name: str, defaults: Mapping[str, Any]) -> Fields:
    """Return the arguments of a role; without the section all defaults are None."""
    found: Any = fields.get(role)
    for place in (role, f"{role}.{name}"):
        if found is not None and not isinstance(found, Mapping):
            fields.refuse(f"ROLL key {place} must be a mapping, got {found!r:.80}")
            found = None
        if place == role and found is not None:
            fields.ignored.update({f"{role}.{each}": _MACHINERY for each in found if each != name})
            found = found.get(name)
    values = dict(found or {})
    return fields.section(f"ROLL key {role}.{name}:", values, defaults if values else dict.fromkeys(defaults))


def _advantage(fields: Fields) -> dict[str, Any]:
    """Return the advantage: adv_estimator decides, then reward_norm or the newer norm_mean_type and norm_std_type."""
    shift, scale = fields.flag("reward_shift"), fields.flag("reward_scale")
    if shift and scale:
        fields.refuse("ROLL keys reward_shift and reward_scale exclude each other: leave both out to do both")
    estimator = fields.get("adv_estimator")
    if estimator not in ("grpo", "reinforce"):
        default = "" if fields.given("adv_estimator") else " (its default)"
        fields.refuse(f"ROLL key adv_estimator must be grpo or reinforce, got {estimator!r:.80}{default}")
        return {}
    norms = ("group", "batch", "running")
    norm, mean, std = (fields.choice(name, norms) for name in ("reward_norm", "norm_mean_type", "norm_std_type"))
    if estimator == "grpo":
        reason = "adv_estimator 'grpo' uses the group's mean and deviation"
        fields.ignore(reason, "reward_norm", "norm_mean_type", "norm_std_type")
        mean = std = "group"
    elif norm is not None:
        if mean is not None or std is not None:
            fields.refuse("ROLL keys reward_norm and norm_mean_type, norm_std_type exclude each other: give one")
        mean = std = norm
    if shift:
        std = None
    if scale and norm == "running" and estimator == "reinforce":
        mean = None
    elif scale:
        fields.ignore("ROLL uses it with reward_norm 'running' only", "reward_scale")
    if (mean, std) not in ADVANTAGES:
        fields.refuse(
            f"ROLL keys norm_mean_type {mean!r} and norm_std_type {std!r} are not supported together: set both to the "
            'same value, one of them to null, or norm_mean_type to "group"'
        )
        return {}
    return ADVANTAGES[mean, std]


def _kl(fields: Fields) -> tuple[float, dict[str, Any]]:
    """Return beta and the switches of the KL term: k3 in the loss, `kl_penalty` in the reward."""
    in_loss = fields.number("kl_loss_coef") if fields.flag("use_kl_loss") else 0.0
    in_reward = fields.number("init_kl_coef") if fields.flag("add_token_level_kl") else 0.0
    if in_loss and in_reward:
        fields.refuse("ROLL keys use_kl_loss and add_token_level_kl exclude each other: beta weighs one KL term")
    if not in_loss:
        fields.ignore("used with use_kl_loss only", "kl_loss_coef")
    if not in_reward:
        fields.ignore("used with add_token_level_kl only", "init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
        return in_loss, {}
    estimator = {"kl": "k1", "abs": "abs", "mse": "k2"}
    penalty = fields.choice("kl_penalty", tuple(estimator))
    switches: dict[str, Any] = {"kl_placement": "reward", "kl_estimator": estimator[penalty]}
    if fields.given("target_kl"):
        switches |= {"kl_target": fields.number("target_kl"), "kl_horizon": fields.whole("kl_horizon")}
    else:
        fields.ignore("used with target_kl only", "kl_horizon")
    return in_reward, switches


# ---- files, whose values may refer to other keys, as in `${response_length}`

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MAX_REFERENCES, MAX_CHARACTERS = 10_000, 100_000


def _resolved(source: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the keys with references resolved, and the names of the top-level keys that are referred to.

    The number of references is bounded, since references that name each other can double a value at every level.
    """
    if isinstance(source, str) and "\n" not in source and ":" not in source:
        source = Path(source)
    if isinstance(source, Path):
        source = source.read_text(encoding="utf-8")
    values = bounded_yaml(source, "ROLL's configuration") if isinstance(source, str) else source
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a mapping of ROLL keys, the path of a YAML file or YAML text, got {values!r:.80}")
    left = MAX_REFERENCES

    def resolve(value: Any, trail: tuple[str, ...] = ()) -> Any:
        if isinstance(value, Mapping):
            return {key: resolve(each, trail) for key, each in value.items()}
        if isinstance(value, list):
            return [resolve(each, trail) for each in value]
        if not isinstance(value, str):
            return value
        if whole := REFERENCE.fullmatch(value):  # keeps the type of the value
            return look_up(whole[1], trail)
        text = REFERENCE.sub(lambda found: str(look_up(found[1], trail)), value)
        if len(text) > max(len(value), MAX_CHARACTERS):
            raise ValueError(f"ROLL keys refer to each other: a text has more than {MAX_CHARACTERS:,} characters")
        return text

    def look_up(name: str, trail: tuple[str, ...]) -> Any:
        nonlocal left
        if name in trail:
            raise ValueError(f"ROLL keys refer to each other in a circle: {' -> '.join((*trail, name))}")
        left -= 1
        if left < 0:
            raise ValueError(f"ROLL keys refer to each other more than {MAX_REFERENCES:,} times")
        found: Any = values
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return f"${{{name}}}"
            found = found[part]
        return resolve(found, (*trail, name))

    referenced = frozenset(name.split(".")[0] for name in _references(values))
    return {str(key): resolve(value) for key, value in values.items()}, referenced


def _references(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from REFERENCE.findall(value)
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _references(each)
