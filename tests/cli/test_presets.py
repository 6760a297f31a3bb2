"""Presets of tuned hyperparameters."""

import gymnasium
import pytest
from packaging.version import Version

from evogrpo import train
from evogrpo.cli import main
from evogrpo.training.configuration.environment_tasks import packaged_values, preset, preset_ids
from evogrpo.training.configuration.reading import load_config, override, parse_config
from evogrpo.training.configuration.sections import CONFIG_FILE

TINY = [
    "population.size=2",
    "schedule.generations=1",
    "schedule.steps_per_generation=1",
    "task.validation_size=2",
    "task.test_size=2",
    "task.max_episode_steps=10",
]


def plan(capsys, *arguments):
    assert main(["train", *arguments, "--dry-run"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", preset_ids())
def test_a_preset_changes_the_defaults_of_its_environment(name):
    if name == "Taxi-v4" and Version(gymnasium.__version__) < Version("1.3"):
        pytest.skip("Gymnasium has Taxi-v4 from 1.3 on")
    usual = packaged_values(name, with_preset=False)
    chosen = packaged_values(name, with_preset=True)
    assert gymnasium.spec(name).id == name
    config = parse_config(chosen)
    assert config.task.env == name
    assert config != parse_config(usual)
    preset_values = preset(name)
    assert preset_values.pop("strategy") == "tournament"  # as measured
    for section, values in preset_values.items():  # every value differs from the default
        assert {
            key
            for key, value in values.items()
            if usual.get(section, {}).get(key, "absent") == value
        } == set()
    assert override(chosen, ["population.size=3"])["population"]["size"] == 3


def test_the_plan_names_the_preset_and_explicit_settings_win(capsys):
    usual = plan(capsys, "--env", "CartPole-v1")
    chosen = plan(capsys, "--env", "CartPole-v1", "--preset")
    preset_values = plan(capsys, "--env", "CartPole", "--preset", "population.size=7")
    assert "preset" not in usual
    assert "preset tuned values for CartPole-v1" in chosen
    members = preset("CartPole-v1")["population"]["size"]
    assert f"population {members} members" in chosen
    assert "population 1 member" in usual
    assert "population 7 members" in preset_values


def test_python_and_command_line_use_the_same_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--env", "CartPole-v1", "--preset", "--run-dir", "one", *TINY]) == 0
    tiny = {
        "size": 2,
        "generations": 1,
        "steps_per_generation": 1,
        "validation_size": 2,
        "test_size": 2,
    }
    train("CartPole-v1", preset=True, run_dir="other", max_episode_steps=10, progress=False, **tiny)
    command_config = load_config(tmp_path / "one" / CONFIG_FILE).to_json()
    python_config = load_config(tmp_path / "other" / CONFIG_FILE).to_json()
    for name in ("run_dir", "run_id"):
        assert command_config.pop(name) != python_config.pop(name)
    assert command_config == python_config
    assert command_config["hyperparameters"]["lr"] == preset("CartPole-v1")["hyperparameters"]["lr"]
    capsys.readouterr()
