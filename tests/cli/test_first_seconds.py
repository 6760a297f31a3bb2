"""Errors that need no torch are reported before torch is imported, and the first line is shown at once."""

import json
import os
import subprocess
import sys

from tests.cli.project import CONFIG, ROOT

# One process for all of them: none may import torch.
SCRIPT = """
import contextlib, io, json, sys
from evogrpo.cli import main

said = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    heavy = [name for name in ("torch", "transformers", "peft", "gymnasium", "matplotlib") if name in sys.modules]
    said.append([code, errors.getvalue(), heavy])
print(json.dumps(said))
"""


def test_configuration_errors_do_not_import_torch(tmp_path):
    (tmp_path / "good.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "torn.yaml").write_text("task: {name: two_digit_sums\n")
    (tmp_path / "list.yaml").write_text("- task\n")
    mistakes = {
        "missing.yaml": "missing.yaml",
        "torn.yaml": "torn.yaml",
        "list.yaml": "list.yaml",
        "no override": "KEY=VALUE",
        "scedule.generations=2": "did you mean 'schedule'",
        "schedule.generation=2": "did you mean 'generations'",
        "target_fitness=1": "'schedule.target_fitness'",
        "population_size=2": "'population.size'",
        "schedule.generations=two": "schedule.generations must be",
        "schedule.samples_per_step=0": "samples_per_step",
        "hyperparameters.learning_rate=1e-4": "unknown key in hyperparameters",
        "hyperparameters.lr=-1": "lr must be",
        "search_space.lr={min: 1, max: 0.1}": "search_space.lr",
        "search_space.gropu_size={choices: [2]}": "did you mean 'group_size'",
        "population.size=0": "population",
        "logging.keep_checkpoints=0": "keep_checkpoints must be at least 1",
        "strategy.name=turnament": "did you mean 'tournament'",
        "model=[1]": "model must be",
        "task=null": "task must be given",
    }
    commands = [
        ["train", mistake]
        if mistake.endswith("yaml")
        else ["train", *([] if mistake == "no override" else ["good.yaml", mistake])]
        for mistake in mistakes
    ]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    for (mistake, words), (code, errors, heavy) in zip(mistakes.items(), json.loads(process.stdout), strict=True):
        assert code == 2, (mistake, errors)
        assert words in errors, (mistake, errors)
        assert heavy == [], mistake


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
    for kind in ("terminal", "log"):
        process = subprocess.run(
            [sys.executable, "-c", script, kind],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout == "False", (kind, process.stderr)
