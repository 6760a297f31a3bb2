"""Conformance of the task types."""

import json
import re
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import replace

import pytest

from evogrpo import TOOLS_TEMPLATE
from evogrpo.cli.main import make_parser
from evogrpo.envs.text.tools import hermes_template
from evogrpo.reporting.records import TERMS, terms_of
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.configuration.sections import CONFIG_FILE
from evogrpo.training.run_dir import open_run
from evogrpo.training.start import read_run, start, write_config
from evogrpo.training.task_types import TASK_TYPES, task_type_of
from tests.cli.project import CONFIG, write_project
from tests.envs.conftest import build
from tests.envs.test_environment_gym import CHAT as TOOLS
from tests.envs.test_environment_gym import tiny_language_model
from tests.tiny_training import equal_states


class TaskTypeTestCase(ABC):
    """Conformance suite of task types. Implement `values`."""

    @abstractmethod
    def values(self, folder):
        """Return a configuration as in YAML with `schedule.generations` of 1.

        Files may be put into the folder.
        """

    @pytest.fixture
    def given(self, tmp_path):
        return self.values(tmp_path)

    @pytest.fixture
    def kind(self, given):
        return task_type_of(parse_config(given).task)

    @pytest.fixture
    def built(self, kind, given):
        return kind.build(parse_config(given))

    def test_task_type_is_found_by_name_and_by_task(self, kind):
        assert TASK_TYPES[kind.word] is kind
        assert kind.tasks
        for other in TASK_TYPES.values():
            shared = {task.key for task in kind.tasks} & {task.key for task in other.tasks}
            assert other is kind or not shared
        assert all(task.description for task in kind.tasks)

    def test_defaults_round_trip(self, kind, given, tmp_path):
        config = parse_config({**given, "agent": {}, "hyperparameters": {}})
        assert isinstance(config.agent, kind.agent)
        assert config.agent.objective == kind.agent().objective
        partial = parse_config({**given, "agent": {"objective": {"advantage_eps": 1e-5}}})
        assert partial.agent.objective == replace(kind.agent().objective, advantage_eps=1e-5)
        assert {
            name: getattr(config.hyperparameters, name) for name in kind.hyperparameters
        } == kind.hyperparameters
        assert config.logging.completions == kind.completions
        write_config(config.to_json(), tmp_path)
        assert load_config(tmp_path / CONFIG_FILE) == config

    def test_the_plan_is_printed(self, built, given):
        config = built.config
        for rows in (built.facts(), built.forecast.rows, config.task.facts()):
            assert all(name and words and "\n" not in words for name, words in rows.items())
        assert any(config.task.label in words for words in built.facts().values())
        assert "population" in built.facts()
        assert {"samples", "groups", "steps"} <= set(built.forecast.rows)

    def test_memory_does_not_depend_on_how_a_run_starts(self, kind, built):
        need = built.forecast.memory
        assert need == kind.memory_need(built.population(), built.env, built.config.schedule)
        assert need.size > 0
        assert need.savings

    def test_founders_have_the_right_class_and_number_and_are_deterministic(
        self, kind, built, given
    ):
        population = built.population()
        assert len(population) == built.config.population.size
        assert population.members.kind == kind.word
        population.check(built.env)
        for member, same in zip(
            population, kind.build(parse_config(given)).population(), strict=True
        ):
            assert member.hyperparameters == same.hyperparameters
            assert equal_states(member.state(), same.state())

    def test_a_run_trains_stores_resumes_and_is_reported(self, kind, given, tmp_path):
        folder = tmp_path / "run"
        built, run = start(parse_config(given), folder)
        with closing(built.env):
            assert all(report.to_json() for report in run.reports())
            states = [agent.state() for agent in run.population]
        stored, config = read_run(folder, ["generations=2"])
        again, resumed = start(config, folder, stored=stored)
        with closing(again.env):
            for agent, state in zip(resumed.population, states, strict=True):
                assert equal_states(agent.state(), state)
            assert [report.generation for report in resumed] == [2]
        assert open_run(folder).base["kind"] == kind.word
        journal = read_journal(folder / "journal.jsonl")
        summary = summarise(journal)
        assert summary.facts["kind"] == kind.word
        assert summary.terms is terms_of(kind.word)
        assert len(summary.generations) == 2
        assert (folder / "completions").is_dir() == (kind.completions > 0)

    def test_best_member_can_be_used_as_promised(self, kind, tmp_path):
        assert compile(kind.usage(tmp_path), "expression", "eval")
        assert str(tmp_path) in kind.usage(tmp_path)
        _, words = kind.next_command(tmp_path)
        assert make_parser().parse_args([str(word) for word in words]).command


SCHEDULE = {"generations": 1, "steps_per_generation": 2, "samples_per_step": 8}


class TestLanguage(TaskTypeTestCase):
    def values(self, folder):
        write_project(folder)
        task = {
            **CONFIG["task"],
            "dataset": {"train": str(folder / "train.jsonl")},
            "validation_size": 4,
        }
        task |= {"reward": f"{folder / 'rewards.py'}:score", "test_size": 4}
        parts = {
            "hyperparameters": {"group_size": 4},
            "agent": {"max_output_tokens": 4},
            "population": {"size": 2},
        }
        return {"model": str(folder / "model"), "task": task, "schedule": SCHEDULE, **parts}


class TestEnvironments(TaskTypeTestCase):
    """An example in TRL's documentation, whose environment draws its own tasks."""

    def values(self, folder):
        (folder / "increment.py").write_text(INCREMENT)
        (folder / "tools.jinja").write_text(TOOLS)
        (folder / "hermes.json").write_text(json.dumps(hermes_template(build(None))))
        tokenizer = build("{{ 'a template without tools' }}")
        tokenizer.save_pretrained(folder / "model")
        tiny_language_model(len(tokenizer)).save_pretrained(folder / "model")
        task = {
            "dataset": {"starts": 40},
            "environment_factory": f"{folder / 'increment.py'}:IncrementEnv",
        }
        task |= {"max_turns": 2, "validation_size": 4, "test_size": 4}
        task |= {
            "chat_template": str(folder / "tools.jinja"),
            "response_template": str(folder / "hermes.json"),
        }
        parts = {
            "hyperparameters": {"group_size": 4},
            "agent": {"max_output_tokens": 4},
            "population": {"size": 2},
        }
        return {"model": str(folder / "model"), "task": task, "schedule": SCHEDULE, **parts}

    def test_templates_come_from_files(self, built):
        assert built.outline.tokenizer.chat_template == TOOLS
        assert built.outline.tokenizer.response_template == hermes_template(build(None))

    def test_the_template_of_the_package_replaces_template_and_parser(self, built):
        tokenizer = build(None)
        tokenizer.response_template = hermes_template(tokenizer)
        replace(built.config.task, chat_template="tools", response_template=None).set_templates(
            tokenizer
        )
        assert (tokenizer.chat_template, tokenizer.response_template) == (TOOLS_TEMPLATE, None)

    def test_each_start_has_its_own_task(self, built):
        prompts = [
            built.env.tokenizer.decode(each)
            for each in built.env.make_batch("train", range(20)).prompts
        ]
        tasks = {prompt.partition("<u>")[2] for prompt in prompts}
        assert tasks <= {f"Increment the counter by {number}.<eos>\n<a>" for number in range(1, 7)}
        assert len(tasks) > 1

    def test_the_token_forecast_counts_turns(self, kind, given):
        def tokens(turns=2, **agent):
            parts = {
                "task": {**given["task"], "max_turns": turns},
                "agent": {**given["agent"], **agent},
            }
            values = {**given, **parts, "population": {"size": 1}}
            row = kind.build(parse_config(values)).forecast.rows["tokens"]
            return row.split()[0], int(re.search(r"([\d,]+) per", row)[1].replace(",", ""))

        # 8 conversations are sampled and learnt from once; a turn adds a completion and a reply of
        # 4 tokens each.
        about, two = tokens()
        _, four = tokens(turns=4)
        assert four - two == 2 * 8 * 2 * (4 + 4)
        at_most, limited = tokens(max_episode_tokens=10)
        assert two - limited == 2 * 8 * (3 * 4 - 10)
        assert (about, at_most) == ("about", "at")


INCREMENT = """
import random

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        '''
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        '''
        self.counter += step
        return self.counter
"""


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
    tried = {
        TestLanguage: "language",
        TestEnvironments: "language",
        TestNetworks: "networks",
        TestTeam: "joint",
    }
    assert set(tried.values()) == set(TASK_TYPES) == set(TERMS)


def test_videos_of_more_episodes_than_the_test_split_has_are_refused(tmp_path):
    config = parse_config({"task": {"env": "CartPole-v1", "test_size": 10}})
    with pytest.raises(ValueError, match=r"episodes .* 10.* got 11"):
        task_type_of(config.task).record_videos(config, tmp_path / "best", tmp_path, 11)
