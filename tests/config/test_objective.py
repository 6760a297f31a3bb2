"""Objective: validation of each switch, and objectives of members."""

import dataclasses
import typing

import pytest

from evogrpo.config.hyperparameters import CATEGORIES, Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.safe_parsing import load_yaml

NUMBERS = [
    "advantage_eps",
    "kl_target",
    "kl_horizon",
    "dual_clip",
    "delta",
    "sapo_tau_positive",
    "sapo_tau_negative",
    "top_entropy_quantile",
    "importance_cap",
    "reward_clip",
    "overlong_buffer",
    "dynamic_sampling",
    "reference_sync_steps",
    "reference_mixing",
    "min_group_reward",
    "max_group_reward",
]
ANY_SIGN = ["min_group_reward", "max_group_reward"]
WHOLE = ["kl_horizon", "overlong_buffer", "dynamic_sampling", "reference_sync_steps"]
FLAGS = [
    "mask_truncated",
    "whiten_advantages",
    "cispo_clip_low",
    "reward_shift",
    "reward_scale",
    "kl_bias_correction",
]
NAMES = [
    "loss_type",
    "advantage",
    "aggregation",
    "kl_estimator",
    "kl_placement",
    "importance_correction",
    "reward_norm",
    "reference",
    "entropy_reduction",
]
# Settings required by a field.
BESIDE = {
    "kl_horizon": {"kl_target": 0.1},
    "importance_cap": {"importance_correction": "token_truncate"},
    "reference_sync_steps": {"reference": "snapshot"},
    "reference_mixing": {"reference": "snapshot", "reference_sync_steps": 4},
    "sapo_tau_positive": {"loss_type": "sapo"},
    "sapo_tau_negative": {"loss_type": "sapo"},
    "cispo_clip_low": {"loss_type": "cispo"},
    "reward_norm": {"advantage": "mean_only"},
    "reward_shift": {"advantage": "batch_std", "reward_norm": "group"},
    "reward_scale": {"advantage": "rloo", "reward_norm": "batch"},
}
LEGAL = load_yaml(
    """{advantage_eps: [1.0e-8], kl_target: [0.01], kl_horizon: [1], dual_clip: [1.1, 3],
    delta: [1.5], sapo_tau_positive: [0.1], sapo_tau_negative: [3],
    top_entropy_quantile: [1.0e-3, 1], importance_cap: [1, 3.0], reward_clip: [1.0e-3],
    overlong_buffer: [1], dynamic_sampling: [0, 3], reference_sync_steps: [1],
    reference_mixing: [1, 0.1], min_group_reward: [-1, 0, 0.5], max_group_reward: [-1, 0, 0.5]}""",
    "legal values",
)


def test_all_fields_are_covered():
    assert {field.name for field in dataclasses.fields(Objective)} == {*NUMBERS, *FLAGS, *NAMES}
    assert set(LEGAL) == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_non_numbers_are_rejected(name):
    wrong = [float("nan"), float("inf"), True, "1e-4", [1]]
    for value in [*wrong, *([] if name in ANY_SIGN else [-1]), *([2.5] if name in WHOLE else [])]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            Objective(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in NUMBERS if name not in ["dynamic_sampling", *ANY_SIGN]),
        ("dual_clip", 1.0),
        ("delta", 1.0),
        ("top_entropy_quantile", 1.01),
        ("importance_cap", 0.99),
        ("reference_mixing", 1.01),
    ],
)
def test_numbers_out_of_range_are_rejected(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*, got {value}"):
        Objective(**{name: value})


@pytest.mark.parametrize("name", LEGAL)
def test_bounds_are_accepted(name):
    for value in LEGAL[name]:
        kept = getattr(Objective(**{**BESIDE.get(name, {}), name: value}), name)
        assert kept == value
        assert type(kept) is (int if name in WHOLE else float)


@pytest.mark.parametrize("name", FLAGS)
def test_flags_must_be_booleans(name):
    assert getattr(Objective(**{**BESIDE.get(name, {}), name: True}), name) is True
    with pytest.raises(ValueError, match=f"^{name} must be true or false, got 1"):
        Objective(**{**BESIDE.get(name, {}), name: 1})


@pytest.mark.parametrize("name", NAMES)
def test_unknown_names_are_rejected(name):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got 'ppo'"):
        Objective(**{name: "ppo"})


@pytest.mark.parametrize("name", CATEGORIES)
def test_all_loss_types_and_advantages_are_accepted(name):
    hint = typing.get_type_hints(Objective)[name]
    assert typing.get_args(hint) == CATEGORIES[name]
    for value in CATEGORIES[name]:
        assert getattr(Objective(**{name: value}), name) == value


def test_members_without_names_have_the_objective():
    objective = Objective(loss_type="dapo", delta=2.0)
    assert objective.of(Hyperparameters()) is objective
    assert objective.of(Hyperparameters(loss_type="dapo")) is objective


def test_names_of_members_override_the_objective():
    member_objective = Objective(delta=2.0, mask_truncated=True).of(
        Hyperparameters(loss_type="dapo", advantage="rloo")
    )
    assert member_objective == Objective(
        loss_type="dapo", advantage="rloo", delta=2.0, mask_truncated=True
    )


def test_switches_of_the_former_loss_type_are_reset():
    cispo = Objective(loss_type="cispo", cispo_clip_low=True)
    assert cispo.of(Hyperparameters(loss_type="grpo")) == Objective(loss_type="grpo")
    assert cispo.of(Hyperparameters(advantage="rloo")).cispo_clip_low
    sapo = Objective(loss_type="sapo", sapo_tau_positive=2.0, sapo_tau_negative=3.0)
    assert sapo.of(Hyperparameters(loss_type="cispo")) == Objective(loss_type="cispo")


def test_incompatible_members_are_rejected():
    with pytest.raises(ValueError, match="dual_clip"):
        Objective(dual_clip=3.0).of(Hyperparameters(loss_type="sapo"))


def test_evolving_names_are_resolved():
    objective = Objective(loss_type="dapo", advantage="rloo")
    start = Hyperparameters(lr=0.1)
    space = HyperparameterConfig(loss_type=RLParameter(choices=["grpo", "dapo"]))
    assert objective.resolved(start, space) == Hyperparameters(lr=0.1, loss_type="dapo")
    assert objective.resolved(Hyperparameters(loss_type="grpo"), space) == Hyperparameters(
        loss_type="grpo"
    )
    assert objective.resolved(start, HyperparameterConfig()) is start
