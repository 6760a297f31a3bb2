"""Help, reports and configuration errors need no torch; the first line appears before it."""

import json
import os
import subprocess
import sys

from tests.cli.project import CONFIG, ROOT

HEAVY = {"torch", "transformers", "peft", "gymnasium", "matplotlib"}
# One process for all of them: none may import torch.
SCRIPT = """
import contextlib, io, json, sys
from evogrpo.cli import main

found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    found.append([code, list(sys.modules)])
print(json.dumps(found))
"""


def run(folder, script, *arguments):
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout


def test_help_reports_and_configuration_errors_do_not_import_torch(tmp_path):
    (tmp_path / "good.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "torn.yaml").write_text("task: {name: two_digit_sums\n")
    (tmp_path / "list.yaml").write_text("- task\n")
    helps = [["--help"], ["train", "--help"], ["--version"]]
    wrong = [
        ["report", "."],
        ["train"],
        *(["train", f"{name}.yaml"] for name in ("missing", "torn", "list")),
    ]
    settings = [
        "scedule.generations=2",
        "target_fitness=1",
        "schedule.generations=two",
        "hyperparameters.lr=-1",
    ]
    settings += [
        "hyperparameters.learning_rate=1",
        "search_space.lr={min: 1, max: 0.1}",
        "population.size=0",
    ]
    settings += ["logging.keep_checkpoints=0", "strategy.name=turnament", "model=[1]", "task=null"]
    wrong += [["train", "good.yaml", setting] for setting in settings]
    for arguments, (code, modules) in zip(
        [*helps, *wrong],
        json.loads(run(tmp_path, SCRIPT, json.dumps([*helps, *wrong]))),
        strict=True,
    ):
        assert code == (0 if arguments in helps else 2), arguments
        assert not HEAVY & set(modules), arguments
        assert arguments not in helps or not {"numpy", "yaml", "rich"} & set(modules), arguments


def test_the_first_line_is_printed_before_torch_is_imported(tmp_path):
    """For a terminal and for a log."""
    script = """
import io, os, sys
from evogrpo.cli import main

class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal
    def isatty(self):
        return self.terminal
    def write(self, text):
        if text.strip():
            os.write(1, str("torch" in sys.modules).encode())
            os._exit(0)
        return super().write(text)

sys.stdout = Stream(sys.argv[1] == "terminal")
main(["train", "--env", "NoSuch-v1", "--dry-run"])
"""
    assert [run(tmp_path, script, kind) for kind in ("terminal", "log")] == ["False", "False"]
