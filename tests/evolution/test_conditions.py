"""Conditional hyperparameters: an inactive one is neither sampled nor mutated and makes no difference."""

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution import Mutation, changes_between, spread_founders

NAMES = RLParameter(choices=["grpo", "gspo", "cispo"])
SPACE = HyperparameterConfig(
    loss_type=NAMES,
    clip_high=RLParameter(min=0.1, max=0.6, when={"loss_type": ["grpo", "gspo"]}),
    update_epochs=RLParameter(choices=[1, 2, 4], when={"clip_high": [0.1, 0.2], "loss_type": "grpo"}),
    beta=RLParameter(choices=[0.0, 0.01]),
)
TREE = HyperparameterConfig(
    loss_type=NAMES,
    update_epochs=RLParameter(choices=[1, 2, 4], when={"loss_type": "grpo"}),
    batch_size=RLParameter(choices=[8, 16], when={"update_epochs": [2, 4]}),
)


def counting(space, values):
    """Slow oracle: check the conditions of every condition."""
    record = values.to_json()

    def holds(name):
        return name not in space or all(
            record[other] in needed and holds(other) for other, needed in space[name].condition.items()
        )

    return {name for name in space if holds(name)}


@pytest.mark.parametrize("space", [SPACE, TREE], ids=["wide", "tree"])
@pytest.mark.parametrize("probability", [0.2, 1.0])
def test_mutation_changes_active_hyperparameters_only(space, probability):
    rng, parent, kinds = np.random.default_rng(0), Hyperparameters(loss_type="grpo"), set()
    for _ in range(200):
        child = Mutation(probability=probability)(parent, space, rng)
        changes = set(changes_between(parent, child))
        before, after = counting(space, parent), counting(space, child)
        assert changes
        assert changes <= after
        if "loss_type" not in changes and probability == 1.0:
            assert changes >= before & after
        for name in after & set(changes) - {"loss_type"}:
            assert space[name].closest(getattr(child, name)) == getattr(child, name)
        kinds.add(frozenset(after))
        parent = child
    assert len(kinds) > 1


@pytest.mark.parametrize("seed", range(2))
def test_founders_differ_in_active_hyperparameters_only(seed):
    first = Hyperparameters(loss_type="cispo", batch_size=32)
    members = spread_founders(first, TREE, 30, np.random.default_rng(seed), 64)
    for member in members:
        for name in set(TREE) - counting(TREE, member):
            assert getattr(member, name) == getattr(first, name)
    # gspo, cispo, and grpo with one epoch or with 2 or 4 epochs of two batch sizes.
    assert len({TREE.active_values(member) for member in members}) == 2 + 1 + 2 * 2


def test_conditions_round_trip_through_json():
    space = HyperparameterConfig(
        loss_type=NAMES, group_size=RLParameter(min=2, max=16, when={"loss_type": ["grpo", "gspo"]})
    )
    again = HyperparameterConfig.from_json(space.to_json())
    assert dict(again) == dict(space)
    assert again.for_samples_per_step(16)["group_size"].condition == {"loss_type": ("grpo", "gspo")}
    assert hash(space["group_size"]) == hash(again["group_size"])


def ladder(**when):
    return RLParameter(choices=[1, 2], when=when)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ladder(los_type="grpo"), "did you mean 'loss_type'"),
        (lambda: ladder(loss_type="grp"), "loss_type must be one of"),
        (lambda: ladder(loss_type=[]), "at least one value of loss_type"),
        (lambda: RLParameter(choices=[1, 2], when="grpo"), "when must"),
        (lambda: HyperparameterConfig(batch_size=ladder(batch_size=1)), "circular"),
        (
            lambda: HyperparameterConfig(
                beta=ladder(batch_size=1), batch_size=ladder(update_epochs=1), update_epochs=ladder(beta=1)
            ),
            "circular",
        ),
        (lambda: HyperparameterConfig(batch_size=ladder(update_epochs=3), update_epochs=ladder()), "when must"),
        (
            lambda: HyperparameterConfig(batch_size=ladder(update_epochs=3), update_epochs=RLParameter(choices=[1, 2])),
            "batch_size would never",
        ),
    ],
)
def test_invalid_conditions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("fixed", [{}, {"loss_type": "gspo"}])
def test_conditions_on_fixed_values_are_refused_at_construction(fixed):
    space = HyperparameterConfig(clip_high=RLParameter(min=0.1, max=0.6, when={"loss_type": "grpo"}))
    with pytest.raises(ValueError, match=r"clip_high would never .*loss_type"):
        space.first({}, fixed)
    assert space.first({}, {"loss_type": "grpo"}).loss_type == "grpo"
