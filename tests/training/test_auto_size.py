"""Automatic sizes of a run. The clock of these tests moves when an environment steps."""

import re
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from evogrpo import GymnasiumGroups
from evogrpo.safe_parsing import read_yaml_file
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.configuration.sections import CONFIG_FILE
from evogrpo.training.launch import start
from evogrpo.training.task_types import task_type_of
from evogrpo.training.task_types.networks import prepare_in
from tests.training.test_time_limit import Clock, costly

AUTO = {
    "population": {"size": "auto"},
    "schedule": {"samples_per_step": "auto", "validation_questions": "auto", "test_questions": "auto"},
}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def configured(seconds=None, **sections):
    """Return a configuration in which all sizes but these are automatic."""
    values = {"task": {"env": "CartPole-v1"}, **AUTO, **sections}
    values["schedule"] = {
        **AUTO["schedule"],
        **({"generations": 2} if seconds is None else {"max_seconds": seconds}),
        **sections.get("schedule", {}),
    }
    return parse_config(values)


def sizes(config):
    schedule = config.schedule
    return (
        config.population.size,
        schedule.samples_per_step,
        schedule.validation_questions,
        schedule.test_questions,
    )


FULL = (8, 32, 64, 256)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # 100 steps of 8 x 32 episodes of 25 steps of 10 ms take 6,400 s
        (7000.0, FULL),
        (1700.0, (4, 16, 32, 128)),
        (450.0, (2, 8, 32, 64)),
        (60.0, (1, 8, 32, 64)),  # 30 of one member's
        (1.0, (1, 8, 32, 64)),
        (None, FULL),
    ],
)
def test_sizes_are_chosen_for_a_hundred_steps(clock, seconds, expected):
    prepared = prepare_in(configured(seconds), costly(clock))
    assert sizes(prepared.config) == expected
    assert not prepared.config.auto
    said = {1.0: ". No learning step is expected to fit", 60.0: "so that about 30 learning steps"}
    fits = said.get(seconds, "so that about 100 learning steps")
    assert (fits in prepared.facts()["sizes"]) == (expected != FULL)
    assert prepared.facts()["sizes"].startswith(
        f"{expected[0]} member{'s' if expected[0] > 1 else ''}, {expected[1]} episodes per step, {expected[2]} starts"
    )


def test_groups_shrink_if_not_one_fits(clock):
    small = {"hyperparameters": {"group_size": "auto"}, "schedule": {"validation_questions": 4}}
    for seconds, group in ((250.0, 8), (50.0, 8), (30.0, 4), (13.0, 2)):
        prepared = prepare_in(configured(seconds, **small), costly(clock, steps=100, seconds=0.0025))
        assert prepared.config.hyperparameters.group_size == prepared.config.schedule.samples_per_step == group
        steps = min(100, int(seconds / (group * 100 * 0.0025)))
        said = prepared.facts()["sizes"]
        assert f"{group} episodes per step, in groups of {group}" in said
        assert abs(int(re.search(r"about (\d+) learning steps fit", said).group(1)) - steps) <= 1
    # Nothing can be measured in time.
    prepared = prepare_in(configured(6.0, hyperparameters=small["hyperparameters"]), costly(clock, 100, 0.0025))
    assert sizes(prepared.config)[:2] == (1, 2)


def test_explicit_sizes_are_kept(clock):
    config = configured(450.0, population={"size": 3}, schedule={"test_questions": 5})
    prepared = prepare_in(config, costly(clock))
    assert sizes(prepared.config) == (3, 8, 32, 5)
    assert "member" not in prepared.facts()["sizes"]
    given = configured(450.0, population={"size": 3}, schedule=dict.fromkeys(AUTO["schedule"], 16))
    assert given.auto == frozenset()
    assert "sizes" not in prepare_in(given, costly(clock)).facts()


def test_automatic_sizes_are_limited_by_the_held_out_starts(clock, tmp_path):
    prepared = prepare_in(configured(), costly(clock, validation_size=20, test_size=30))
    assert sizes(prepared.config) == (8, 32, 20, 30)
    with pytest.raises(ValueError, match="validation split must hold at least 2 starts, got 1"):
        start(prepare_in(configured(), costly(clock, validation_size=1)), tmp_path / "run")


def test_images_are_limited_by_memory(monkeypatch):
    class Images(gymnasium.Env):
        observation_space = spaces.Box(0, 255, (96, 96, 3), np.uint8)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.low, {}

        def step(self, action):
            return self.observation_space.low, 0.0, False, False, {}

    env = GymnasiumGroups(Images, max_episode_steps=1000)
    for there, members, samples in ((200e9, 8, 32), (40e9, 8, 16), (5e9, 1, 8), (1e6, 1, 8)):
        monkeypatch.setattr(
            "evogrpo.training.task_types.networks.device_memory", lambda device, there=there: (there, "memory")
        )
        prepared = prepare_in(configured(), env)
        assert (prepared.config.population.size, prepared.config.schedule.samples_per_step) == (members, samples)
        assert ("half of the available memory" in prepared.facts()["sizes"]) == (members < 8 or samples < 32)
        assert there < 1e9 or prepared.forecast().need.size <= there / 2


def test_a_resumed_run_keeps_its_sizes(clock, tmp_path):
    config = configured(400.0, task={"env": "CartPole-v1", "max_episode_steps": 10}, population={"size": 2})
    prepared = task_type_of(config.task).prepare(config)
    start(prepared, tmp_path / "run")
    stored = read_yaml_file(tmp_path / "run" / CONFIG_FILE)
    assert "auto" not in stored
    assert stored["schedule"]["samples_per_step"] == prepared.config.schedule.samples_per_step
    again = parse_config(stored)
    assert again.auto == frozenset()
    assert again.schedule == prepared.config.schedule


@pytest.mark.parametrize("task", [{"name": "two_digit_sums"}, {"parallel_env": "mpe2.simple_spread_v3"}])
def test_auto_is_refused_elsewhere(task):
    with pytest.raises(ValueError, match=r"population.size .*'auto'"):
        parse_config({"task": task, "population": {"size": "auto"}, "schedule": {"generations": 2}})
    with pytest.raises(ValueError, match=r"schedule\.generations must be an integer, got 'auto'"):
        configured(schedule={"generations": "auto"})
    with pytest.raises(ValueError, match="auto"):
        parse_config({"task": {"env": "CartPole-v1"}, "schedule": {"generations": 2}, "auto": ["population.size"]})
