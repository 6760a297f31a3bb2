"""What ROLL makes of rewards before they reach the loss: advantages, samples that are left out, and KL in rewards."""

from collections.abc import Mapping
from typing import Any

from evogrpo.interop.foreign_fields import Fields

GROUP, BATCH, RUNNING = "group", "batch", "running"


def _normalised(norm: str) -> Mapping[tuple[str | None, str | None], dict[str, Any]]:
    """Return the switches for a mean, a deviation or both of the same rewards, beside no other baseline."""
    plain = {"advantage": "reinforce", "reward_norm": norm}
    return {
        (norm, norm): plain,
        (norm, None): plain | {"reward_shift": True},
        (None, norm): plain | {"reward_scale": True},
    }


# By what the mean is taken of that is subtracted, and the deviation that is divided by.
ADVANTAGES: Mapping[tuple[str | None, str | None], dict[str, Any]] = {
    (None, None): {"advantage": "reinforce"},
    **_normalised(BATCH),
    **_normalised(RUNNING),
    **_normalised(GROUP),
    (GROUP, GROUP): {"advantage": "outcome"},
    (GROUP, None): {"advantage": "mean_only"},
    (GROUP, BATCH): {"advantage": "batch_std"},
    (GROUP, RUNNING): {"advantage": "mean_only", "reward_norm": RUNNING, "reward_scale": True},
}


def read_advantage(fields: Fields) -> dict[str, Any]:
    """Return what becomes of rewards: adv_estimator decides, then reward_norm or the newer norm_..._type."""
    shift, scale = fields.flag("reward_shift"), fields.flag("reward_scale")
    if shift and scale:
        fields.refuse("ROLL keys reward_shift and reward_scale exclude each other: leave both out to do both")
    estimator = fields.choice("adv_estimator", ("gae", "reinforce", "grpo", "gigpo", "step_reinforce"))
    if estimator not in ("grpo", "reinforce"):
        fields.refuse(
            f"ROLL key adv_estimator has no counterpart here, got {estimator!r}"
            f"{'' if fields.given('adv_estimator') else ', its default'}: there is no critic and no anchor state; "
            "choose grpo or reinforce"
        )
        return {}
    norms = (GROUP, BATCH, RUNNING, None)
    norm = fields.choice("reward_norm", norms)
    mean, std = fields.choice("norm_mean_type", norms), fields.choice("norm_std_type", norms)
    if estimator == "grpo":
        fields.ignore("adv_estimator 'grpo' takes the group's", "reward_norm", "norm_mean_type", "norm_std_type")
        mean, std = GROUP, GROUP
    elif norm is not None:
        if mean is not None or std is not None:
            fields.refuse("ROLL keys reward_norm and norm_mean_type, norm_std_type say the same: give one of them")
        mean, std = norm, norm
    if shift:
        std = None
    if scale and norm == RUNNING and estimator == "reinforce":
        mean = None
    elif scale:
        fields.ignore("ROLL reads it with reward_norm 'running' only", "reward_scale")
    if (mean, std) not in ADVANTAGES:
        fields.refuse(
            f"ROLL's reinforce with norm_mean_type {mean!r} beside norm_std_type {std!r} has no counterpart here: set "
            'both to the same, one of them to null, or norm_mean_type to "group"'
        )
        return {}
    return ADVANTAGES[mean, std]


def read_masks(fields: Fields) -> dict[str, Any]:
    """Return which samples are left out of the loss: those cut off, and groups that are too hard or too easy."""
    masked, difficulty = fields.flag("max_len_mask"), fields.flag("difficulty_mask")
    kind = fields.choice("mask_type", ("loss", "all"))
    if masked and kind == "all":
        fields.refuse(
            "ROLL key mask_type has no counterpart here, got 'all': truncated completions keep their place in the "
            "group's statistics; set it to 'loss'"
        )
    fields.ignore("only max_len_mask reads it", "mask_type")
    switches: dict[str, Any] = {"mask_truncated": masked}
    if difficulty:
        switches["min_group_reward"] = fields.number("difficulty_low_threshold")
        switches["max_group_reward"] = fields.number("difficulty_high_threshold")
    else:
        fields.ignore("only difficulty_mask reads it", "difficulty_low_threshold", "difficulty_high_threshold")
    return switches


def read_kl(fields: Fields) -> tuple[float, dict[str, Any]]:
    """Return beta and the switches of the KL term: in the loss it is k3 always, in the reward `kl_penalty`."""
    in_loss = fields.number("kl_loss_coef") if fields.flag("use_kl_loss") else 0.0
    in_reward = fields.number("init_kl_coef") if fields.flag("add_token_level_kl") else 0.0
    if in_loss and in_reward:
        fields.refuse(
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
        fields.refuse("ROLL key kl_penalty has no counterpart here, got 'full': choose kl, abs or mse")
        return in_reward, {"kl_placement": "reward", "kl_estimator": "k1"}
    switches: dict[str, Any] = {
        "kl_placement": "reward",
        "kl_estimator": {"kl": "k1", "abs": "abs", "mse": "k2"}[penalty],
    }
    if fields.given("target_kl"):
        switches |= {"kl_target": fields.number("target_kl"), "kl_horizon": fields.whole("kl_horizon")}
    else:
        fields.ignore("only target_kl reads it", "kl_horizon")
    return in_reward, switches
