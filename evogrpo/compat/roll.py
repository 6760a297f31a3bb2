"""ROLL's RLVR configuration as records of this package."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
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
from evogrpo.functional.loss_types import AGGREGATIONS, REWARD_NORMS
from evogrpo.safe_parsing import load_yaml, read_regular
from evogrpo.text import shown
from evogrpo.validation import flag, whole_number

TRAINING = "actor_train.training_args"
GENERATING = "actor_infer.generating_args"
SECTIONS = (TRAINING, GENERATING)
"""Sections of ROLL's roles that are translated."""
KLS = {"kl": "k1", "abs": "abs", "mse": "k2"}
"""KL estimator here, by ROLL's kl_penalty."""
KEYS: Mapping[str, Key] = {
    "rollout_batch_size": Key(None, count),
    "num_return_sequences_in_group": Key(None, whole_number, "hyperparameters.group_size"),
    "prompt_length": Key(None, count, "settings.max_prompt_length"),
    "response_length": Key(None, count, "settings.max_output_tokens"),
    "seed": Key(None, whole_number, "settings.seed"),
    "ppo_epochs": Key(1, whole_number, "hyperparameters.update_epochs"),
    "max_grad_norm": Key(1.0, number, "hyperparameters.max_grad_norm"),
    "gamma": Key(1.0, number, "hyperparameters.gamma"),
    "entropy_loss_coef": Key(0.0, number, "hyperparameters.entropy_coef"),
    "advantage_clip": Key(None, number, "hyperparameters.advantage_clip"),
    "pg_clip": Key(0.2, number, "hyperparameters.clip_coef"),
    "dual_clip_loss": Key(False, flag),
    "importance_sampling": Key("token", one_of("token", "seq")),
    "loss_agg_mode": Key("seq-mean-token-mean", one_of(*AGGREGATIONS), "objective.aggregation"),
    "max_len_mask": Key(False, flag, "objective.mask_truncated"),
    "whiten_advantages": Key(False, flag, "objective.whiten_advantages"),
    "reward_clip": Key(None, number),
    "difficulty_mask": Key(False, flag),
    "difficulty_low_threshold": Key(0.0, number),
    "difficulty_high_threshold": Key(1.0, number),
    "use_kl_loss": Key(False, flag),
    "kl_loss_coef": Key(0.0, number),
    "add_token_level_kl": Key(False, flag),
    "init_kl_coef": Key(0.2, number),
    "kl_penalty": Key("kl", one_of(*KLS)),
    "target_kl": Key(None, number),
    "kl_horizon": Key(10_000, whole_number),
    "adv_estimator": Key("gae", lambda what, value: value),
    "reward_norm": Key(None, one_of(*REWARD_NORMS)),
    "norm_mean_type": Key(None, one_of(*REWARD_NORMS)),
    "norm_std_type": Key(None, one_of(*REWARD_NORMS)),
    "reward_shift": Key(False, flag),
    "reward_scale": Key(False, flag),
    # The defaults of these two sections are used only if the configuration has the section.
    f"{TRAINING}.learning_rate": Key(5e-5, number, "hyperparameters.lr"),
    f"{TRAINING}.weight_decay": Key(0.0, number, "optimizer.weight_decay"),
    f"{TRAINING}.warmup_steps": Key(0, whole_number, "optimizer.warmup_steps"),
    f"{GENERATING}.temperature": Key(0.95, number, "hyperparameters.temperature"),
    f"{GENERATING}.top_p": Key(0.7, number, "settings.top_p"),
    f"{GENERATING}.top_k": Key(50, top_k, "settings.top_k"),
    f"{GENERATING}.repetition_penalty": Key(1.0, number, "settings.repetition_penalty"),
}
"""Keys that are translated."""
UNSUPPORTED: Unsupported = {
    "pg_variant": (("ppo",), "choose ppo"),
    "positive_loss_coef": ((0,), "this term of the loss does not exist"),
    "use_topr_neg_loss_coef": ((0,), "this term of the loss does not exist"),
    "rl_loss_coef": ((1.0,), "the policy loss has no weight"),
    "difficulty_loss_weight": ((False,), "samples have no weight"),
    "length_loss_weight": ((False,), "samples have no weight"),
    "error_max_len_clip": ((False,), "samples have no weight"),
    f"{GENERATING}.num_beams": ((1,), "completions are sampled"),
    f"{GENERATING}.do_sample": ((True,), "completions are sampled"),
}
"""Keys whose effect is not implemented."""
_INFRASTRUCTURE = "only concerns where and how ROLL runs"
_IGNORED = {
    "there is no critic or reward model": "lambd value_clip critic reward_pretrain",
    "set up in the task section": "reference rewards reward_model validation",
    "depends on ROLL's data-parallel size: set batch_size, the samples per optimizer step": (
        f"{TRAINING}.per_device_train_batch_size {TRAINING}.gradient_accumulation_steps"
    ),
    "repeats another key": f"{GENERATING}.max_new_tokens {GENERATING}.num_return_sequences",
    _INFRASTRUCTURE: (
        "defaults hydra exp_name rpc_timeout output_dir logging_dir track_with tracker_kwargs"
        " max_steps save_steps logging_steps eval_steps resume_from_checkpoint checkpoint_config"
        " profiler_output_dir system_envs num_gpus_per_node model_download_type rollout_mock"
        " rollout_dump_dir is_num_return_sequences_expand pretrain tag_to_template"
        " async_generation_ratio global_template offload_nccl reward_system_config"
        f" {TRAINING}.num_train_epochs {TRAINING}.bf16"
    ),
}
IGNORED: dict[str, str] = {}
for _reason, _names in _IGNORED.items():
    IGNORED |= dict.fromkeys(_names.split(), _reason)
"""Keys that change nothing here, with the reason."""
GROUP_BASELINES: Mapping[str | None, dict[str, Any]] = {
    "group": {"advantage": "outcome"},
    "batch": {"advantage": "batch_std"},
    "running": {"advantage": "mean_only", "reward_norm": "running", "reward_scale": True},
    None: {"advantage": "mean_only"},
}
"""Switches of `Objective` where the group's mean is subtracted, by the dividing deviation."""


def from_roll(source: Mapping[str, Any] | str | Path) -> Imported:
    """Translate the keys of a ROLL RLVR configuration.

    Keys left out have ROLL's defaults. The order in which rewards become advantages is ROLL's (see
    `Objective`). Aggregation modes follow their names. ROLL's own code differs: its token-mean
    ignores the mask, and its seq-mean-token-sum-norm divides by the padded width.

    Args:
        source: A mapping of keys, the path of a YAML file, or YAML text. References such as
            `${response_length}` are resolved.

    Raises:
        ValueError: If `source` has no keys, references are circular, or with one line for every
            setting that is unknown, not supported or out of range.

    Source: ROLL, `RLVRConfig`, `reward_postprocess`, `compute_advantage` and
    `ActorWorker.loss_func`.
    """
    # 1. Read the keys, and the samples of a learning step.
    roll = _read(_load(source))
    prompts = roll["rollout_batch_size"]
    group_size = roll["num_return_sequences_in_group"]
    samples = None
    if prompts is not None and group_size is not None:
        samples = prompts * group_size
    elif prompts is not None or group_size is not None:
        roll.refused.append(
            "ROLL keys rollout_batch_size and num_return_sequences_in_group must be given together,"
            f" got {prompts} and {group_size}"
        )
    # 2. Translate the keys that depend on each other; keys with a target in `KEYS` follow.
    beta, kl = _kl(roll)
    loss_type = "grpo"
    if roll["importance_sampling"] == "seq":
        loss_type = "gspo"
    objective = {
        "advantage_eps": 1e-6,
        "loss_type": loss_type,
        "reward_clip": roll["reward_clip"] or None,  # 0 = no bound
        **_advantage(roll),
        **kl,
    }
    if roll["dual_clip_loss"]:
        # ROLL bounds the loss of negative advantages at this multiple, which has no key.
        objective["dual_clip"] = 1 + 2 * roll["pg_clip"]
    # 3. Thresholds count with their switch only.
    thresholds = ("difficulty_low_threshold", "difficulty_high_threshold")
    if roll["difficulty_mask"]:
        objective["min_group_reward"] = roll["difficulty_low_threshold"]
        objective["max_group_reward"] = roll["difficulty_high_threshold"]
    else:
        roll.ignore("used with difficulty_mask only", *thresholds)
    return roll.imported(
        objective=objective,
        hyperparameters={"beta": beta},
        settings={"samples_per_step": samples},
    )


def _load(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return the keys of a mapping, of a YAML file or of YAML text."""
    if isinstance(source, str) and "\n" not in source:
        # A single line without a colon is a path, and so is the name of a file.
        is_file = os.path.isfile(source)  # noqa: PTH113 (no error for text that is too long)
        if is_file or ":" not in source:
            source = Path(source)
    if isinstance(source, Path):
        source = read_regular(source).decode("utf-8")
    values: Any = source
    if isinstance(source, str):
        values = load_yaml(source, "ROLL's configuration")
    if not isinstance(values, Mapping):
        raise ValueError(
            "source must be a mapping of ROLL keys, the path of a YAML file or YAML text, got"
            f" {shown(values)}."
        )
    return values


def _read(values: Mapping[str, Any]) -> Translation:
    """Return the parsed keys, with those of the two translated sections by dotted name."""
    # 1. Flatten the two sections. The other keys of their roles are infrastructure.
    given = {str(name): value for name, value in values.items()}
    table = dict(KEYS)
    ignored = dict(IGNORED)
    refused = []
    for section in SECTIONS:
        role, name = section.split(".")
        role_values = given.pop(role, None)
        section_values = None
        if isinstance(role_values, Mapping):
            section_values = role_values.get(name)
            # Their values are not read, so the reason takes their place.
            for key in role_values.keys() - {name}:
                given[f"{role}.{key}"] = _INFRASTRUCTURE
                ignored[f"{role}.{key}"] = _INFRASTRUCTURE
        for path, mapping in ((role, role_values), (section, section_values)):
            if mapping is not None and not isinstance(mapping, Mapping):
                refused.append(f"ROLL key {path} must be a mapping, got {shown(mapping)}")
        if section_values and isinstance(section_values, Mapping):
            for key, value in section_values.items():
                given[f"{section}.{key}"] = value
        else:
            # Do not use the defaults of a missing section.
            table = {key: entry for key, entry in table.items() if not key.startswith(section)}
    # 2. Resolve references such as ${name}. Keys that exist only for them are ignored; unknown keys
    #    are refused.
    referenced = {name.split(".")[0] for name in REFERENCE.findall(str(values))}
    referenced -= {*KEYS, *UNSUPPORTED, *IGNORED}
    ignored |= dict.fromkeys(referenced, "only used by references of other keys")
    resolved = {name: _resolved(value, values) for name, value in given.items()}
    # 3. Parse and check them.
    roll = Translation("ROLL key", resolved, table)
    roll.refused += refused
    roll.check(UNSUPPORTED, ignored)
    return roll


def _kl(roll: Translation) -> tuple[float, dict[str, Any]]:
    """Return the weight of the KL, which is in the loss or in rewards, and its switches."""
    # 1. Read the two coefficients, of which one may be above 0.
    in_loss = 0.0
    in_reward = 0.0
    if roll["use_kl_loss"]:
        in_loss = roll["kl_loss_coef"]
    if roll["add_token_level_kl"]:
        in_reward = roll["init_kl_coef"]
    if in_loss and in_reward:
        roll.refused.append(
            "ROLL keys use_kl_loss and add_token_level_kl exclude each other: beta weighs one KL"
            " term"
        )
    # 2. Name the given keys that have no effect.
    if not in_loss:
        roll.ignore("used with use_kl_loss only", "kl_loss_coef")
    if roll["target_kl"] is None:
        roll.ignore("used with target_kl only", "kl_horizon")
    if not in_reward:
        names = ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
        roll.ignore("used with add_token_level_kl only", *names)
        return in_loss, {}
    # 3. Return the switches of a KL in rewards.
    switches = {"kl_placement": "reward", "kl_estimator": KLS[roll["kl_penalty"]]}
    if roll["target_kl"] is not None:
        switches["kl_target"] = roll["target_kl"]
        switches["kl_horizon"] = roll["kl_horizon"]
    return in_loss or in_reward, switches


def _advantage(roll: Translation) -> dict[str, Any]:
    """Return the switches for the advantage.

    They follow from adv_estimator, and from reward_norm or the newer norm_mean_type and
    norm_std_type.
    """
    # 1. Choose the statistics of the subtracted mean and of the dividing standard deviation; None =
    #    none.
    estimator = roll["adv_estimator"]
    norm = roll["reward_norm"]
    mean = roll["norm_mean_type"]
    std = roll["norm_std_type"]
    if roll["reward_shift"] and roll["reward_scale"]:
        roll.refused.append(
            "ROLL keys reward_shift and reward_scale exclude each other: remove one of them"
        )
    if estimator not in ("grpo", "reinforce"):
        roll.refuse("adv_estimator", f"must be grpo or reinforce, got {shown(estimator)}")
        return {}
    if estimator == "grpo":
        reason = "adv_estimator 'grpo' uses the group's mean and deviation"
        roll.ignore(reason, "reward_norm", "norm_mean_type", "norm_std_type")
        mean = "group"
        std = "group"
    elif norm is not None:
        if mean is not None or std is not None:
            roll.refuse(
                "reward_norm",
                "excludes norm_mean_type and norm_std_type: remove it, or both",
            )
        mean = norm
        std = norm
    # 2. Leave out one of them: ROLL shifts in every case, but scales with running statistics only.
    if roll["reward_shift"]:
        std = None
    if roll["reward_scale"]:
        if norm == "running" and estimator == "reinforce":
            mean = None
        else:
            roll.ignore("ROLL uses it with reward_norm 'running' only", "reward_scale")
    # 3. Return the switches.
    if mean == "group":
        return GROUP_BASELINES[std]
    if mean is None and std is None:
        return {"advantage": "reinforce"}
    if None not in (mean, std) and mean != std:
        roll.refused.append(
            f"ROLL keys norm_mean_type {mean!r} and norm_std_type {std!r} are not supported"
            " together: set both to the same value, one of them to null, or norm_mean_type to"
            ' "group"'
        )
    return {
        "advantage": "reinforce",
        "reward_norm": mean or std,
        "reward_shift": std is None,
        "reward_scale": mean is None,
    }


REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value, or the value that a reference such as `${response_length}` names."""
    visited: list[str] = []
    while isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
        if match[1] in visited:
            circle = " -> ".join((*visited, match[1]))
            raise ValueError(f"ROLL keys refer to each other in a circle: {circle}. Set one.")
        visited.append(match[1])
        target: Any = values
        for part in match[1].split("."):
            if not isinstance(target, Mapping) or part not in target:
                return value
            target = target[part]
        value = target
    return value
