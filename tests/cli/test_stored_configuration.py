"""A run's stored configuration is bound to it; changes that make it another run are refused."""

import shutil
from pathlib import Path

import pytest
import yaml

from evogrpo.cli import main
from evogrpo.training.run_dir import open_run


@pytest.fixture
def configured(trained, workdir):
    shutil.copytree(trained, "run")
    path = Path("run/config.yaml")
    return path, yaml.safe_load(path.read_text())


def changed(values: dict, name: str, value: object) -> str:
    *outer, last = name.split(".")
    inner = values
    for key in outer:
        inner = inner[key]
    assert inner[last] != value
    inner[last] = value
    return yaml.safe_dump(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("search_space.lr.max", 0.5),
        ("agent.objective.loss_type", "dapo"),
        ("task.reward", "mine.py:score"),
        ("schedule.generations", 5),
    ],
)
def test_a_changed_stored_configuration_is_refused(configured, name, value, capsys):
    path, values = configured
    path.write_text(changed(values, name, value))
    capsys.readouterr()
    assert main(["resume", "run", "--generations", "2"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "was changed since the run began" in message
    assert f"{name} " in message


def test_allowed_changes_pass(configured):
    path, values = configured
    path.write_text(changed(values, "logging.completions", 3))
    assert main(["resume", "run", "--generations", "2"]) == 0
    assert open_run("run").record.run_state.generation == 2
    assert open_run("run").record.logging.completions == 3


@pytest.mark.parametrize("line", ["", f"run_id: {'f' * 32}\n"], ids=["cut off", "another run"])
@pytest.mark.parametrize(
    "command",
    [
        "resume run",
        "compare run other",
        "replay run",
        "export run out",
        "export run --schedule out",
    ],
)
def test_a_configuration_that_is_not_whole_or_of_another_run_is_refused(
    configured, trained, command, line, capsys
):
    path, values = configured
    assert list(values)[-1] == "run_id"
    *lines, _ = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, line]))
    shutil.copytree(trained, "other")
    assert main(command.split()) == 2
    assert str(path) in capsys.readouterr().err
    assert not Path("out").exists()


def test_training_after_the_newest_checkpoint_that_is_repeated_is_named(configured, capsys):
    shutil.rmtree("run/checkpoints/generation-0001")
    assert main(["resume", "run"]) == 0
    output = " ".join(capsys.readouterr().out.split())  # without the breaks of lines
    assert "newer checkpoints are missing" in output


def test_a_run_of_a_stored_configuration_has_its_own_id(configured, project):
    _, values = configured
    values["schedule"]["target_fitness"] = 0.0  # it is reached before training
    Path("copy.yaml").write_text(changed(values, "run_dir", "again"))
    assert main(["train", "copy.yaml"]) == 0
    assert yaml.safe_load(Path("again/config.yaml").read_text())["run_id"] != values["run_id"]
