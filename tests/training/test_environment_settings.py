"""Runs whose members differ in reward weights and in options of reset."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml

from evogrpo import HyperparameterConfig, train
from evogrpo.reporting.records import StepReport
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.task_types import task_type_of
from tests.tiny_steps import cart_pole, start_run, step_population, step_run
from tests.tiny_training import check_same_run, finish, resumed_run, stop_after

SPACE = HyperparameterConfig(
    reward_weights={"reward": [0, 1], "angle": {"min": -1, "max": 1}},
    task={"high": {"min": 0.01, "max": 0.2}},
)


def angle(observation, action, reward, info):
    return abs(float(observation[2]))


def environment():
    return cart_pole(rewards={"angle": angle}, settings={"low": 0.0, "high": 0.05})


def test_a_run_with_evolving_settings_resumes_equal(tmp_path):
    options = {"hp_config": SPACE, "spread": True, "evolve_network": None}
    for name in ("whole", "parts"):
        run = step_run(tmp_path / name, env=environment(), options=options, generations=2)
        if name == "whole":
            finish(run)
    stop_after(run, 3)
    finish(resumed_run(tmp_path / "parts", env=environment()))
    check_same_run(tmp_path / "whole", tmp_path / "parts")
    values = {repr(agent.hyperparameters.task_settings) for agent in run.population}
    assert len(values) > 1


def test_reports_have_components_and_the_weighted_reward():
    env = environment()
    population = step_population(2, env, hp_config=SPACE)
    population[1].hyperparameters = population[1].hyperparameters.with_values(
        {"reward_weights.reward": 0, "reward_weights.angle": -1.0}
    )
    run = start_run(
        population, env, None, generations=1, steps_per_generation=1, samples_per_step=8
    )
    report = next(each for each in run.reports() if isinstance(each, StepReport))
    first, second = (member.metrics for member in report.learned.values())
    for metrics, weights in ((first, (1, 1)), (second, (0, -1))):
        terms = [metrics[f"rewards/{name}/mean"] for name in ("reward", "angle")]
        assert terms[1] > 0
        assert metrics["reward"] == pytest.approx(np.dot(weights, terms))


COMPONENTS = """
    def angle(observation, action, reward, info):
        return abs(float(observation[2]))
"""
VALUES = {
    "task": {
        "env": "CartPole-v1",
        "rewards": {"angle": "components.py:angle"},
        "reward_weights": {"angle": 0.5},
        "settings": {"low": 0.01},
        "max_episode_steps": 20,
    },
    "search_space": {
        "reward_weights": {"angle": {"choices": [0.5, 2]}},
        "task": {"high": {"choices": [0.03, 0.05]}},
    },
    "schedule": {"generations": 1, "samples_per_step": 8},
    "population": {"size": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("components.py").write_text(textwrap.dedent(COMPONENTS))
    return tmp_path


def test_components_and_settings_are_given_in_a_configuration(folder):
    Path("run.yaml").write_text(yaml.safe_dump(VALUES))
    config = load_config(Path("run.yaml"))
    assert config.hyperparameters.task_settings == {"reward_weights.angle": 0.5, "task.high": 0.03}
    assert parse_config(config.to_json()) == config
    task = task_type_of(config.task).build(config)
    # A setting that is only in the search space has the first member's value.
    assert task.env.settings == {"low": 0.01, "high": 0.03}
    assert task.env.components.weights == {"reward": 1.0, "angle": 0.5}
    assert f"{folder}/components.py:angle" in config.task.facts()["your code"]
    assert "angle" in task.facts()["training reward"]
    assert "0.03" in task.facts()["settings"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {"angle": "components.py:angel"}}, "'angle'"),
        ({"rewards": {"angle": "theta"}}, "info has no keys"),
        ({"reward_weights": {"angel": 1}}, "'angle'"),
        ({"settings": {"lo": 0.01}}, "'low'"),
    ],
)
def test_invalid_components_and_settings_are_refused(folder, changes, message):
    values = {"task": VALUES["task"] | changes, "schedule": VALUES["schedule"]}
    config = parse_config(values)
    with pytest.raises(ValueError, match=message):
        task_type_of(config.task).build(config)


def test_train_takes_functions(tmp_path):
    options = {"generations": 1, "steps_per_generation": 1, "samples_per_step": 8}
    run = train(
        "CartPole-v1",
        rewards={"angle": angle},
        reward_weights={"angle": -1.0},
        max_episode_steps=20,
        validation_size=2,
        test_size=2,
        run_dir=tmp_path / "run",
        **options,
    )
    assert run.result.complete
    assert load_config(tmp_path / "run" / "config.yaml").task.rewards == {
        "angle": f"{__name__}:angle"
    }


@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [
        ({}, {}, {"reward_weights.angle": 0.0, "reward_weights.reward": 1, "task.high": 0.05}),
        (
            {"settings": {"low": 0.0, "high": 0.5}},  # outside of the search space
            {"task_settings": {"reward_weights": {"angle": 0.5}}},
            {"reward_weights.angle": 0.5, "reward_weights.reward": 1, "task.high": 0.105},
        ),
    ],
)
def test_the_first_member_has_the_values_of_a_given_environment(configured, given, expected):
    defaults = {"rewards": {"angle": angle}, "reward_weights": {"angle": 0}}
    settings = {"settings": {"low": 0.0, "high": 0.05}}
    env = cart_pole(**(defaults | settings | configured))
    run = train(env, 20, size=2, hp_config=SPACE, **given)
    assert run.population.lineage[0].hyperparameters.task_settings == pytest.approx(expected)


@pytest.mark.parametrize(
    ("configured", "members", "named"),
    [
        # The default of a weight is 1, that of a range is its middle.
        ({"reward_weights": {"angle": 0.5}, "settings": {"high": 0.05}}, {}, "angle.*task.high"),
        ({"reward_weights": {"angle": 0.5}, "settings": {"high": 0.105}}, {}, "angle': 0.5}"),
        ({"settings": {"high": 0.105}}, {}, None),
        ({"settings": {"high": 0.5}}, {}, None),  # outside of the search space
        ({"settings": {"high": 0.05}}, {"task_settings": {"task.high": 0.05}}, None),
        ({"settings": {"high": 0.05}}, {"task_settings": {"task.high": 0.08}}, None),
    ],
)
def test_values_of_the_environment_that_no_member_has_are_named(
    configured, members, named, recwarn
):
    env = cart_pole(**({"rewards": {"angle": angle}} | configured))
    population = step_population(2, env, hp_config=SPACE, **members)
    start_run(population, env, None, generations=1)
    messages = [str(each.message) for each in recwarn if "No member begins" in str(each.message)]
    assert len(messages) == (named is not None)
    if named is not None:
        assert re.search(named, messages[0])
        assert messages[0].count("0.05") == 2 * ("high" in named)
