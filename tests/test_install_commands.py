"""Optional packages: a run with none of them, and the printed install commands."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from evogrpo import extras
from evogrpo.extras import EXTRA_OF, extra_command, package_command

PACKAGE = Path(extras.__file__).parent
OPTIONAL = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]

# Everything that is optional is blocked, as in an environment with the core alone.
PROGRAM = """
import json, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import evogrpo
from evogrpo.cli import main
from evogrpo.training.configuration.dataset_files import DatasetFiles
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.task_types import task_type_of

run = evogrpo.train(
    "CartPole-v1",
    generations=1,
    steps_per_generation=2,
    samples_per_step=16,
    group_size=8,
    lr=5e-3,
    size=2,
    validation_size=2,
    test_size=2,
    run_dir="run",
)
code = main(["report", "run"])
schedule = {"generations": 1, "samples_per_step": 8}
languages = parse_config({"task": {"name": "two_digit_sums"}, "schedule": schedule})
calls = {
    "load_base: llm": lambda: evogrpo.load_base,
    "configuration: llm": lambda: task_type_of(languages.task).build(languages),
    "environment: multi-agent": lambda: evogrpo.PettingZooGroups(lambda: None),
    "figure: report": lambda: evogrpo.report("run").figure,
    "data frames: pandas": lambda: evogrpo.read_run("run"),
    "video: video": lambda: evogrpo.record_video(run.best, "CartPole-v1", "play.mp4"),
    "hub: datasets": DatasetFiles(hub="name").tables,
}
messages = {}
for name, call in calls.items():
    try:
        call()
    except ImportError as error:
        messages[name] = str(error)
print(json.dumps({"code": code, "messages": messages, "loaded": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory):
    """Folder and output of a program that runs without any optional package."""
    folder = tmp_path_factory.mktemp("core")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(EXTRA_OF)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder, result.stdout.splitlines()


def test_small_networks_train_without_optional_packages(core_alone):
    folder, lines = core_alone
    output = json.loads(lines[-1])
    assert output["code"] == 0
    assert not set(output["loaded"]) & EXTRA_OF.keys()
    assert (folder / "run" / "best").is_dir()
    assert (folder / "run" / "report.html").is_file()
    assert not (folder / "run" / "report.png").exists()
    assert not (folder / "run" / "tensorboard").exists()
    assert "report.png requires matplotlib" in lines[0]


def test_a_missing_extra_raises_with_its_command(core_alone):
    messages = json.loads(core_alone[1][-1])["messages"]
    assert len(messages) == 7
    for name, message in messages.items():
        assert message.endswith(extra_command(name.partition(": ")[2])), name
        assert "\n" not in message


def test_extras_install_the_modules_they_are_named_for():
    for module, extra in EXTRA_OF.items():
        names = {re.split(r"[\[<>=]", each)[0].replace("-", "_") for each in OPTIONAL[extra]}
        assert module in names or module == "pyarrow"  # which datasets installs


def test_extras_are_installed_from_the_checkout_or_by_name(monkeypatch, tmp_path):
    assert shlex.split(extra_command("video"))[-2:] == ["-e", f"{PACKAGE.parent}[video]"]
    monkeypatch.setattr(
        extras, "__file__", str(tmp_path / "site-packages" / "evogrpo" / "extras.py")
    )
    assert extra_command("llm") == f'{shlex.quote(sys.executable)} -m pip install "evogrpo[llm]"'


def test_arguments_are_quoted():
    assert shlex.split(package_command("gguf>=0.17", "a b"))[-2:] == ["gguf>=0.17", "a b"]
