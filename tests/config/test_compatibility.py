"""Objective: combinations of switches without meaning or effect are rejected."""

import pytest

from evogrpo.config.hyperparameters import CATEGORIES, Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.functional.loss_types import LOSS_TYPES, STEP_ADVANTAGES

LOSSES = CATEGORIES["loss_type"]
ADVANTAGES = CATEGORIES["advantage"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kl_estimator": "k1"}, "kl_estimator"),
        ({"kl_horizon": 100}, "kl_horizon.*kl_target"),
        ({"importance_cap": 3.0}, "importance_cap.*importance_correction"),
        (
            {"importance_cap": 1.0, "importance_correction": "token_mask"},
            "importance_cap.*'token_mask'",
        ),
        (
            {"importance_cap": 1.0, "importance_correction": "sequence_mask"},
            "importance_cap.*'sequence_mask'",
        ),
        ({"reference_mixing": 0.5}, "reference_mixing.*reference_sync_steps"),
        ({"reference_sync_steps": 4}, "reference_sync_steps"),
        ({"reference": "old", "reference_sync_steps": 4}, "reference_sync_steps"),
        ({"reference": "old", "kl_placement": "reward"}, "reference.*kl_placement"),
        ({"kl_estimator": "full", "kl_placement": "reward"}, "kl_estimator.*kl_placement"),
        ({"kl_estimator": "full_reversed", "kl_placement": "reward"}, "kl_estimator.*kl_placement"),
        ({"kl_estimator": "full", "kl_bias_correction": True}, "kl_bias_correction"),
        ({"dual_clip": 3.0, "delta": 2.0}, "dual_clip.*delta"),
        ({"cispo_clip_low": True}, "cispo_clip_low.*'cispo'"),
        ({"sapo_tau_positive": 2.0}, "sapo_tau_positive.*'sapo'"),
        ({"sapo_tau_negative": 2.0, "loss_type": "cispo"}, "sapo_tau_negative.*'sapo'"),
        ({"loss_type": "gmpo", "aggregation": "token-mean"}, "aggregation"),
        (
            {"reward_shift": True, "reward_scale": True, "reward_norm": "group"},
            "reward_shift and reward_scale",
        ),
        ({"reward_shift": True}, "reward_shift.*reward_norm"),
        ({"reward_scale": True}, "reward_scale.*reward_norm"),
        (
            {"advantage": "mean_only", "reward_norm": "running", "reward_shift": True},
            "reward_shift",
        ),
        ({"advantage": "gdpo", "overlong_buffer": 8}, "overlong_buffer"),
    ],
)
def test_contradictory_switches_are_rejected(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Objective(**fields)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("name", ["dual_clip", "delta"])
def test_dual_clip_and_delta_need_a_clipped_ratio(loss_type, name):
    if LOSS_TYPES[loss_type].bounded:
        assert getattr(Objective(loss_type=loss_type, **{name: 2.0}), name) == 2.0
    else:
        with pytest.raises(ValueError, match=f"{name} .*{loss_type}"):
            Objective(loss_type=loss_type, **{name: 2.0})


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_entropy_quantile": 0.2},
        {"kl_placement": "reward"},
        *({"advantage": a} for a in STEP_ADVANTAGES),
    ],
)
def test_advantages_per_action_need_a_ratio_per_action(loss_type, fields):
    if not LOSS_TYPES[loss_type].per_action:
        with pytest.raises(ValueError, match=f"loss_type='{loss_type}'"):
            Objective(loss_type=loss_type, **fields)
    else:
        assert Objective(loss_type=loss_type, **fields).loss_type == loss_type


# The values of reward_norm that have an effect beside an advantage's own statistics.
ALIVE = {
    "rloo": ("group", "batch", "running"),
    "mean_only": ("group", "batch", "running"),
    "batch_std": ("group",),
    "reinforce": ("group", "batch", "running"),
}


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("norm", ["group", "batch", "running"])
def test_reward_norms_without_effect_are_rejected(advantage, norm):
    if norm in ALIVE.get(advantage, ()):
        assert Objective(advantage=advantage, reward_norm=norm).reward_norm == norm
    else:
        with pytest.raises(ValueError, match=f"reward_norm.*{advantage}"):
            Objective(advantage=advantage, reward_norm=norm)


def space(**choices):
    return HyperparameterConfig(
        **{name: RLParameter(choices=values) for name, values in choices.items()}
    )


@pytest.mark.parametrize(
    ("objective", "hyperparameters", "evolving", "reason"),
    [
        ({"kl_target": 0.1}, {}, {}, "kl_target.*beta"),
        ({"reference": "snapshot"}, {}, {}, "reference.*beta"),
        ({"reference": "old"}, {}, {}, "reference.*beta"),
        ({"kl_estimator": "full"}, {}, {}, "kl_estimator.*beta"),
        ({"kl_estimator": "full_reversed"}, {}, {"lr": [1e-3, 1e-2]}, "kl_estimator.*beta"),
        (
            {"dual_clip": 3.0},
            {},
            {"loss_type": ["grpo", "sapo"]},
            "loss_type='sapo', advantage='outcome': dual_clip",
        ),
        ({"dual_clip": 3.0}, {"loss_type": "cispo"}, {}, "loss_type='cispo'"),
        (
            {"loss_type": "gspo"},
            {},
            {"advantage": ["outcome", "process"]},
            "loss_type='gspo', advantage='process'",
        ),
        (
            {"advantage": "mean_only", "reward_norm": "batch"},
            {},
            {"advantage": ["mean_only", "outcome"]},
            "advantage='outcome': reward_norm",
        ),
        ({"loss_type": "gspo"}, {"gamma": 0.9}, {}, "gamma.*gspo"),
        ({}, {}, {"gamma": [0.9, 1.0], "loss_type": ["grpo", "gmpo"]}, "gamma.*gmpo"),
        ({"delta": 1.2}, {}, {}, "delta.*clip_high.*1.2.*0.2"),
        ({"delta": 1.3}, {}, {"clip_coef": [0.1, 0.4]}, "up to 0.4"),
        ({"delta": 1.3}, {"clip_high": 0.1}, {"clip_high": [0.1, 0.5]}, "up to 0.5"),
        ({"delta": 1.3}, {"clip_high": 0.4, "clip_coef": 0.1}, {}, "up to 0.4"),
    ],
)
def test_check_rejects_switches_that_a_member_cannot_use(
    objective, hyperparameters, evolving, reason
):
    with pytest.raises(ValueError, match=reason):
        Objective(**objective).check(Hyperparameters(**hyperparameters), space(**evolving))


@pytest.mark.parametrize(
    ("objective", "hyperparameters", "evolving"),
    [
        ({}, {}, {}),
        ({"kl_target": 0.1}, {"beta": 0.01}, {}),
        ({"kl_target": 0.1, "reference": "snapshot"}, {}, {"beta": [0.0, 0.1]}),
        ({}, {"gamma": 0.9}, {}),
        (
            {"delta": 1.3},
            {"clip_high": 0.2, "clip_coef": 0.5},
            {"clip_coef": [0.1, 0.9]},
        ),  # clip_coef is never used above
        (
            {"loss_type": "cispo", "cispo_clip_low": True},
            {},
            {"loss_type": ["cispo", "grpo", "gmpo"]},
        ),
        (
            {"loss_type": "sapo", "kl_placement": "reward"},
            {"loss_type": "grpo", "beta": 0.1},
            {"advantage": list(ADVANTAGES)},
        ),
    ],
)
def test_check_accepts_switches_that_all_members_can_use(objective, hyperparameters, evolving):
    Objective(**objective).check(Hyperparameters(**hyperparameters), space(**evolving))
    Objective().check(Hyperparameters())


@pytest.mark.parametrize(
    ("objective", "choices"),
    [
        ({}, ["dapo", "bnpo"]),
        ({}, ["grpo", "bnpo", "dapo"]),
        ({"aggregation": "token-mean"}, ["grpo", "dr_grpo"]),
        ({"aggregation": "seq-mean-token-sum"}, ["gspo", "luspo"]),
    ],
)
def test_loss_types_that_are_the_same_cannot_evolve(objective, choices):
    space = HyperparameterConfig(loss_type=RLParameter(choices=choices))
    with pytest.raises(ValueError, match=f"'{choices[-1]}'"):
        Objective(loss_type=choices[0], **objective).check(Hyperparameters(), space)
    others = HyperparameterConfig(
        loss_type=RLParameter(choices=["grpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo"])
    )
    Objective().check(Hyperparameters(), others)
