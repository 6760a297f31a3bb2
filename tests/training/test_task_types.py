"""Conformance of the task types."""

import pytest

from evogrpo.reporting.records import TERMS
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.task_types import TASK_TYPES, select_task
from tests.cli.project import CONFIG, write_project
from tests.training.task_type_case import TaskTypeTestCase

SCHEDULE = {"generations": 1, "steps_per_generation": 1, "samples_per_step": 8}


class TestLanguage(TaskTypeTestCase):
    def values(self, folder):
        write_project(folder)
        task = {**CONFIG["task"], "dataset": {"train": str(folder / "train.jsonl")}, "validation_size": 4}
        task |= {"reward": f"{folder / 'rewards.py'}:score", "test_size": 4}
        parts = {"hyperparameters": {"group_size": 4}, "agent": {"max_output_tokens": 4}, "population": {"size": 2}}
        return {"model": str(folder / "model"), "task": task, "schedule": SCHEDULE, **parts}


class TestNetworks(TaskTypeTestCase):
    def values(self, folder):
        task = {"env": "CartPole-v1", "max_episode_steps": 10, "validation_size": 2, "test_size": 2}
        return {"task": task, "schedule": SCHEDULE, "population": {"size": 2}}


class TestTeam(TaskTypeTestCase):
    def values(self, folder):
        task = {"parallel_env": "tests.envs.joint_probes:Favours", "policies": "prefix"}
        task |= {"validation_size": 2, "test_size": 2}
        return {"task": task, "schedule": SCHEDULE, "population": {"size": 2}}


def test_every_task_type_is_tested():
    tried = {TestLanguage: "language", TestNetworks: "networks", TestTeam: "joint"}
    assert set(tried.values()) == set(TASK_TYPES) == set(TERMS)


@pytest.mark.parametrize(
    "kind", [kind for kind in TASK_TYPES.values() if kind.word != "language"], ids=lambda kind: kind.word
)
def test_environments_take_no_model_and_write_no_completions(kind):
    (task,) = kind.tasks
    values = {"task": {task.key: "CartPole-v1"}, "schedule": SCHEDULE}
    with pytest.raises(ValueError, match=rf"model must be left out where task\.{task.key} is given, got 'some'"):
        parse_config({**values, "model": "some"})
    with pytest.raises(ValueError, match=rf"logging\.completions must be 0 where task\.{task.key} is given"):
        parse_config({**values, "logging": {"completions": 3}})


def test_a_task_names_one_task_type():
    every = {task.key for kind in TASK_TYPES.values() for task in kind.tasks}
    with pytest.raises(ValueError, match="exactly one of them, got none") as refusal:
        select_task({})
    assert all(key in str(refusal.value) for key in every)
