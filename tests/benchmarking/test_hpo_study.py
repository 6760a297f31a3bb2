"""The study of searches: costs, resumption and statistics."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarking import hpo_study
from benchmarking.hpo import analysis, arms, playing, tasks


@pytest.fixture
def short(monkeypatch):
    """CartPole with a tiny budget."""
    task = dataclasses.replace(tasks.TASKS["CartPole-v1"], budget=900, members=3, validation=4, test=4)
    monkeypatch.setitem(tasks.TASKS, task.name, task)
    return task


@pytest.mark.parametrize("arm", ["random-search", "narrowing-shared"])
def test_an_arm_pays_for_everything_but_its_test(short, arm):
    record = json.loads(json.dumps(playing.play(short.name, "unknown", arm, 3)))
    assert record["cost"] >= short.budget
    assert 0 < record["evaluations"] < record["cost"]
    assert 9 <= record["score"] <= 500
    assert record["standard_error"] >= 0
    assert record["best"].keys() == short.space.keys()
    again = playing.play(short.name, "unknown", arm, 3)
    assert {**record, "seconds": 0, "early": 0} == {**again, "seconds": 0, "early": 0}


def test_arms_start_at_the_given_hyperparameters():
    task = tasks.TASKS["CartPole-v1"]
    search, oracle = arms.ARMS["narrowing"], arms.ARMS["oracle"]
    drawn = [playing.first_values(task, search, "unknown", seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert playing.first_values(task, arms.ARMS["one-drawn"], "unknown", 0) == drawn[0]
    assert playing.first_values(task, search, "wrong", 0)["lr"] == task.space["lr"].bounds[0]
    assert "lr" not in playing.first_values(task, search, "right", 0)
    assert playing.first_values(task, oracle, "unknown", 0)["lr"] == task.oracle["lr"]


def test_recorded_runs_are_not_repeated(tmp_path, short, capsys):
    words = ["run", "--tasks", short.name, "--starts", "unknown", "--arms", "narrowing", "--seeds", "0"]
    line = {"task": short.name, "start": "unknown", "arm": "narrowing", "seed": 0, "score": 1.0}
    (tmp_path / f"{short.name}.jsonl").write_text(json.dumps(line) + "\n")
    hpo_study.main([*words, "--results", str(tmp_path)])
    assert "0 runs to do, 1 recorded" in capsys.readouterr().out


def test_probability_of_improvement_counts_pairs_and_half_of_ties():
    ours, second_scores = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])
    found = analysis.probability_of_improvement([(ours, second_scores)])
    assert found.value == pytest.approx((1 + 1.5 + 2) / 6)  # of 2 each: 1 beats one, 2 beats one and ties, 3 beats both
    assert found.low < found.value < found.high
    assert analysis.probability_of_improvement([(ours + 9, second_scores)]).low == 1.0


def test_tables_and_figure_show_all_runs(tmp_path):
    runs = [
        {"task": task, "start": "unknown", "arm": arm, "seed": seed, "score": 100.0 + seed, "early": 50.0,
         "cost": 1000, "evaluations": 100, "seconds": 2.0}
        for task in ("CartPole-v1", "Acrobot-v1")
        for arm in ("oracle", "narrowing", "random-search")
        for seed in range(4)
    ]  # fmt: skip
    text = analysis.tables(runs)
    assert "| narrowing | " in text
    assert "1,000, 10 % evaluations, 2 s" in text
    assert analysis.draw(runs, tmp_path / "study.png").stat().st_size > 10_000
