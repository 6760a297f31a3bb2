"""Plugins: strategies, samplers, environments and tasks of installed packages."""

import sys
from pathlib import Path

import pytest
import yaml

import evogrpo
from evogrpo.cli import main
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.configuration.user_code import plugin_names

MODULE = """
from pathlib import Path

import gymnasium

from evogrpo.envs.text.tasks import TASKS
from evogrpo.evolution.strategies import Tournament

Path("imported").touch()


sequences = TASKS["number_sequences"].build


class Strict(Tournament):
    pass


def pole(**options):
    return gymnasium.make("CartPole-v1", **options)


class Counting:
    def __init__(self, bank, log):
        self.bank, self.log = bank, Path(log)

    def sample(self, rows, *, base=False, on_finished=None):
        self.log.write_text(self.log.read_text() + "x" if self.log.exists() else "x")
        return self.bank.sample(rows, base=base, on_finished=on_finished)

    def sync(self, slots):
        pass


def counting(population, log):
    return Counting(population.members.bank, log)


value = 1
"""
ENTRIES = {
    "strict": "plugged:Strict",
    "pole": "plugged:pole",
    "counting": "plugged:counting",
    "sequences": "plugged:sequences",
    "value": "plugged:value",
    "broken": "plugged_broken:nothing",
}
SHADOWS = {
    "tournament": "plugged:Strict",
    "two_digit_sums": "plugged:sequences",
    "CartPole-v1": "plugged:pole",
}
NETWORKS = {
    "task": {
        "env": "Acrobot-v1",
        "train_size": 20,
        "validation_size": 2,
        "test_size": 2,
        "max_episode_steps": 5,
    },
    "population": {"size": 2},
    "search_space": {"lr": {"min": 1e-4, "max": 1e-2}},
    "hyperparameters": {"lr": 1e-3, "group_size": 4},
    "schedule": {"generations": 1, "steps_per_generation": 1, "samples_per_step": 4},
}


def install(folder: Path, name: str, entries: dict[str, str]) -> None:
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
    )
    lines = [f"{key} = {value}" for key, value in entries.items()]
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(
        "\n".join(["[evogrpo.plugins]", *lines, ""])
    )


@pytest.fixture
def installed(workdir, tmp_path_factory, monkeypatch) -> Path:
    """Install a package with plugins; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "plugged.py").write_text(MODULE)
    (folder / "plugged_broken.py").write_text("raise RuntimeError('half installed')")
    install(folder, "plugged", ENTRIES)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("plugged", "plugged_broken"):
        sys.modules.pop(name, None)


def test_plugins_are_imported_when_they_are_named(installed, workdir):
    assert {"strict", "pole", "broken"} <= set(plugin_names())
    parse_config(NETWORKS)
    assert not (workdir / "imported").exists()
    assert (
        type(parse_config(NETWORKS | {"strategy": {"name": "strict", "z": 2}}).strategy).__name__
        == "Strict"
    )
    assert (workdir / "imported").exists()
    assert evogrpo.train("Acrobot-v1", strategy="strict", **SHORT).trainer.strategy.z == 1


SHORT = {
    "size": 2, "lr": 1e-3, "generations": 1, "steps_per_generation": 1, "samples_per_step": 4,
    "group_size": 4,
    "validation_size": 2, "test_size": 2, "max_episode_steps": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"strategy": "tournament"},
            r"'tournament' \(plugged:Strict\) has the name of a built-in strategy",
        ),
        ({"task": {"name": "two_digit_sums"}, "model": "x"}, "has the name of a built-in task"),
        (
            {"strategy": "broken"},
            r"plugin 'broken' \(plugged_broken:nothing\) raised RuntimeError: half installed",
        ),
        ({"strategy": "value"}, "'value' .* must be a class or a function"),
        ({"strategy": "stric"}, "unknown strategy 'stric': did you mean 'strict'"),
        ({"sampler": {"name": "counting", "log": "x"}}, "sampler must be left out"),
    ],
)
def test_plugins_that_cannot_be_used_are_refused(installed, values, message):
    if "built-in" in message:
        install(installed, "shadows", SHADOWS)
    with pytest.raises(ValueError, match=message):
        parse_config(NETWORKS | values)


def test_two_plugins_of_one_name_are_refused(installed, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    install(other, "rival", {"strict": "rival:Strict"})
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(ValueError, match="Several plugins are called 'strict'"):
        parse_config(NETWORKS | {"strategy": "strict"})


def test_a_run_of_plugins_is_resumed(installed, workdir, capsys):
    values = NETWORKS | {"strategy": {"name": "strict", "z": 2}}
    values["task"] = values["task"] | {"env": "pole"}
    (workdir / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "config.yaml", "--run-dir", "run"]) == 0
    assert main(["resume", "run", "--generations", "2"]) == 0
    install(installed, "shadows", SHADOWS)
    with pytest.raises(
        ValueError, match=r"'CartPole-v1' .* has the name of a built-in environment"
    ):
        parse_config(
            NETWORKS | {"strategy": "fixed", "task": {"env": "CartPole-v1"}}
        ).task.environment(seed=0)


def test_a_sampler_of_the_configuration_samples_in_a_resumed_run_too(installed, project, workdir):
    values = yaml.safe_load((project / "tiny.yaml").read_text())
    values |= {"sampler": {"name": "plugged:counting", "log": "calls"}, "population": {"size": 2}}
    values["schedule"] |= {"generations": 1, "steps_per_generation": 1, "test_questions": 0}
    values["task"] = {"name": "sequences", "validation_size": 2, "test_size": 2}
    (workdir / "config.yaml").write_text(
        yaml.safe_dump(values | {"model": str(project / values["model"])})
    )
    assert main(["train", "config.yaml", "--run-dir", "run"]) == 0
    calls = len((workdir / "calls").read_text())
    assert calls > 0
    assert main(["resume", "run", "--generations", "2"]) == 0
    assert len((workdir / "calls").read_text()) > calls
    assert main(["train", "config.yaml", "--run-dir", "wrong", "sampler.port=1"]) != 0
