"""Task settings: names, values, search space, mutation and plain values."""

import json
from itertools import combinations

import numpy as np
import pytest

from evogrpo import HyperparameterConfig, RLParameter
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.task_settings import TaskSettings
from evogrpo.evolution.founders import spread_founders
from evogrpo.evolution.history import changes_between
from evogrpo.evolution.mutation import Mutation
from evogrpo.validation import validate

SPACE = HyperparameterConfig(
    reward_weights={"digits": [0, 1], "length": {"min": -1, "max": 1}},
    task={"style": ["short", "long"], "level": [1, 2, 3]},
    data_weights={"easy": {"min": 0.1, "max": 10, "scale": "log"}},
)


def test_settings_are_named_by_group_and_sorted():
    nested = TaskSettings({"task": {"style": "short"}, "reward_weights": {"digits": 1}})
    flat = TaskSettings({"task.style": "short", "reward_weights.digits": 1})
    assert nested == flat
    assert hash(nested) == hash(flat)
    assert list(nested) == ["reward_weights.digits", "task.style"]
    assert nested.group("task") == {"style": "short"}
    assert nested.weights("reward_weights") == {"digits": 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_weight.digits": 1}, "reward_weights"),
        ({"style": "short"}, "task setting"),
        ({"task": "short"}, "task must be a mapping"),
        ({"reward_weights.digits": "high"}, "reward_weights.digits"),
        ({"data_weights.easy": -1}, "data_weights.easy"),
        ({"task.style": float("nan")}, "task.style"),
        ({"task.style": None}, "task.style"),
        ({"task.style": ["short"]}, "task.style"),
        ({"task.a\x1bb": 1}, "name of a task setting"),
        ({"task.style": "x" * 20_001}, "task.style"),
    ],
)
def test_invalid_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TaskSettings(values)


def test_the_first_member_has_weights_of_one_and_first_choices():
    first = SPACE.first({}, {})
    assert first.task_settings == {
        "data_weights.easy": 1.0,
        "reward_weights.digits": 1,
        "reward_weights.length": 1.0,
        "task.level": 1,
        "task.style": "short",
    }
    chosen = SPACE.first({}, {"task_settings": {"task.style": "long"}})
    assert chosen["task.style"] == "long"
    with pytest.raises(ValueError, match=r"task\.style"):
        SPACE.first({}, {"task_settings": {"task.style": "loud"}})


def test_every_setting_is_mutated_within_its_values():
    parent = SPACE.first({}, {})
    rng = np.random.default_rng(0)
    children = [Mutation()(parent, SPACE, rng) for _ in range(300)]
    for name, parameter in SPACE.items():
        values = {child[name] for child in children}
        assert len(values) > 1, name
        if parameter.choices is not None:
            assert values == set(parameter.choices)
        else:
            low, high = parameter.bounds
            assert all(low <= value <= high for value in values)
    assert all(child.lr == parent.lr for child in children)
    changed = set(changes_between(parent, children[0]))
    assert changed
    assert changed <= set(SPACE)


def test_founders_are_a_balanced_design():
    """Four members with three settings of two values: half a factorial design."""
    space = HyperparameterConfig(
        reward_weights={"digits": [0, 1], "length": (-1, 1)}, task={"style": ["short", "long"]}
    )
    first = space.first({}, {})
    for seed in range(5):
        rng = np.random.default_rng(seed)
        founders = spread_founders(first, space, 4, rng, samples_per_step=8)
        settings = [founder.task_settings for founder in founders]
        digits = [own["reward_weights.digits"] for own in settings]
        length = [own["reward_weights.length"] >= 0 for own in settings]
        style = [own["task.style"] for own in settings]
        for one, other in combinations((digits, length, style), 2):
            assert len(set(zip(one, other, strict=True))) == 4


def test_values_survive_json():
    first = SPACE.first({}, {})
    stored = json.loads(json.dumps(first.to_json()))
    assert validate(Hyperparameters, stored) == first
    assert Hyperparameters().to_json().keys().isdisjoint(["task_settings"])
    space = json.loads(json.dumps(SPACE.to_json()))
    assert HyperparameterConfig(**space) == SPACE


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="reward_weights"):
        HyperparameterConfig(reward_weight=[0, 1])
    with pytest.raises(ValueError, match="group_size"):
        Hyperparameters().with_values({"group_siz": 4})
    with pytest.raises(ValueError, match=r"reward_weights\.digits"):
        HyperparameterConfig(reward_weights={"digits": RLParameter(choices=["low", "high"])})
