"""The commands `tasks` and `doctor`."""

import importlib.metadata
import importlib.util
import sys

from evogrpo.cli import main
from evogrpo.cli.doctor import check_folders
from evogrpo.envs.text.tasks import TASKS
from evogrpo.extras import extra_command
from evogrpo.training.configuration.environment_tasks import preset_ids


def test_tasks_lists_built_in_tasks_environments_and_presets(capsys):
    assert main(["tasks"]) == 0
    output = " ".join(capsys.readouterr().out.split())  # a narrow terminal breaks lines
    for name, task in TASKS.items():
        assert name in output
        assert task.description in output
    for words in (
        "Acrobot-v1, CartPole-v1, MountainCar-v0",
        f"hyperparameters with --preset: {', '.join(preset_ids())}",
    ):
        assert words in output
    if importlib.util.find_spec("reasoning_gym") is None:
        assert extra_command("reasoning") in output
    else:
        assert "chain_sum" in output


def test_doctor_checks_everything_and_says_if_the_demo_can_run(capsys):
    code = main(["doctor"])
    output = capsys.readouterr().out
    for name in (
        "python",
        "torch",
        "memory",
        "demo model",
        "runs folder",
        "model cache",
        "datasets",
        "moviepy",
    ):
        assert name in output
    assert ("The demo can run here" in output) == (code == 0)
    assert ("FAIL" in output) == (code == 1)


def test_an_unwritable_cache_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVOGRPO_CACHE", str(tmp_path / "file"))
    states = {finding.name: finding for finding in check_folders()}
    assert states["runs folder"].state == "ok"
    assert states["model cache"].state == "problem"
    assert "EVOGRPO_CACHE" in states["model cache"].remedy


def test_a_failing_check_does_not_stop_the_others(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "FAIL  torch" in output
    assert "memory" in output
