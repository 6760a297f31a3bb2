"""ROLL's RLVR pipeline configuration as an objective, hyperparameters and settings of this package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from evogrpo.hyperparameters import refuse_unknown
from evogrpo.interop.foreign_fields import Fields, Reading, read_schedule, training_argument_names
from evogrpo.interop.roll_keys import (
    CRITIC,
    DEFAULTS,
    GENERATING,
    INFRASTRUCTURE,
    OTHER_TERMS,
    REPEATED,
    ROLES,
    TRAINING,
)
from evogrpo.kinds import AGGREGATIONS


def read_roll(source: Mapping[str, Any] | str | Path) -> Reading:
    """Translate the keys of a ROLL RLVR configuration.

    Keys left out have ROLL's defaults; sizes and lengths that are left out are not returned. The order in which
    rewards become advantages is ROLL's (see `Objective`). Its token-mean, which forgets the mask, and its
    sum-norm, which divides by the padded width, are not copied: aggregation modes do here what their names say.

    Args:
        source: A mapping of keys, the path of a YAML file, or YAML text.

    Returns:
        What they mean here. `prompt_length` leaves longer prompts out, in both.

    Raises:
        ValueError: If a key is unknown, or means something that this package does not do.

    Source: ROLL, `RLVRConfig`, `reward_postprocess`, `compute_advantage` and `ActorWorker.loss_func`.
    """
    fields = Fields("ROLL key", _values(source), DEFAULTS)
    fields.check_names(OTHER_TERMS, CRITIC, ROLES, INFRASTRUCTURE)
    for name, neutral in OTHER_TERMS.items():
        fields.refuse_unless((neutral,), "the loss has no such term and samples no such weight", name)
    training, generating = _roles(fields)
    clips, dual_clip = _clips(fields)
    beta, kl = _kl(fields)
    objective = {
        "loss_type": "gspo" if fields.choice("importance_sampling", ("token", "seq")) == "seq" else "grpo",
        "aggregation": fields.choice("loss_agg_mode", AGGREGATIONS),
        "advantage_eps": 1e-6,
        "mask_truncated": _mask_truncated(fields),
        "whiten_advantages": fields.flag("whiten_advantages"),
        "reward_clip": fields.number("reward_clip") or None,  # ROLL takes 0 for no clip
        "dual_clip": dual_clip,
        **kl,
        **_advantage(fields),
        **_importance(fields),
    }
    given = {
        "lr": training.number("learning_rate"),
        "group_size": fields.whole("num_return_sequences_in_group"),
        "temperature": generating.number("temperature"),
        "beta": beta,
        "update_epochs": fields.whole("ppo_epochs"),
        "max_grad_norm": fields.number("max_grad_norm"),
        "entropy_coef": fields.number("entropy_loss_coef"),
        "advantage_clip": fields.number("advantage_clip"),
        "gamma": fields.number("gamma"),
        **clips,
    }
    optimizer = read_schedule(training, None)
    _ignore_the_rest(fields, training, generating)
    return Reading(
        objective=objective,
        hyperparameters={name: value for name, value in given.items() if value is not None},
        optimizer=optimizer,
        settings=_settings(fields),
        ignored=fields.ignored,
    )


def _values(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(source, str) and "\n" not in source and ":" not in source:
        source = Path(source)
    if isinstance(source, Path):
        source = source.read_text(encoding="utf-8")
    values = yaml.safe_load(source) if isinstance(source, str) else source
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a mapping of ROLL's keys, the path of a YAML file or YAML text, got {values!r:.80}")
    return dict(values)


def _roles(fields: Fields) -> tuple[Fields, Fields]:
    """Return the training arguments of the trained policy and the generating arguments of the sampling one."""
    sections = []
    for role, section in (("actor_train", "training_args"), ("actor_infer", "generating_args")):
        outer = _section(fields.get(role), role)
        sections.append(_section(outer.get(section), f"{role}.{section}"))
        for name in outer:
            if name != section:
                fields.ignored[f"{role}.{name}"] = "it says where and how ROLL runs"
    training = Fields("ROLL key actor_train.training_args:", sections[0], TRAINING, fields.ignored)
    training.check_names(training_argument_names())
    generating = Fields("ROLL key actor_infer.generating_args:", sections[1], GENERATING, fields.ignored)
    generating.check_names(REPEATED)
    truncated = "completions are sampled from the whole distribution that is learnt"
    generating.refuse_unless((1.0,), truncated, "top_p", "repetition_penalty")
    generating.refuse_unless((0, -1), truncated, "top_k")
    generating.refuse_unless((1,), truncated, "num_beams")
    return training, generating


def _section(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"ROLL key {where} must be a mapping, got {value!r:.80}")
    return dict(value)


def _advantage(fields: Fields) -> dict[str, Any]:
    """Return what becomes of rewards: adv_estimator decides, then reward_norm or the newer norm_..._type."""
    shift, scale = fields.flag("reward_shift"), fields.flag("reward_scale")
    if shift and scale:
        raise ValueError("ROLL keys reward_shift and reward_scale exclude each other: leave both out to do both")
    estimator = fields.choice("adv_estimator", ("gae", "reinforce", "grpo", "gigpo", "step_reinforce"))
    if estimator not in ("grpo", "reinforce"):
        raise ValueError(
            f"ROLL key adv_estimator has no counterpart here, got {estimator!r}"
            f"{'' if fields.given('adv_estimator') else ', its default'}: choose grpo, or reinforce with group means"
        )
    norms = ("group", "batch", "running", None)
    norm = fields.choice("reward_norm", norms)
    mean, std = fields.choice("norm_mean_type", norms), fields.choice("norm_std_type", norms)
    if estimator == "grpo":
        fields.ignore("adv_estimator 'grpo' takes the group's", "reward_norm", "norm_mean_type", "norm_std_type")
        mean, std = "group", "group"
    elif norm is not None:
        if mean is not None or std is not None:
            raise ValueError("ROLL keys reward_norm and norm_mean_type, norm_std_type say the same: give one of them")
        mean, std = norm, norm
    if scale:
        # ROLL knows this half for running statistics only.
        fields.ignore("ROLL reads it with reward_norm 'running' only", "reward_scale")
    if shift:
        std = None
    found: dict[Any, dict[str, Any]] = {
        ("group", "group"): {"advantage": "outcome"},
        ("group", None): {"advantage": "mean_only"},
        ("group", "batch"): {"advantage": "batch_std"},
        ("group", "running"): {"advantage": "mean_only", "reward_norm": "running", "reward_scale": True},
    }
    if (mean, std) not in found:
        raise ValueError(
            f"ROLL's reinforce with the mean of {mean or 'nothing'} has no counterpart here, where advantages compare "
            'a completion with its group: set reward_norm to "group", or adv_estimator to "grpo"'
        )
    return found[mean, std]


def _kl(fields: Fields) -> tuple[float, dict[str, Any]]:
    """Return beta and the switches of the KL term: in the loss it is k3 always, in the reward `kl_penalty`."""
    in_loss = fields.number("kl_loss_coef") if fields.flag("use_kl_loss") else 0.0
    in_reward = fields.number("init_kl_coef") if fields.flag("add_token_level_kl") else 0.0
    if in_loss and in_reward:
        raise ValueError(
            "ROLL keys use_kl_loss and add_token_level_kl together have no counterpart here, where beta weighs one KL "
            f"term, got {in_loss} and {in_reward}: choose one of them"
        )
    if not in_loss:
        fields.ignore("only use_kl_loss reads it", "kl_loss_coef")
    if not in_reward:
        fields.ignore("only add_token_level_kl reads it", "init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
        return in_loss, {}
    penalty = fields.choice("kl_penalty", ("kl", "abs", "mse", "full"))
    if penalty == "full":
        raise ValueError("ROLL key kl_penalty has no counterpart here, got 'full': choose kl, abs or mse")
    switches: dict[str, Any] = {
        "kl_placement": "reward",
        "kl_estimator": {"kl": "k1", "abs": "abs", "mse": "k2"}[penalty],
    }
    if fields.given("target_kl"):
        switches |= {"kl_target": fields.number("target_kl"), "kl_horizon": fields.whole("kl_horizon")}
    else:
        fields.ignore("only target_kl reads it", "kl_horizon")
    return in_reward, switches


def _clips(fields: Fields) -> tuple[dict[str, float], float | None]:
    """Return the clip hyperparameters and the dual clip, which ROLL derives from pg_clip whatever the range is."""
    clips = {"clip_coef": fields.number("pg_clip")}
    dual = 1 + 2 * clips["clip_coef"] if fields.flag("dual_clip_loss") else None
    if fields.flag("use_pg_clip_range"):
        clips |= {"clip_low": fields.number("pg_clip_low"), "clip_high": fields.number("pg_clip_high")}
    else:
        fields.ignore("only use_pg_clip_range reads it", "pg_clip_low", "pg_clip_high")
    return clips, dual


def _mask_truncated(fields: Fields) -> bool:
    masked = fields.flag("max_len_mask")
    kind = fields.choice("mask_type", ("loss", "all"))
    if masked and kind == "all":
        raise ValueError(
            "ROLL key mask_type has no counterpart here, got 'all': truncated completions keep their place in the "
            "group's statistics; set it to 'loss'"
        )
    fields.ignore("only max_len_mask reads it", "mask_type")
    return masked


def _importance(fields: Fields) -> dict[str, Any]:
    """Return the weights between sampler and trainer, from the newer section or the older pair of keys."""
    section = _section(fields.get("train_infer_correction"), "train_infer_correction")
    refuse_unknown("ROLL key in train_infer_correction:", section, ("is_weight", "filters"))
    if any(each.get("enabled") for each in section.get("filters") or ()):
        raise ValueError(
            "ROLL's train_infer_correction.filters have no counterpart here: use is_weight, or leave them out"
        )
    weight = Fields(
        "ROLL key train_infer_correction.is_weight:",
        _section(section.get("is_weight"), "train_infer_correction.is_weight"),
        {"enabled": False, "weight_type": "token", "upper_bound": 1.2, "detach": True},
    )
    weight.check_names()
    old = fields.flag("use_rollout_importance_sampling_ratio")
    if not weight.flag("enabled"):
        if not old:
            fields.ignore("no correction reads it", "rollout_importance_sampling_ratio_upper_bound")
            return {}
        cap = fields.number("rollout_importance_sampling_ratio_upper_bound")
        return {"importance_correction": "token_truncate", "importance_cap": cap}
    if old:
        raise ValueError("ROLL keys train_infer_correction and use_rollout_importance_sampling_ratio: give one of them")
    kind = weight.choice("weight_type", ("token", "segment", "geometric", "sequence"))
    if kind not in ("token", "sequence") or not weight.flag("detach"):
        raise ValueError(
            f"ROLL's train_infer_correction.is_weight has no counterpart here for weight_type {kind!r}, or without "
            "detach: choose token or sequence, detached"
        )
    return {"importance_correction": f"{kind}_truncate", "importance_cap": weight.number("upper_bound")}


def _settings(fields: Fields) -> dict[str, Any]:
    prompts, group = fields.whole("rollout_batch_size"), fields.whole("num_return_sequences_in_group")
    prompt, response = fields.whole("prompt_length"), fields.whole("response_length")
    whole = fields.whole("sequence_length")
    if (prompts is None) != (group is None):
        raise ValueError(
            "ROLL keys rollout_batch_size and num_return_sequences_in_group belong together, their product being the "
            f"samples of a step, got {prompts} and {group}: give both"
        )
    if response is None and whole is not None:
        if prompt is None or whole <= prompt:
            raise ValueError(f"ROLL key sequence_length needs a smaller prompt_length, got {whole} and {prompt}")
        response = whole - prompt
    settings = {
        "samples_per_step": None if prompts is None else prompts * group,
        "max_output_tokens": response,
        "max_prompt_length": prompt,
        "seed": fields.whole("seed"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _ignore_the_rest(fields: Fields, training: Fields, generating: Fields) -> None:
    fields.ignore("there is no critic", *CRITIC)
    fields.ignore("rewards, the reference and validation are set up elsewhere", *ROLES)
    fields.ignore("it says where and how ROLL runs", *INFRASTRUCTURE)
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    reason = "ROLL multiplies it by its data-parallel size: set batch_size, the samples per optimizer step"
    for section, name in ((training, "actor_train.training_args"), (generating, "actor_infer.generating_args")):
        for key in section.values:
            if key in sizes:
                fields.ignored[f"{name}.{key}"] = reason
            elif key not in section.defaults:
                fields.ignored[f"{name}.{key}"] = "it says where and how ROLL runs, or repeats another key"
