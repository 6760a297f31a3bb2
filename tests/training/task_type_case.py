"""Conformance suite of task types."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evogrpo.reporting.records import terms_of
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.configuration.sections import CONFIG_FILE
from evogrpo.training.launch import read_resumable, resume, start, write_config
from evogrpo.training.run_dir import open_run
from evogrpo.training.task_types import TASK_TYPES, PreparedRun, TaskType, task_type_of


class TaskTypeTestCase(ABC):
    """Tests of a `TaskType`. Implement `values`."""

    @abstractmethod
    def values(self, folder: Path) -> dict[str, Any]:
        """Return a configuration as in YAML with `schedule.generations` of 1; files may be put into the folder."""

    @pytest.fixture
    def given(self, tmp_path: Path) -> dict[str, Any]:
        return self.values(tmp_path)

    @pytest.fixture
    def kind(self, given: Mapping[str, Any]) -> TaskType:
        return task_type_of(parse_config(given).task)

    @pytest.fixture
    def prepared(self, kind: TaskType, given: Mapping[str, Any]) -> PreparedRun:
        return kind.prepare(parse_config(given))

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
        assert config.agent.objective == kind.objective
        assert {name: getattr(config.hyperparameters, name) for name in kind.hyperparameters} == kind.hyperparameters
        assert config.logging.completions == kind.completions
        write_config(config, tmp_path)
        assert load_config(tmp_path / CONFIG_FILE) == config

    def test_a_partial_objective_keeps_the_other_defaults(self, kind, given):
        config = parse_config({**given, "agent": {"objective": {"advantage_eps": 1e-5}}})
        assert config.agent.objective == replace(kind.objective, advantage_eps=1e-5)

    def test_the_plan_is_printed(self, prepared, given):
        config = prepared.config
        for rows in (prepared.facts(), prepared.forecast().rows, config.task.facts()):
            assert all(name and words and "\n" not in words for name, words in rows.items())
        assert any(config.task.label in words for words in prepared.facts().values())
        assert "population" in prepared.facts()
        assert {"samples", "groups", "steps"} <= set(prepared.forecast().rows)

    def test_memory_does_not_depend_on_how_a_run_starts(self, kind, prepared):
        need = prepared.forecast().need
        assert need == kind.need(
            prepared.population(), prepared.env, prepared.config.schedule, prepared.config.experience
        )
        assert need.size > 0
        assert need.savings

    def test_founders_have_the_right_class_and_number(self, kind, prepared):
        population = prepared.population()
        assert len(population) == prepared.config.population.size
        assert population.members.kind == kind.word
        population.check(prepared.env)

    def test_founders_are_deterministic(self, kind, prepared, given):
        one, other = prepared.population(), kind.prepare(parse_config(given)).population()
        for mine, yours in zip(one, other, strict=True):
            assert mine.hyperparameters == yours.hyperparameters
            assert mine.state().keys() == yours.state().keys()
            assert all(torch.equal(mine.state()[name], yours.state()[name]) for name in mine.state())

    def test_a_run_trains_stores_resumes_and_is_reported(self, kind, prepared, given, tmp_path):
        folder = tmp_path / "run"
        with closing(prepared.env):
            run = start(prepared, folder)
            for report in run.reports():
                assert report.to_json()
            states = [agent.state() for agent in run.population]
        resumable = read_resumable(folder, ["generations=2"])
        again = kind.prepare(resumable.config)
        with closing(again.env):
            resumed = resume(again, resumable, folder)
            for agent, state in zip(resumed.population, states, strict=True):
                assert all(torch.equal(value, agent.state()[name]) for name, value in state.items())
            assert [report.generation for report in resumed] == [2]
        assert open_run(folder).base["kind"] == kind.word
        journal = read_journal(folder / "journal.jsonl")
        summary = summarise(journal)
        assert summary.facts["kind"] == kind.word
        assert summary.terms is terms_of(kind.word)
        assert len(summary.generations) == 2
        assert (folder / "completions").is_dir() == (kind.completions > 0)

    def test_best_member_can_be_used_as_promised(self, kind, tmp_path):
        from evogrpo.cli.main import make_parser

        assert kind.uses(tmp_path) or kind.commands(tmp_path)
        for expression in kind.uses(tmp_path).values():
            assert compile(expression, "expression", "eval")
            assert str(tmp_path) in expression
        for words in kind.commands(tmp_path).values():
            assert make_parser().parse_args([str(word) for word in words]).command

    def test_an_unavailable_device_is_refused(self, kind, given):
        with pytest.raises(ValueError, match="'cuda:99'"):
            kind.prepare(parse_config({**given, "device": "cuda:99"}))
