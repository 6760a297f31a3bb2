"""Rewards in worker processes and the completions table, from the command line."""

from pathlib import Path

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
    overrides = (
        *SHORT,
        "task.reward=hanging.py:score",
        "task.reward_timeout=0.2",
        "task.reward_workers=1",
    )
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *overrides, cwd=workdir)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert (
        "Reward function 'score' took longer than 0.2 s and was stopped for the completion"
        in errors
    )
    assert "evogrpo resume run" in output
