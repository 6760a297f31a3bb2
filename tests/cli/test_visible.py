"""What strangers wrote - paths, options, what a checkpoint says of itself - is shown on the terminal, never obeyed."""

import io
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evogrpo.cli import main
from evogrpo.storage.checkpoint import checkpoint_path, read_checkpoint, write_checkpoint
from evogrpo.training.display.console import VisibleConsole
from tests.cli.project import ROOT
from tests.tiny_steps import step_run
from tests.tiny_training import finish, tiny_run

HOSTILE = "\x1b[2J\x9b31mboo\u202e\u2066 \x07[bold]x [red]y :warning:"
OBEYED = re.compile(
    "[\x07\x9b\u202e\u2066]|\x1b(?!\\[[0-9;]*[mAK]|\\[\\?25[lh])"
)  # colours, spinner and cursor are our own


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def output_of(kind, monkeypatch):
    """Let stdout and stderr write to one stream of a kind, and yield it."""
    stream = kind()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    with redirect_stdout(stream), redirect_stderr(stream):
        yield stream


streams = pytest.mark.parametrize("kind", [io.StringIO, Terminal])


def check(text):
    assert OBEYED.search(text) is None
    assert "\\x1b[2J\\x9b31mboo\\u202e" in text
    assert "[bold]x" in text
    assert "y :warning:" in text


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of a run of networks and one of a language model, both with a name that a terminal obeys."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in (f"a{HOSTILE}", f"b{HOSTILE}")]
    finish(step_run(folders[0], options={"evolve_network": None}, generations=1))
    finish(tiny_run(folders[1], generations=1))
    return folders


@pytest.mark.parametrize(
    "words",
    [
        ["best", "RUN"],
        ["lineage", "RUN/no"],
        ["compare", "RUN", "OTHER"],
        ["report", "RUN/no"],
        ["resume", "RUN"],
        ["video", "RUN"],
        ["export", "RUN", "--schedule", f"new{HOSTILE}"],
        ["export", "RUN", f"new{HOSTILE}"],
        ["train", HOSTILE],
        ["train", "--env", HOSTILE],
        ["train", "--env", "CartPole-v1", "--run-dir", HOSTILE, "--dry-run", "population.size=2"],
        ["train", "--env", "CartPole-v1", f"seed={HOSTILE}"],
        ["train", "--env", "CartPole-v1", f"{HOSTILE}=1"],
        ["demo", f"task.{HOSTILE}=1"],
    ],
    ids=lambda words: " ".join(words).replace(HOSTILE, "!"),
)
@streams
def test_paths_and_options_are_shown_as_they_are(runs, here, words, kind, monkeypatch):
    with output_of(kind, monkeypatch) as output:
        main([word.replace("RUN", str(runs[0])).replace("OTHER", str(runs[1])) for word in words])
    check(output.getvalue())


@pytest.mark.parametrize(
    "words", [[HOSTILE], ["train", "c.yaml", f"--{HOSTILE.replace(' ', '')}"], ["demo", "--seed", HOSTILE]]
)
def test_what_the_command_line_does_not_have_is_shown_as_it_is(words, monkeypatch):
    with output_of(Terminal, monkeypatch) as output, pytest.raises(SystemExit):
        main(words)
    assert OBEYED.search(output.getvalue()) is None
    assert "boo" in output.getvalue()


def test_a_number_of_thousands_of_digits_is_answered_in_short(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--seed", "9" * 5000])
    said = capsys.readouterr().err
    assert "invalid int value" in said
    assert len(said) < 1500
    assert main(["demo", f"seed={'9' * 5000}"]) == 2
    said = capsys.readouterr().err
    assert "a whole number has at most 300 digits, got 5,000" in said
    assert len(said) < 1500


@streams
def test_what_a_checkpoint_says_it_was_trained_on_is_shown_as_it_is(runs, here, kind, monkeypatch):
    Path("run").mkdir()
    shutil.copytree(runs[1], "run", dirs_exist_ok=True)
    best = Path("run/best")
    tensors, record = read_checkpoint(best, kind="agent")
    record["shared"]["source"] = HOSTILE
    files = {
        path.name: path.read_bytes() for path in checkpoint_path(best).iterdir() if path.name.startswith("adapter")
    }
    write_checkpoint(best, tensors, record, files=files, kind="agent", replace=True)
    with output_of(kind, monkeypatch) as output:
        assert main(["export", "run", "adapter"]) == 0
    check(output.getvalue())


@streams
def test_whatever_is_printed_is_shown_as_text(kind):
    output = kind()
    console = VisibleConsole(file=output, force_terminal=output.isatty(), width=300)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    for each in (HOSTILE, Text(HOSTILE, "red"), table, Text.assemble((HOSTILE, "bold"), HOSTILE)):
        before = len(output.getvalue())
        console.print(each)
        check(output.getvalue()[before:])
    console.print(ProgressBar(total=1.0, completed=0.5, width=10))  # what is no text is drawn
    assert "━━━━" in output.getvalue()


# ---- what lies in the working directory


TRAPS = (
    "reasoning_gym",
    "optuna",
    "pandas",
    "datasets",
    "moviepy",
    "gguf",
    "rich",
    "yaml",
    "matplotlib",
    "tensorflow",
    "my_trap",
)


@pytest.fixture
def trapped(here):
    """Work in a folder full of packages that leave a note when they are imported; return where it would be."""
    for name in TRAPS:
        (here / name).mkdir()
        (here / name / "__init__.py").write_text(f"open({str(here / 'sprung')!r}, 'a').write({name!r})")
        (here / f"{name}-9.dist-info").mkdir()
        (here / f"{name}-9.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    return here / "sprung"


def test_commands_that_look_import_nothing_from_the_working_directory(here, trapped):
    process = subprocess.run(
        [sys.executable, "-m", "evogrpo", "tasks"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not trapped.exists(), process.stderr
    assert process.returncode == 0, process.stderr


def test_only_commands_that_run_code_of_the_users_look_for_it_in_the_working_directory(runs, here, trapped, capsys):
    for words in (["doctor"], ["tasks"], ["best", "RUN"], ["export", "RUN", "--optuna", "sqlite:///x.db"]):
        main([word.replace("RUN", str(runs[0])) for word in words])
        assert str(here) not in sys.path
        assert not trapped.exists()
        capsys.readouterr()
    main(["train", "--env", "my_trap:Nothing-v0", "--dry-run"])
    assert str(here) in sys.path
    sys.path.remove(str(here))
    assert trapped.exists()
