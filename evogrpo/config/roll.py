"""ROLL's RLVR configuration as keyword arguments of this package's records."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evogrpo.config.translation import (
    Key,
    SettingsReader,
    count,
    number,
    one_of,
    repetition_penalty,
    top_k,
    top_p,
    unless,
)
from evogrpo.functional.loss_types import AGGREGATIONS, REWARD_NORMS
from evogrpo.safe_parsing import load_yaml, read_regular
from evogrpo.text import shown
from evogrpo.validation import flag, whole_number

TRAINING = "actor_train.training_args"
GENERATING = "actor_infer.generating_args"
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
    "reward_clip": Key(None, unless((0,), number), "objective.reward_clip"),
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
    f"{GENERATING}.top_p": Key(0.7, top_p, "settings.top_p"),
    f"{GENERATING}.top_k": Key(50, top_k, "settings.top_k"),
    f"{GENERATING}.repetition_penalty": Key(1.0, repetition_penalty, "settings.repetition_penalty"),
}
"""Keys that are translated."""
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pg_variant": (("ppo",), "choose ppo"),
    **dict.fromkeys(
        ("positive_loss_coef", "use_topr_neg_loss_coef"),
        ((0,), "this term of the loss does not exist"),
    ),
    "rl_loss_coef": ((1.0,), "the policy loss has no weight"),
    **dict.fromkeys(
        ("difficulty_loss_weight", "length_loss_weight", "error_max_len_clip"),
        ((False,), "samples have no weight"),
    ),
    f"{GENERATING}.num_beams": ((1,), "completions are sampled"),
    f"{GENERATING}.do_sample": ((True,), "completions are sampled"),
}
"""Keys whose effect is not implemented: the values without effect, and the reason."""
_INFRASTRUCTURE = "only concerns where and how ROLL runs"
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        ("lambd", "value_clip", "critic", "reward_pretrain"), "there is no critic or reward model"
    ),
    **dict.fromkeys(
        ("reference", "rewards", "reward_model", "validation"), "set up in the task section"
    ),
    **dict.fromkeys(
        (
            *(
                "defaults",
                "hydra",
                "exp_name",
                "rpc_timeout",
                "output_dir",
                "logging_dir",
                "track_with",
            ),
            *(
                "tracker_kwargs",
                "max_steps",
                "save_steps",
                "logging_steps",
                "eval_steps",
                "resume_from_checkpoint",
            ),
            *(
                "checkpoint_config",
                "profiler_output_dir",
                "system_envs",
                "num_gpus_per_node",
                "model_download_type",
            ),
            *(
                "rollout_mock",
                "rollout_dump_dir",
                "is_num_return_sequences_expand",
                "pretrain",
                "tag_to_template",
            ),
            *("async_generation_ratio", "global_template", "offload_nccl", "reward_system_config"),
            *(f"{TRAINING}.num_train_epochs", f"{TRAINING}.bf16"),
        ),
        _INFRASTRUCTURE,
    ),
    **dict.fromkeys(
        (f"{TRAINING}.per_device_train_batch_size", f"{TRAINING}.gradient_accumulation_steps"),
        "depends on ROLL's data-parallel size: set batch_size, the samples per optimizer step",
    ),
    **dict.fromkeys(
        (f"{GENERATING}.max_new_tokens", f"{GENERATING}.num_return_sequences"),
        "repeats another key",
    ),
}
"""Keys that change nothing here, with the reason."""
ADVANTAGE_SWITCHES: Mapping[tuple[str | None, str | None], dict[str, Any]] = {
    **{
        (norm if mean else None, norm if std else None): {
            "advantage": "reinforce",
            "reward_norm": norm,
            **switch,
        }
        for norm in REWARD_NORMS
        for mean, std, switch in (
            (1, 1, {}),
            (1, 0, {"reward_shift": True}),
            (0, 1, {"reward_scale": True}),
        )
    },
    (None, None): {"advantage": "reinforce"},
    ("group", "group"): {"advantage": "outcome"},
    ("group", None): {"advantage": "mean_only"},
    ("group", "batch"): {"advantage": "batch_std"},
    ("group", "running"): {
        "advantage": "mean_only",
        "reward_norm": "running",
        "reward_scale": True,
    },
}
"""Switches of `Objective`, by the statistics of the subtracted mean and of the dividing standard
deviation.
"""


def read_roll(source: Mapping[str, Any] | str | Path) -> SettingsReader:
    """Translate the keys of a ROLL RLVR configuration.

    Keys left out have ROLL's defaults. The order in which rewards become advantages is ROLL's (see
    `Objective`). Aggregation modes follow their names. ROLL's own code differs: its token-mean
    ignores the mask, and its seq-mean-token-sum-norm divides by the padded width.

    Args:
        source: A mapping of keys, the path of a YAML file, or YAML text. References such as
            `${response_length}` are resolved.

    Returns:
        The keyword arguments, and every setting that is unknown or not supported in `refused`.

    Raises:
        ValueError: If `source` has no keys, or references are circular.

    Source: ROLL, `RLVRConfig`, `reward_postprocess`, `compute_advantage` and
    `ActorWorker.loss_func`.
    """
    # 1. Load the configuration. A single line without a colon is a path, and so is the name of a
    #    file.
    if isinstance(source, str) and "\n" not in source:
        is_file = os.path.isfile(source)  # noqa: PTH113 (no error for text that is too long)
        if is_file or ":" not in source:
            source = Path(source)
    if isinstance(source, Path):
        source = read_regular(source).decode("utf-8")
    if isinstance(source, str):
        values = load_yaml(source, "ROLL's configuration")
    else:
        values = source
    if not isinstance(values, Mapping):
        raise ValueError(
            "source must be a mapping of ROLL keys, the path of a YAML file or YAML text, got"
            f" {shown(values)}."
        )
    # 2. Flatten the two sections that are translated.
    settings = {
        str(name): value
        for name, value in values.items()
        if name not in ("actor_train", "actor_infer")
    }
    table = dict(KEYS)
    ignored = dict(IGNORED)
    refused = []
    for section in (TRAINING, GENERATING):
        # Only one section of each role, such as actor_train, is translated; its other keys are
        # infrastructure.
        role, name = section.split(".")
        role_values: Any = values.get(role)
        if role_values is not None and not isinstance(role_values, Mapping):
            refused.append(f"ROLL key {role} must be a mapping, got {shown(role_values)}")
            role_values = None
        other_keys = {f"{role}.{key}": _INFRASTRUCTURE for key in role_values or () if key != name}
        settings |= other_keys
        ignored |= other_keys
        section_values: Any = (role_values or {}).get(name)
        if section_values is not None and not isinstance(section_values, Mapping):
            refused.append(f"ROLL key {section} must be a mapping, got {shown(section_values)}")
            section_values = None
        settings |= {f"{section}.{key}": value for key, value in (section_values or {}).items()}
        if not section_values:  # do not use the defaults of a missing section
            table = {key: entry for key, entry in table.items() if not key.startswith(section)}
    # 3. Resolve references such as ${name}. Keys that exist only for them are ignored; unknown keys
    #    are refused.
    referenced = {name.split(".")[0] for name in REFERENCE.findall(str(values))} - {
        *KEYS,
        *UNSUPPORTED,
        *IGNORED,
    }
    ignored |= dict.fromkeys(referenced, "only used by references of other keys")
    roll = SettingsReader(
        "ROLL key", {name: _resolved(value, values) for name, value in settings.items()}, table
    )
    roll.refused += refused
    roll.check_names([*UNSUPPORTED, *ignored])
    roll.check_unsupported(UNSUPPORTED)
    roll.ignored.update({name: ignored[name] for name in roll.given if name in ignored})

    # 4. Translate the keys that depend on each other; `translate` adds those with a target in
    #    `KEYS`.
    masked, prompts, group_size = (roll[name] for name in ("difficulty_mask", *_SAMPLE_KEYS))
    if (prompts is None) != (group_size is None):
        keys = " and ".join(_SAMPLE_KEYS)
        roll.refused.append(
            f"ROLL keys {keys} must be given together, got {prompts} and {group_size}"
        )
        prompts = None
    if roll["use_kl_loss"]:
        in_loss = roll["kl_loss_coef"]
    else:
        in_loss = 0.0
    if roll["add_token_level_kl"]:
        in_reward = roll["init_kl_coef"]
    else:
        in_reward = 0.0
    if in_loss and in_reward:
        roll.refused.append(
            "ROLL keys use_kl_loss and add_token_level_kl exclude each other: beta weighs one KL"
            " term"
        )
    objective = {
        "advantage_eps": 1e-6,
        "loss_type": "gspo" if roll["importance_sampling"] == "seq" else "grpo",
        # ROLL bounds the loss of negative advantages at this multiple, which has no key.
        "dual_clip": 1 + 2 * roll["pg_clip"] if roll["dual_clip_loss"] else None,
        "min_group_reward": roll["difficulty_low_threshold"] if masked else None,
        "max_group_reward": roll["difficulty_high_threshold"] if masked else None,
        **_advantage(roll),
    }
    if in_reward:
        objective |= {"kl_placement": "reward", "kl_estimator": KLS[roll["kl_penalty"]]}
        if roll["target_kl"] is not None:
            objective |= {"kl_target": roll["target_kl"], "kl_horizon": roll["kl_horizon"]}
    for switch, used, names in (
        ("use_kl_loss", in_loss, ("kl_loss_coef",)),
        ("target_kl", roll["target_kl"], ("kl_horizon",)),
        (
            "add_token_level_kl",
            in_reward,
            ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"),
        ),
        ("difficulty_mask", masked, ("difficulty_low_threshold", "difficulty_high_threshold")),
    ):
        if not used:
            roll.ignore(f"used with {switch} only", *names)
    return roll.translate(
        objective=objective,
        hyperparameters={"beta": in_loss or in_reward},
        settings={"samples_per_step": None if prompts is None else prompts * group_size},
    )


_SAMPLE_KEYS = ("rollout_batch_size", "num_return_sequences_in_group")


def _advantage(roll: SettingsReader) -> dict[str, Any]:
    """Return the switches for adv_estimator, and for reward_norm or the newer norm_mean_type and norm_std_type."""
    estimator, norm, mean, std, shift, scale = (
        roll[name]
        for name in (
            "adv_estimator",
            "reward_norm",
            "norm_mean_type",
            "norm_std_type",
            "reward_shift",
            "reward_scale",
        )
    )
    # 1. Choose the statistics of the subtracted mean and of the dividing standard deviation; None =
    #    none.
    if shift and scale:
        roll.refused.append(
            "ROLL keys reward_shift and reward_scale exclude each other: remove one of them"
        )
    if estimator not in ("grpo", "reinforce"):
        roll.refused.append(
            f"ROLL key adv_estimator must be grpo or reinforce, got {shown(estimator)}"
        )
        return {}
    if estimator == "grpo":
        reason = "adv_estimator 'grpo' uses the group's mean and deviation"
        roll.ignore(reason, "reward_norm", "norm_mean_type", "norm_std_type")
        mean = std = "group"
    elif norm is not None:
        if mean is not None or std is not None:
            roll.refused.append(
                "ROLL key reward_norm excludes norm_mean_type and norm_std_type: remove it, or both"
            )
        mean = std = norm
    # 2. Leave out one of them: ROLL shifts in every case, but scales with running statistics only.
    if shift:
        std = None
    if scale and norm == "running" and estimator == "reinforce":
        mean = None
    elif scale:
        roll.ignore("ROLL uses it with reward_norm 'running' only", "reward_scale")
    # 3. Look up the switches.
    if (mean, std) not in ADVANTAGE_SWITCHES:
        roll.refused.append(
            f"ROLL keys norm_mean_type {mean!r} and norm_std_type {std!r} are not supported"
            " together: set both to the same value, one of them to null, or norm_mean_type to"
            ' "group"'
        )
    return ADVANTAGE_SWITCHES.get((mean, std), {})


REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value, or the value that a reference such as `${response_length}` names."""
    visited: list[str] = []
    while isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
        if match[1] in visited:
            raise ValueError(
                f"ROLL keys refer to each other in a circle: {' -> '.join((*visited, match[1]))}."
                " Set one."
            )
        visited.append(match[1])
        target: Any = values
        for part in match[1].split("."):
            if not isinstance(target, Mapping) or part not in target:
                return value
            target = target[part]
        value = target
    return value
