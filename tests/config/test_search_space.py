"""Evolving hyperparameters without effect."""

import pytest

from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.objective import Objective, without_effect
from evogrpo.config.search_space import HyperparameterConfig, RLParameter

RANGES = {
    "lr": RLParameter(min=1e-5, max=1e-3, scale="log"),
    "beta": RLParameter(min=0.1, max=1),
    "clip_coef": RLParameter(min=0.1, max=0.3),
    "clip_low": RLParameter(min=0.1, max=0.3),
    "clip_high": RLParameter(min=0.1, max=0.3),
    "batch_size": RLParameter(choices=[16, 64]),
    "advantage_clip": RLParameter(min=1, max=4),
    "loss_type": RLParameter(choices=["sapo", "cispo"]),
}
APART = {"clip_low": 0.1, "clip_high": 0.3}


def named(objective=(), members=({},), evolving=(), **options):
    """Return the hyperparameters without effect if rollouts have several optimizer steps."""
    found = without_effect(
        Objective(**dict(objective)),
        [Hyperparameters(**{"update_epochs": 2, **member}) for member in members],
        HyperparameterConfig(**{name: RANGES[name] for name in evolving}),
        **{"samples_per_step": 64, **options},
    )
    assert all(name in message for name, message in found.items())
    return list(found)


CLIPS = ("clip_coef", "clip_low", "clip_high")


@pytest.mark.parametrize(
    ("objective", "members", "evolving", "expected"),
    [
        ({}, [{}], RANGES.keys() - {"loss_type"}, []),
        ({}, [APART], ["clip_coef"], ["clip_coef"]),
        ({}, [APART, {}], ["clip_coef"], []),
        ({}, [{"clip_high": 0.3}], ["clip_coef"], []),
        ({"loss_type": "sapo"}, [{}], CLIPS, [*CLIPS]),
        ({"loss_type": "sapo"}, [{"loss_type": "grpo"}, {}], CLIPS, []),
        ({"loss_type": "sapo"}, [{"loss_type": "grpo"}], CLIPS, []),
        ({"loss_type": "cispo"}, [{}], CLIPS, ["clip_low"]),
        ({"loss_type": "cispo", "cispo_clip_low": True}, [{}], CLIPS, []),
        ({"loss_type": "cispo"}, [{"clip_high": 5.0}], ["clip_coef"], ["clip_coef"]),
        ({"loss_type": "sapo"}, [{}], ["clip_low", "clip_high", "loss_type"], ["clip_low"]),
    ],
)
def test_clips_without_effect_are_found(objective, members, evolving, expected):
    assert named(objective, members, evolving) == expected


def test_one_optimizer_step_per_rollout_never_clips():
    one = [{"update_epochs": 1, "batch_size": 64}]
    assert named((), one, CLIPS) == [*CLIPS]
    assert named((), one, ["lr"]) == []
    assert named((), [*one, {"update_epochs": 1, "batch_size": 32}], CLIPS) == []
    # Small networks count transitions: how many there are is not known.
    assert named((), one, CLIPS, rows_are_samples=False) == []


def test_beta_has_no_effect_with_reference_old_and_one_step():
    one = [{"update_epochs": 1, "batch_size": 64}]
    assert named({"reference": "old"}, one, ["beta"]) == ["beta"]
    assert named({"reference": "old"}, [{"update_epochs": 1, "batch_size": 32}], ["beta"]) == []
    assert named({"reference": "old"}, one, ["beta"], rows_are_samples=False) == []
    assert named((), one, ["beta"]) == []


def test_automatic_learning_rates_need_a_target():
    assert HyperparameterConfig().first({}, {"lr": "auto"}).target_kl == DEFAULT_TARGET_KL
    with pytest.raises(ValueError, match="target_kl"):
        HyperparameterConfig().first({}, {"lr": "auto", "target_kl": None})


def test_batch_sizes_without_effect_are_found():
    assert named((), [{"batch_size": 64}], ["batch_size"], samples_per_step=16) == ["batch_size"]
    assert named((), [{"batch_size": 64}], ["batch_size"], samples_per_step=17) == []
    assert named((), [{"batch_size": 8}], ["batch_size"], samples_per_step=16) == []
    assert (
        named((), [{"batch_size": 64}], ["batch_size"], samples_per_step=16, rows_are_samples=False)
        == []
    )


@pytest.mark.parametrize("choices", [["no", False], [0.5, "x"], ["12", 34]])
def test_choices_of_two_kinds_have_one_error(choices):
    rule = r"task\.style: choices must be all numbers or all texts"
    with pytest.raises(ValueError, match=rule) as found:
        HyperparameterConfig(task={"style": choices})
    assert len(str(found.value).splitlines()) == 1
