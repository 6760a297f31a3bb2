"""A run's configuration is bound to it: what would make it another experiment is refused when it goes on."""

import shutil
from pathlib import Path

import pytest
import yaml

from evogrpo.cli import main
from evogrpo.training.load_run import open_run


@pytest.fixture(scope="module")
def trained(project, tmp_path_factory):
    """Train once, in a folder that tests copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert main(["train", str(project / "tiny.yaml"), "--run-dir", "run", "schedule.generations=1"]) == 0
        return Path("run").absolute()


@pytest.fixture
def configured(trained, here):
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
        ("seed", 7),
        ("hyperparameters.lr", 0.01),
        ("search_space.lr.max", 0.5),
        ("population.size", 2),
        ("agent.max_output_tokens", 7),
        ("agent.objective.loss_type", "dapo"),
        ("task.validation_size", 8),
        ("task.reward", "mine.py:score"),
        ("strategy.z", 3.0),
    ],
)
def test_a_stored_configuration_that_was_changed_is_refused_by_name(configured, name, value, capsys):
    path, values = configured
    path.write_text(changed(values, name, value))
    capsys.readouterr()
    assert main(["resume", "run", "--generations", "2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "was changed since the run began" in said
    assert f"{name} " in said


def test_what_is_ignored_is_said_and_what_may_change_passes(configured, capsys):
    path, values = configured
    changed(values, "schedule.generations", 5)
    path.write_text(changed(values, "logging.completions", 3))
    assert main(["resume", "run", "--generations", "2"]) == 0
    printed = capsys.readouterr()
    assert "The change of schedule.generations in run/config.yaml has no effect" in " ".join(printed.err.split())
    assert open_run("run").record["progress"]["generation"] == 2
    assert open_run("run").record["records"]["completions"] == 3


def test_the_configuration_of_another_run_is_refused_and_starts_a_new_one(configured, project, capsys):
    path, values = configured
    own = values["run_id"]
    path.write_text(changed(values, "run_id", "0" * 32))
    assert main(["resume", "run", "--generations", "2"]) == 2
    assert "is the configuration of another run" in capsys.readouterr().err
    Path("copy.yaml").write_text(changed(values, "run_dir", "again"))
    assert main(["train", "copy.yaml"]) == 0
    assert yaml.safe_load(Path("again/config.yaml").read_text())["run_id"] not in (own, "0" * 32)
