"""Rewards in worker processes and the completions table, from the command line."""

from pathlib import Path

from evogrpo.cli import main
from tests.cli.project import command

SHORT = ("schedule.generations=1", "schedule.test_questions=0")
HANGING = """
import time

def score(completion, answer, question):
    if question == "7+4=" or len(completion) == 7:
        time.sleep(600)
    return min(completion.count("a"), 4) / 4
"""


def test_a_hanging_reward_stops_the_run_and_names_the_completion(project, workdir):
    Path("hanging.py").write_text(HANGING)
    overrides = (*SHORT, "task.reward=hanging.py:score", "task.reward_timeout=0.2", "task.reward_workers=1")
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *overrides, cwd=workdir)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Reward function 'score' took longer than 0.2 s and was stopped for the completion" in errors
    assert "evogrpo resume run" in output


def test_a_dry_run_computes_rewards_in_workers_and_writes_nothing(project, workdir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    overrides = [
        *("task.reward_timeout=2.5", "task.reward_workers=2", "task.on_reward_error=exclude"),
        *("agent.objective.dynamic_sampling=3", "agent.objective.overlong_buffer=4"),
    ]
    run = ["train", str(project / "tiny.yaml"), "--dry-run"]
    assert main([*run, *overrides]) == 0
    output = capsys.readouterr().out
    assert "64 in all. Groups with equal rewards are resampled up to 3 times" in output
    assert "overlong_buffer 4, dynamic_sampling 3" in output
    assert list(workdir.iterdir()) == []
    assert "worker" not in output
