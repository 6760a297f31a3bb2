"""Arguments of the command line: fast help, errors, exit codes."""

import sys
from pathlib import Path

import pytest

from evogrpo.cli import main
from evogrpo.cli.main import make_parser
from evogrpo.text import relative_path
from evogrpo.training.console import command


def test_help_is_also_a_command(capsys):
    output = []
    for arguments in (["help"], ["--help"], ["help", "train"], ["train", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        output.append(capsys.readouterr().out)
    assert output[0] == output[1] != output[2] == output[3]
    assert "128 + N" in output[0]  # exit codes are listed once
    assert "128 + N" not in output[2]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "COMMAND"),
        (["trian"], "train"),
        (["train", "c.yaml", "--dryrun"], "--dry-run"),
        (["train", "c.yaml", "--total-timesteps", "1e4"], "schedule.max_timesteps=VALUE"),
        (["train", "c.yaml", "--learning_rate=1e-3"], "hyperparameters.lr=1e-3"),
        (["train", "c.yaml", "--schedule.generations=3"], "schedule.generations=3"),
        (
            ["train", "c.yaml", "--max-steps", "9"],
            "schedule.generations times schedule.steps_per_generation",
        ),
        (["train", "--config", "c.yaml"], "mine.yaml"),
        (["resume", "run", "--lr", "1e-3"], "--lr"),
        (["train", "--env", "CartPole-v1", "--parallel-env", "json"], "not allowed with"),
        (["train", "c.yaml", "--exit-code-on-stop", "256"], "--exit-code-on-stop"),
        (["lineage", "run", "two\x1b[31m"], r"two\x1b[31m"),
    ],
)
def test_usage_errors_exit_with_2_and_suggest_the_nearest_name(arguments, name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "usage: evogrpo" in error
    assert name in error.partition("error: ")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.yaml"], "cannot read missing.yaml"),
        (["train"], "--env ID"),
        (["train", "gsm8k"], "evogrpo tasks"),
        (["train", "my_reward.py:f"], "task.reward: my_reward.py:f"),
        (["train", "rows.jsonl"], "task.dataset.train"),
        (["train", "mpe2.simple_spread_v3"], "--parallel-env"),
        (["train", "--env", "mpe2.simple_spread_v3"], "--parallel-env mpe2.simple_spread_v3"),
        (["train", "--parallel-env", "CartPole-v1"], "--env CartPole-v1"),
        (["demo", "mine.yaml"], "evogrpo train mine.yaml"),
        (["train", "mine.yaml", "--env", "CartPole-v1"], "mine.yaml"),
        (["train", "--parallel-env", "json", "task.parallel_env=json"], "already sets the task"),
        (["demo", "schedul.generations=3"], "did you mean 'schedule'?"),
        (["demo", "--seed", "1", "generations"], "key=value"),
        (["train", "--env", "MountainCar-v0", "--preset"], "no preset for MountainCar-v0"),
        (["train", "config.yaml", "--preset"], "--preset needs --env"),
        (
            ["train", "--parallel-env", "mpe2.x", "--wrapper", "FlattenObservation"],
            "--wrapper needs --env",
        ),
        (["resume", "."], "config.yaml"),
        (["report", "."], "cannot read the journal"),
        (["export", ".", "folder"], "cannot read the journal"),
    ],
)
def test_a_refused_request_is_one_line_with_exit_code_2(workdir, arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list(workdir.iterdir()) == []


def test_traceback_option_raises_the_error(workdir):
    with pytest.raises(ValueError, match="cannot read"):
        main(["train", "missing.yaml", "--traceback"])


def test_printed_commands_work_without_an_activated_environment(monkeypatch, tmp_path):
    assert command("resume", "a run") == "evogrpo resume 'a run'"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command("resume", "run") == f"{sys.executable} -m evogrpo resume run"


@pytest.mark.parametrize("name", ["resume", "report", "export", "video"])
def test_a_missing_run_is_reported(workdir, capsys, name):
    (workdir / "runs" / "demo-2").mkdir(parents=True)
    rest = ["out"] if name == "export" else []
    for folder, words in (
        ("runs/dem-2", f"Did you mean {Path('runs/demo-2')}?"),
        ("nowhere", "nowhere is not a folder"),
        ("demo-2", f"Did you mean {Path('runs/demo-2')}?"),
    ):
        assert main([name, folder, *rest]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([name])
    assert "KEY=VALUE" not in capsys.readouterr().err.splitlines()[-1]


def test_a_tilde_that_the_shell_leaves_is_the_home_folder():
    parser = make_parser()
    for words in (["resume", "~/run"], ["demo", "--run-dir=~/run"]):
        assert parser.parse_args(words).run_dir == Path.home() / "run"
    with pytest.raises(SystemExit):
        parser.parse_args(["resume", "~no-such-user/run"])


def test_a_removed_working_directory_is_named(workdir, capsys):
    workdir.rmdir()
    assert relative_path(workdir / "run") == str(workdir / "run")
    assert main(["train", "mine.yaml"]) == 1
    assert "working directory" in capsys.readouterr().err


def test_a_width_of_0_is_no_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["tasks"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out


def test_usage_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in (
        "demo",
        "train",
        "resume",
        "video",
        "report",
        "tasks",
        "schema",
        "doctor",
        "export",
    ):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80, name
