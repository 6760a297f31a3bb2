"""The study of unknown hyperparameters: tasks and arms, missing runs, tables, and a short run."""

import argparse
import json

import pytest

from benchmarking import study

NAMES = {
    "tasks": list(study.TASKS),
    "unknown": ["lr", "all"],
    "arms": list(study.ARMS),
    "seeds": [0, 1],
}


def chosen(**options):
    return argparse.Namespace(**NAMES | options)


def record(
    task="CartPole-v1", unknown="lr", arm="halving", seed=0, score=500.0, early=23.0, seconds=4.0
):
    return {
        "task": task, "unknown": unknown, "arm": arm, "seed": seed, "score": score, "early": early,
        "cost": 1000,
        "evaluations": 100, "seconds": seconds, "steps": 3, "best": {"lr": 1e-3},
    }  # fmt: skip


def test_known_arms_run_once_and_only_where_values_are_known():
    runs = list(study.wanted(chosen()))
    assert len(set(runs)) == len(runs)
    counts = {}
    for arm in study.ARMS:
        counts[arm] = sum(run[2] == arm for run in runs)
    tuned = sum(task.tuned is not None for task in study.TASKS.values())
    assert (counts["tuned"], counts["default"]) == (2 * tuned, 2 * len(study.TASKS))
    assert all(0 < count <= 4 * len(study.TASKS) for count in counts.values())
    assert all((unknown == "nothing") == (arm in study.KNOWN) for _, unknown, arm, _ in runs)
    seeds = [seed for *_, seed in runs]
    assert seeds == sorted(seeds)  # a part of the runs is balanced


@pytest.mark.parametrize(
    ("arm", "unknown", "lr", "target_kl"),
    [
        ("default", "lr", 2e-3, None),
        ("calibrated", "lr", 2e-3, 0.01),  # a given learning rate is only the first guess
        ("tournament", "lr", 2e-3, None),
        ("calibrated", "all", None, 0.003),
        ("halving", "all", None, 0.003),
    ],
)
def test_learning_rates_are_calibrated_where_they_are_unknown_and_not_searched(
    arm, unknown, lr, target_kl
):
    task = study.TASKS["CartPole-v1"]
    arm = study.ARMS[arm]
    first = {"lr": {"lr": lr}, "all": {"target_kl": target_kl}}[unknown]
    _, run = study.make_run(
        "CartPole-v1", task, arm, study.space_of(task, unknown), first, 0, task.budget
    )
    values = run.population[0].hyperparameters
    assert values.target_kl == target_kl
    assert lr is None or values.lr == lr


def test_recorded_runs_are_read_by_their_key_and_not_repeated(tmp_path, capsys):
    assert study.recorded(tmp_path, study.KEY) == {}
    runs = [
        record(unknown="all"),
        record(task="Acrobot-v1", arm="default", unknown="nothing", seed=1),
    ]
    for run in runs:
        (tmp_path / f"{run['task']}.jsonl").write_text(json.dumps(run) + "\n")
    assert study.recorded(tmp_path, study.KEY) == {
        ("CartPole-v1", "all", "halving", 0): runs[0],
        ("Acrobot-v1", "nothing", "default", 1): runs[1],
    }
    words = ["--tasks", "CartPole-v1", "--unknown", "all", "--arms", "halving", "--seeds", "0"]
    study.main(["run", *words, "--results", str(tmp_path)])
    assert capsys.readouterr().out == ""
    study.main(["table", *words, "--results", str(tmp_path)])
    assert "| halving | 1.00 | 1.00 (1.00 to 1.00) | 4 s |" in capsys.readouterr().out


def test_tables_show_single_scores_intervals_and_overall_columns():
    runs = [record(seed=seed, seconds=2.0 + seed) for seed in range(5)]
    runs += [record(task="Acrobot-v1", seed=seed, score=-498.0, early=-80.0) for seed in range(2)]
    runs += [record(arm="default", unknown="nothing", score=261.5)]
    runs += [record(task="two_digit_sums", unknown="all", arm="PBT", score=0.6, early=0.05)]
    tables = study.tables(runs).split("\n\n")
    assert [title.strip("*") for title in tables[::2]] == [
        "The learning rate is unknown, equal samples",
        "The learning rate is unknown, equal processor time",
        "Everything is unknown, equal samples",
        "Everything is unknown, equal processor time",
    ]
    samples, time = (table.splitlines() for table in tables[1:4:2])
    assert samples[0] == "| arm | CartPole-v1 | Acrobot-v1 | all environments | processor time |"
    rows = {line.split(" | ")[0].strip("| "): line for line in samples[2:]}
    assert rows.keys() == {"halving", "default"}  # those that ran
    # Scores are normalised. Of seven, one is left out at each end: 4 of the other 5 are 1.
    assert rows["halving"].startswith("| halving | 1.00 (1.00 to 1.00) | 0.00 0.00 | 0.80 (")
    assert rows["halving"].endswith(" | 4 s |")
    # Known values are in both tables, but not for every task.
    assert rows["default"] == "| default | 0.50 |  |  | 4 s |"
    (halving,) = (line for line in time if "halving" in line)
    assert halving.startswith("| halving | 0.00 (0.00 to 0.00) | 1.00 1.00 | 0.20 (")
    everything = tables[5].splitlines()
    columns = [
        "arm",
        "CartPole-v1",
        "two_digit_sums",
        "all environments",
        "all language tasks",
        "processor time",
    ]
    assert everything[0] == f"| {' | '.join(columns)} |"
    (pbt,) = (line for line in everything if line.startswith("| PBT |"))
    assert pbt == "| PBT |  | 1.00 |  | 1.00 (1.00 to 1.00) | 4 s |"


@pytest.mark.parametrize(
    ("unknown", "arm"),
    [pytest.param("lr", "halving", marks=pytest.mark.slow), ("all", "calibrated")],
)
def test_a_short_run_pays_for_everything_but_its_test(unknown, arm):
    found = json.loads(json.dumps(study.run_one("CartPole-v1", unknown, arm, 1000, 0.02)))
    assert (found["task"], found["unknown"], found["arm"], found["seed"]) == (
        "CartPole-v1",
        unknown,
        arm,
        1000,
    )
    assert 0 < found["evaluations"] < found["cost"]
    assert 8 <= found["score"] <= 500
    assert found["best"].keys() == set(
        study.space_of(study.TASKS["CartPole-v1"], {"all": "all"}.get(unknown, "lr"))
    )


@pytest.mark.slow
def test_the_command_records_missing_runs_and_goes_on(tmp_path, capfd):
    words = [
        "run",
        "--tasks",
        "CartPole-v1",
        "--unknown",
        "lr",
        "--arms",
        "calibrated",
        "--workers",
        "1",
    ]
    words += ["--budget", "0.02", "--results", str(tmp_path)]
    study.main([*words, "--seeds", "1000"])
    study.main([*words, "--seeds", "1000", "1001"])
    assert [seed for *_, seed in study.recorded(tmp_path, study.KEY)] == [1000, 1001]
    assert "FAILED" not in capfd.readouterr().out
