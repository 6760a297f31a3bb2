"""Combinations without meaning or effect are refused with the reason, before anything runs."""

import pytest

from evogrpo.hyperparameters import CATEGORIES, HyperparameterConfig, Hyperparameters, RLParameter
from evogrpo.kinds import LOSS_TYPES, STEP_ADVANTAGES
from evogrpo.objective import Objective

LOSSES, ADVANTAGES = CATEGORIES["loss_type"], CATEGORIES["advantage"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kl_estimator": "k1"}, "expected gradient is 0"),
        ({"kl_horizon": 100}, "kl_horizon has no effect without kl_target"),
        ({"importance_cap": 3.0}, "importance_cap has no effect without importance_correction"),
        ({"reference_mixing": 0.5}, "reference_mixing has no effect without reference_sync_steps"),
        ({"reference_sync_steps": 4}, 'reference "base" never changes'),
        ({"reference": "old", "reference_sync_steps": 4}, 'reference "old" is taken anew in every learning step'),
        ({"reference": "old", "kl_placement": "reward"}, "does not differ from itself while it earns rewards"),
        ({"kl_estimator": "full", "kl_placement": "reward"}, "'full' is a term of the loss, got kl_placement 'reward'"),
        ({"kl_estimator": "full_reversed", "kl_placement": "reward"}, "'full_reversed' is a term of the loss"),
        ({"kl_estimator": "full", "kl_bias_correction": True}, "'full' is exact, so there is no bias"),
        ({"dual_clip": 3.0, "delta": 2.0}, "dual_clip and delta bound the same thing"),
        ({"cispo_clip_low": True}, "read by loss_type 'cispo' alone"),
        ({"sapo_tau_positive": 2.0}, "read by loss_type 'sapo' alone"),
        ({"sapo_tau_negative": 2.0, "loss_type": "cispo"}, "read by loss_type 'sapo' alone"),
        ({"loss_type": "gmpo", "aggregation": "token-mean"}, "one number per completion"),
        ({"reward_shift": True, "reward_scale": True, "reward_norm": "group"}, "exclude each other"),
        ({"reward_shift": True}, "reward_shift says which half of reward_norm"),
        ({"reward_scale": True}, "reward_scale says which half of reward_norm"),
        (
            {"advantage": "mean_only", "reward_norm": "running", "reward_shift": True},
            "subtracts the group's mean anyway",
        ),
        ({"advantage": "gdpo", "overlong_buffer": 8}, "reads each reward function apart"),
    ],
)
def test_contradictions_and_dead_switches_are_refused_with_the_reason(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Objective(**fields)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("name", ["dual_clip", "delta"])
def test_bounds_on_the_ratio_need_a_clipped_ratio(loss_type, name):
    if LOSS_TYPES[loss_type].bounded:
        assert getattr(Objective(loss_type=loss_type, **{name: 2.0}), name) == 2.0
    else:
        with pytest.raises(
            ValueError, match=f"{name} .*loss_type '{loss_type}' .*got 2.0: leave it out, or choose one of grpo"
        ):
            Objective(loss_type=loss_type, **{name: 2.0})


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    "fields", [{"top_entropy_quantile": 0.2}, {"kl_placement": "reward"}, *({"advantage": a} for a in STEP_ADVANTAGES)]
)
def test_what_differs_from_action_to_action_needs_a_ratio_per_action(loss_type, fields):
    if not LOSS_TYPES[loss_type].of_actions:
        with pytest.raises(ValueError, match=f"'{loss_type}' .*one ratio per completion.*got .*: choose a loss type"):
            Objective(loss_type=loss_type, **fields)
    else:
        assert Objective(loss_type=loss_type, **fields).loss_type == loss_type


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_every_loss_type_but_gmpo_takes_every_aggregation(loss_type, aggregation):
    if loss_type != "gmpo":
        assert Objective(loss_type=loss_type, aggregation=aggregation).aggregation == aggregation


# Which reward_norm an advantage's own statistics leave standing.
ALIVE = {
    "rloo": ("group", "batch", "running"),
    "mean_only": ("group", "batch", "running"),
    "batch_std": ("group",),
    "reinforce": ("group", "batch", "running"),
}


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("norm", ["group", "batch", "running"])
def test_a_reward_norm_that_the_advantage_undoes_is_refused(advantage, norm):
    if norm in ALIVE.get(advantage, ()):
        assert Objective(advantage=advantage, reward_norm=norm).reward_norm == norm
    else:
        with pytest.raises(ValueError, match=f"'{advantage}' standardises .*reward_norm '{norm}': leave it out"):
            Objective(advantage=advantage, reward_norm=norm)


def test_k1_in_the_reward_is_welcome():
    assert Objective(kl_estimator="k1", kl_placement="reward").kl_estimator == "k1"


# ---- what members can come to have


def space(**choices):
    return HyperparameterConfig(**{name: RLParameter(choices=values) for name, values in choices.items()})


@pytest.mark.parametrize(
    ("objective", "hyperparameters", "evolving", "reason"),
    [
        ({"kl_target": 0.1}, {}, {}, "kl_target has no effect while beta is 0"),
        ({"reference": "snapshot"}, {}, {}, "reference has no effect while beta is 0"),
        ({"reference": "old"}, {}, {}, "reference has no effect while beta is 0"),
        ({"kl_estimator": "full"}, {}, {}, "kl_estimator has no effect while beta is 0 .*got 'full'"),
        ({"kl_estimator": "full_reversed"}, {}, {"lr": [1e-3, 1e-2]}, "kl_estimator has no effect while beta is 0"),
        (
            {"dual_clip": 3.0},
            {},
            {"loss_type": ["grpo", "sapo"]},
            "can have loss_type 'sapo', advantage 'outcome': dual_c",
        ),
        ({"dual_clip": 3.0}, {"loss_type": "cispo"}, {}, "can have loss_type 'cispo'"),
        ({"loss_type": "gspo"}, {}, {"advantage": ["outcome", "process"]}, "'gspo', advantage 'process': .*one ratio"),
        (
            {"advantage": "mean_only", "reward_norm": "batch"},
            {},
            {"advantage": ["mean_only", "outcome"]},
            "advantage 'outcome': .*undoes reward_norm",
        ),
        ({"loss_type": "gspo"}, {"gamma": 0.9}, {}, "gamma below 1 gives the actions"),
        ({}, {}, {"gamma": [0.9, 1.0], "loss_type": ["grpo", "gmpo"]}, "gamma below 1 .*loss_type 'gmpo'"),
        ({"delta": 1.2}, {}, {}, "delta must exceed .*clip_high.*got 1.2 .*up to 0.2"),
        ({"delta": 1.3}, {}, {"clip_coef": [0.1, 0.4]}, "up to 0.4"),
        ({"delta": 1.3}, {"clip_high": 0.1}, {"clip_high": [0.1, 0.5]}, "up to 0.5"),
        ({"delta": 1.3}, {"clip_high": 0.4, "clip_coef": 0.1}, {}, "up to 0.4"),
    ],
)
def test_what_a_member_could_not_use_is_refused(objective, hyperparameters, evolving, reason):
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
        ({"loss_type": "cispo", "cispo_clip_low": True}, {}, {"loss_type": ["cispo", "grpo", "gmpo"]}),
        (
            {"loss_type": "sapo", "kl_placement": "reward"},
            {"loss_type": "grpo", "beta": 0.1},
            {"advantage": list(ADVANTAGES)},
        ),
    ],
)
def test_what_every_member_can_use_is_kept(objective, hyperparameters, evolving):
    Objective(**objective).check(Hyperparameters(**hyperparameters), space(**evolving))
    Objective().check(Hyperparameters())
