"""Rewards in worker processes and the completions table, from the command line."""

import json
from pathlib import Path

import pytest

from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from tests.cli.project import command

SHORT = ("schedule.generations=1", "schedule.test_questions=0")
HANGING = """
import time

def score(completion, answer, question):
    if question == "7+4=" or len(completion) == 7:
        time.sleep(600)
    return min(completion.count("a"), 4) / 4
"""


def test_workers_do_not_change_the_results(project, workdir):
    for name, workers in (("plain", "null"), ("workers", "2")):
        run = ["train", str(project / "tiny.yaml"), "--run-dir", name, *SHORT, f"task.reward_workers={workers}"]
        assert main([*run, "task.reward_timeout=null" if workers == "null" else "task.reward_timeout=30"]) == 0
    tables = [sorted((workdir / name / "completions").iterdir()) for name in ("plain", "workers")]
    assert [path.name for path in tables[0]] == ["step-000000.jsonl", "step-000001.jsonl"]
    for one, other in zip(*tables, strict=True):
        assert one.read_bytes() == other.read_bytes()
    rows = [json.loads(line) for line in tables[0][0].read_text().splitlines()]
    assert len(rows) == 16
    assert [row["rewards/score"] for row in rows] == [min(row["completion"].count("a"), 4) / 4 for row in rows]


def test_a_hanging_reward_stops_the_run_and_names_the_completion(project, workdir):
    Path("hanging.py").write_text(HANGING)
    overrides = (*SHORT, "task.reward=hanging.py:score", "task.reward_timeout=1.0", "task.reward_workers=2")
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *overrides, cwd=workdir)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Reward function 'score' took longer than 1 s and was stopped for the completion" in errors
    assert "evogrpo resume run" in output


def test_a_function_that_cannot_be_pickled_is_refused(project, workdir, capsys):
    Path("inner.py").write_text(
        "import threading\nclass Score:\n    def __init__(self):\n        self.lock = threading.Lock()\n"
        "    def __call__(self, completion, answer, question):\n        return 0.0\nscore = Score()\n"
    )
    overrides = ("task.reward=inner.py:score", "task.reward_timeout=5")
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", *overrides]) == 2
    assert "Reward function 'Score' cannot be sent to a worker process" in capsys.readouterr().err


def test_a_dry_run_shows_how_rewards_are_computed(project, workdir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    overrides = [
        *("task.reward_timeout=2.5", "task.reward_workers=2", "task.on_reward_error=exclude"),
        *("agent.objective.dynamic_sampling=3", "agent.objective.overlong_buffer=4", "logging.completions=5"),
    ]
    run = ["train", str(project / "tiny.yaml"), "--dry-run"]
    assert main([*run, *overrides]) == 0
    output = capsys.readouterr().out
    assert "2 worker processes, at most 2.5 s a call, completions whose reward fails are left out" in output
    assert "64 in all; groups whose rewards are all equal are resampled up to 3 times" in output
    assert "overlong_buffer 4, dynamic_sampling 3" in output
    assert "5 per learning step are written as jsonl" in output
    assert list(workdir.iterdir()) == []
    assert main([*run, "logging.completions=0"]) == 0
    output = capsys.readouterr().out
    assert "none are written" in output
    assert "worker" not in output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.reward_timeout=0", "task.reward_timeout must be above 0"),
        ("task.reward_workers=-2", "task.reward_workers must be at least 0"),
        ("task.reward_workers=two", "task.reward_workers must be an integer"),
        ("logging.completions=-1", "logging.completions"),
        ("logging.completions_format=csv", "logging.completions_format"),
        (
            "task.reward_workers=0 task.reward_timeout=3",
            "reward_timeout requires reward_workers of at least 1 for 'score'",
        ),
    ],
)
def test_invalid_reward_settings_are_refused(project, workdir, capsys, override, message):
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", *override.split()]) == 2
    assert message in capsys.readouterr().err


def test_dynamic_sampling_and_overlong_buffer_train_and_write_parquet(project, workdir, capsys):
    overrides = ("agent.objective={dynamic_sampling: 2, overlong_buffer: 4}", "logging.completions_format=parquet")
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", "run", *SHORT, *overrides]) == 0
    output = capsys.readouterr().out
    assert "question" in output
    assert "advantage" in output
    assert sorted(path.name for path in Path("run/completions").iterdir()) == [
        "step-000000.parquet",
        "step-000001.parquet",
    ]
    members = next(event for event in read_journal(Path("run/journal.jsonl")) if event["event"] == "step")["members"]
    assert all(-1 <= member["rewards/overlong_penalty/mean"] <= 0 for member in members)
