"""ROLL's RLVR pipeline configuration as an objective, hyperparameters and settings of this package."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evogrpo.interop.foreign_fields import Fields, Reading, sampling_settings
from evogrpo.interop.roll_files import read_values
from evogrpo.interop.roll_keys import (
    CRITIC,
    DEFAULTS,
    DISTILLATION,
    GENERATING,
    INFRASTRUCTURE,
    OTHER_TERMS,
    REPEATED,
    ROLES,
    TRAINING,
)
from evogrpo.interop.roll_rewards import read_advantage, read_kl, read_masks
from evogrpo.interop.training_arguments import read_optimizer, training_argument_names
from evogrpo.kinds import AGGREGATIONS


def read_roll(source: Mapping[str, Any] | str | Path) -> Reading:
    """Translate the keys of a ROLL RLVR configuration.

    Keys left out have ROLL's defaults; sizes and lengths that are left out are not returned, and of the training and
    the generating arguments nothing is unless their section is there. References such as `${response_length}` are put
    in, and keys that only others refer to are no settings of their own. The order in which
    rewards become advantages is ROLL's (see `Objective`). Its token-mean, which forgets the mask, and its
    sum-norm, which divides by the padded width, are not copied: aggregation modes do here what their names say.

    Args:
        source: A mapping of keys, the path of a YAML file, or YAML text.

    Returns:
        What they mean here, with every key that is unknown or means something that this package does not do among
        `refused`. `prompt_length` leaves longer prompts out, in both.

    Raises:
        ValueError: If there are no keys.

    Source: ROLL, `RLVRConfig`, `reward_postprocess`, `compute_advantage` and `ActorWorker.loss_func`.
    """
    values, named = read_values(source)
    fields = Fields("ROLL key", values, DEFAULTS)
    fields.check_names(OTHER_TERMS, DISTILLATION, CRITIC, ROLES, INFRASTRUCTURE, named)
    for name, neutral in OTHER_TERMS.items():
        fields.refuse_unless((neutral,), "the loss has no such term and samples no such weight", name)
    fields.refuse_unless((None, False), "members learn from rewards and not from a teacher", *DISTILLATION)
    training, generating = _roles(fields)
    clips, dual_clip = _clips(fields)
    beta, kl = read_kl(fields)
    objective = {
        "loss_type": "gspo" if fields.choice("importance_sampling", ("token", "seq")) == "seq" else "grpo",
        "aggregation": fields.choice("loss_agg_mode", AGGREGATIONS),
        "advantage_eps": 1e-6,
        **read_masks(fields),
        "whiten_advantages": fields.flag("whiten_advantages"),
        "reward_clip": fields.number("reward_clip") or None,  # ROLL takes 0 for no clip
        "dual_clip": dual_clip,
        **kl,
        **read_advantage(fields),
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
    # How often ROLL steps depends on its data-parallel size.
    optimizer = read_optimizer(training, None, constant_warms_up=True) if training.values else {}
    settings = _settings(fields) | _sampling(generating)
    _ignore_the_rest(fields, training, generating, named)
    return Reading(
        objective=objective,
        hyperparameters={name: value for name, value in given.items() if value is not None},
        optimizer=optimizer,
        settings=settings,
        ignored=fields.ignored,
        refused=tuple(fields.refused),
    )


def _roles(fields: Fields) -> tuple[Fields, Fields]:
    """Return the training arguments of the trained policy and the generating arguments of the sampling one."""
    sections = []
    for role, section in (("actor_train", "training_args"), ("actor_infer", "generating_args")):
        outer = _section(fields, fields.get(role), role)
        sections.append(_section(fields, outer.get(section), f"{role}.{section}"))
        for name in outer:
            if name != section:
                fields.ignored[f"{role}.{name}"] = "it says where and how ROLL runs"
    # A section that is left out says nothing; ROLL's defaults stand in for what is left out of one.
    trained = TRAINING if sections[0] else dict.fromkeys(TRAINING)
    sampled = GENERATING if sections[1] else dict.fromkeys(GENERATING)
    training = fields.inside("ROLL key actor_train.training_args:", sections[0], trained)
    training.check_names(training_argument_names())
    generating = fields.inside("ROLL key actor_infer.generating_args:", sections[1], sampled)
    generating.check_names(REPEATED)
    generating.refuse_unless((1,), "every completion is sampled by itself", "num_beams")
    generating.refuse_unless((None, []), "end-of-sequence tokens end a completion", "stop_strings")
    generating.refuse_unless((True,), "what is learnt from is sampled", "do_sample")
    return training, generating


def _section(fields: Fields, value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        fields.refuse(f"ROLL key {where} must be a mapping, got {value!r:.80}")
        return {}
    return dict(value)


def _sampling(generating: Fields) -> dict[str, Any]:
    """Return how completions are drawn, where a section says so."""
    return sampling_settings(
        top_k=generating.whole("top_k"),
        top_p=generating.number("top_p"),
        min_p=None,
        repetition_penalty=generating.number("repetition_penalty"),
    )


def _clips(fields: Fields) -> tuple[dict[str, float], float | None]:
    """Return the clip hyperparameters and the dual clip, which ROLL derives from pg_clip whatever the range is."""
    clips = {"clip_coef": fields.number("pg_clip")}
    dual = 1 + 2 * clips["clip_coef"] if fields.flag("dual_clip_loss") else None
    if fields.flag("use_pg_clip_range"):
        clips |= {"clip_low": fields.number("pg_clip_low"), "clip_high": fields.number("pg_clip_high")}
    else:
        fields.ignore("only use_pg_clip_range reads it", "pg_clip_low", "pg_clip_high")
    return clips, dual


def _importance(fields: Fields) -> dict[str, Any]:
    """Return the weights between sampler and trainer, from the newer section or the older pair of keys."""
    where = "train_infer_correction"
    section = _section(fields, fields.get(where), where)
    fields.inside(f"ROLL key in {where}:", section, {"is_weight": None, "filters": None}).check_names()
    if any(not isinstance(each, Mapping) or each.get("enabled") for each in section.get("filters") or ()):
        fields.refuse(
            "ROLL's train_infer_correction.filters have no counterpart here: use is_weight, or leave them out"
        )
    weight = fields.inside(
        f"ROLL key {where}.is_weight:",
        _section(fields, section.get("is_weight"), f"{where}.is_weight"),
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
        fields.refuse("ROLL keys train_infer_correction and use_rollout_importance_sampling_ratio: give one of them")
    kind = weight.choice("weight_type", ("token", "segment", "geometric", "sequence"))
    if kind not in ("token", "sequence") or not weight.flag("detach"):
        fields.refuse(
            f"ROLL's train_infer_correction.is_weight has no counterpart here for weight_type {kind!r}, or without "
            "detach: choose token or sequence, detached"
        )
        return {}
    return {"importance_correction": f"{kind}_truncate", "importance_cap": weight.number("upper_bound")}


def _settings(fields: Fields) -> dict[str, Any]:
    prompts, group = fields.count("rollout_batch_size"), fields.whole("num_return_sequences_in_group")
    prompt, response = fields.count("prompt_length"), fields.count("response_length")
    whole = fields.count("sequence_length")
    if (prompts is None) != (group is None):
        fields.refuse(
            "ROLL keys rollout_batch_size and num_return_sequences_in_group belong together, their product being the "
            f"samples of a step, got {prompts} and {group}: give both"
        )
        prompts = None
    if response is None and whole is not None:
        if prompt is None or whole <= prompt:
            fields.refuse(f"ROLL key sequence_length needs a smaller prompt_length, got {whole} and {prompt}")
        else:
            response = whole - prompt
    settings = {
        "samples_per_step": None if prompts is None else prompts * group,
        "max_output_tokens": response,
        "max_prompt_length": prompt,
        "seed": fields.whole("seed"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _ignore_the_rest(fields: Fields, training: Fields, generating: Fields, named: Iterable[str]) -> None:
    known = {*DEFAULTS, *OTHER_TERMS, *DISTILLATION, *CRITIC, *ROLES, *INFRASTRUCTURE}
    fields.ignored.update({name: "only other keys refer to it" for name in named if name not in known})
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
