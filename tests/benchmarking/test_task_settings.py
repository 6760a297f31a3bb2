"""The study of rewards of unknown use: curves, recorded runs and tables."""

import json

import pytest

from benchmarking import task_settings


def test_a_curve_has_what_would_be_handed_over_at_each_share():
    curve = task_settings.Curve(100.0)
    curve.advance(40, lambda: 1.0, 2, 0.5)
    curve.advance(100, lambda: 2.0, 5, 1.0)
    curve.advance(300, lambda: 3.0, 9, 2.0)
    curve.advance(float("inf"), lambda: 4.0, 12, 3.0)
    assert curve.scores == {0.25: 1.0, 0.5: 2.0, 1.0: 3.0, 2.0: 3.0, 4.0: 4.0}
    assert list(curve.learning_steps.values()) == [2, 5, 9, 9, 12]


def test_recorded_runs_are_not_repeated_and_make_tables(tmp_path, capsys):
    for arm, score in (("drawn", -200.0), ("halving", -126.0)):
        run = {
            "task": "mountaincar",
            "arm": arm,
            "seed": 0,
            "scores": [-200.0] * 4 + [score],
            "learning_steps": [0, 1, 2, 3, 4],
            "seconds": [0.0, 1.0, 2.0, 3.0, 4.0],
        }
        with (tmp_path / "mountaincar.jsonl").open("a") as file:
            file.write(json.dumps(run) + "\n")
    words = ["--tasks", "mountaincar", "--arms", "drawn", "halving", "--seeds", "0"]
    task_settings.main(["run", *words, "--results", str(tmp_path)])
    assert capsys.readouterr().out == ""
    task_settings.main(["table", *words, "--results", str(tmp_path)])
    output = capsys.readouterr().out
    assert "**1 tasks**, seeds 0" in output
    assert "| halving | 0.00 | 0.00 | 0.00 | 0.00 | 1.00 | 0 of 1 |" in output
    assert "| drawn | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | 4 | 4 s |" in output
    assert "| halving | 0.00 | 0.00 | 0.00 | 0.00 | 1.00 | 4 | 4 s |" in output


@pytest.mark.parametrize("name", list(task_settings.TASKS))
def test_each_task_has_an_environment_with_all_of_its_components(name):
    task = task_settings.TASKS[name]
    arm = task_settings.Arm(first="one", members=1)
    weights = dict.fromkeys(task.rewards, 1.0)
    env, run = task_settings.make_run(task, arm, weights, 0, 1, 0)
    settings = run.population[0].hyperparameters.task_settings
    assert dict(settings) == {f"reward_weights.{each}": 1.0 for each in task.rewards}
    assert task.normalised(task.solved) == 1
    assert env.size("test") == 100
