"""max_timesteps: environment steps of all members without evaluations."""

import pytest

from evogrpo import evolve
from evogrpo.cli.main import main
from evogrpo.reporting.records import GenerationReport, StepReport, TestReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.display import TimeEstimate
from tests.envs import joint_probes
from tests.tiny_steps import QUICK, step_run
from tests.tiny_training import finish, tiny_run

# From multi-agent tests.
from tests.training.test_multi_agent_runs import environment, members


def played(run):
    """Return the number of steps after each learning step, from the lengths of episodes."""
    total, counted = 0.0, []
    for report in run.reports():
        if isinstance(report, StepReport):
            lengths = [member.metrics["completions/mean_length"] for member in report.learned.values()]
            total += QUICK["samples_per_step"] * sum(lengths)
            counted.append(round(total))
    return counted


def test_a_run_ends_with_the_step_that_reaches_the_limit():
    whole = played(step_run(None))
    for budget, steps in ((whole[2], 3), (whole[2] + 1, 4), (1, 1)):
        run = step_run(None, generations=None, max_timesteps=budget)
        reports = finish(run)
        assert sum(isinstance(report, StepReport) for report in reports) == steps
        assert isinstance(reports[-2], GenerationReport)  # every trained generation is evaluated
        assert isinstance(reports[-1], TestReport)
        assert run.result.timesteps == reports[-2].timesteps == whole[steps - 1] < run.result.tokens
        assert run.result.complete
        assert run.result.reason == f"max_timesteps {budget:,} is reached"
        assert TimeEstimate(run).fraction() == 1.0


def test_every_agent_of_a_team_counts():
    """As in a vector environment of agents."""
    env = environment(joint_probes.Favours)
    run = evolve(members(env), env, **QUICK | {"generations": None, "max_timesteps": 1})
    report = next(run)
    lengths = [member.metrics["completions/mean_length"] for member in report.members]
    assert report.timesteps >= QUICK["samples_per_step"] * sum(lengths) > 0
    assert list(run) == []


def test_a_resumed_run_counts_earlier_steps_and_may_raise_the_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "schedule.samples_per_step=8 schedule.steps_per_generation=1 population.size=2 task.validation_size=2"
    words += (
        " hyperparameters.group_size=4 schedule.test_questions=0 task.max_episode_steps=20 schedule.generations=null"
    )
    words += " schedule.max_timesteps=20"
    assert main(["train", "--env", "CartPole-v1", "--run-dir", "run", *words.split()]) == 0
    assert "max_timesteps=null" in capsys.readouterr().out  # otherwise the run would end at once
    assert main(["resume", "run"]) == 0
    assert "max_timesteps 20 is reached" in capsys.readouterr().out
    assert main(["resume", "run", "max_timesteps=400"]) == 0
    shown = capsys.readouterr().out
    generations = [
        event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "generation"
    ]
    counts = [event["timesteps"] for event in generations]
    assert counts[-2] < 400 <= counts[-1]
    assert f"{counts[-1]} environment steps" in shown


def test_a_dry_run_shows_the_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    limits = ["schedule.generations=null", "schedule.max_timesteps=250000"]
    assert main(["train", "--env", "CartPole-v1", "--dry-run", *limits]) == 0
    assert "250,000 environment steps" in " ".join(capsys.readouterr().out.split())


def test_language_models_refuse_max_timesteps():
    with pytest.raises(ValueError, match="max_timesteps"):
        tiny_run(None, generations=None, max_timesteps=100)
    values = {"model": "somewhere", "task": {"name": "two_digit_sums"}, "schedule": {"max_timesteps": 100}}
    with pytest.raises(ValueError, match="max_timesteps"):
        parse_config(values)
    assert finish(tiny_run(None, generations=1))[-2].timesteps is None
