"""Untrusted text in paths, options and checkpoints is escaped in the terminal."""

import io
import os
import re
import shlex
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
from evogrpo.training.console import VisibleConsole, command
from tests.cli.project import ROOT, Terminal

HOSTILE = "\x1b[2J\x9b31mboo\u202e\u2066 \x07[bold]x [red]y :warning:"
# Colours, spinner and cursor are allowed.
OBEYED = re.compile("[\x07\x9b\u202e\u2066]|\x1b(?!\\[[0-9;]*[mAK]|\\[\\?25[lh])")


@contextmanager
def output_of(kind, monkeypatch):
    """Redirect stdout and stderr to one stream."""
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
def runs(stored_network_run, stored_language_run, tmp_path_factory):
    """Return a run of networks and one of a language model; names have control characters."""
    runs = {f"a{HOSTILE}": stored_network_run, f"b{HOSTILE}": stored_language_run}
    return [
        shutil.copytree(run.folder, tmp_path_factory.mktemp("runs") / name)
        for name, run in runs.items()
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["best", "RUN"],
        ["lineage", "RUN/no"],
        ["compare", "RUN", "OTHER"],
        ["resume", "RUN"],
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
def test_paths_and_options_are_escaped(runs, workdir, words, kind, monkeypatch):
    with output_of(kind, monkeypatch) as output:
        main([word.replace("RUN", str(runs[0])).replace("OTHER", str(runs[1])) for word in words])
    check(output.getvalue())


@pytest.mark.parametrize(
    "words",
    [[HOSTILE], ["train", "c.yaml", f"--{HOSTILE.replace(' ', '')}"], ["demo", "--seed", HOSTILE]],
)
def test_unknown_arguments_are_escaped(words, monkeypatch):
    with output_of(Terminal, monkeypatch) as output, pytest.raises(SystemExit):
        main(words)
    assert OBEYED.search(output.getvalue()) is None
    assert "boo" in output.getvalue()


@streams
def test_texts_of_a_checkpoint_are_escaped(runs, workdir, kind, monkeypatch):
    Path("run").mkdir()
    shutil.copytree(runs[1], "run", dirs_exist_ok=True)
    best = Path("run/best")
    tensors, record = read_checkpoint(best, kind="agent")
    record["shared"]["source"] = HOSTILE
    files = {
        path.name: path.read_bytes()
        for path in checkpoint_path(best).iterdir()
        if path.name.startswith("adapter")
    }
    write_checkpoint(best, tensors, record, files=files, kind="agent", replace=True)
    with output_of(kind, monkeypatch) as output:
        assert main(["export", "run", "adapter"]) == 0
    check(output.getvalue())


@streams
def test_the_console_escapes_all_text(kind):
    output = kind()
    console = VisibleConsole(file=output, force_terminal=output.isatty(), width=300)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    for each in (HOSTILE, Text(HOSTILE, "red"), table, Text.assemble((HOSTILE, "bold"), HOSTILE)):
        before = len(output.getvalue())
        console.print(each)
        check(output.getvalue()[before:])
    console.print(ProgressBar(total=1.0, completed=0.5, width=10))  # anything but text is rendered
    assert "━━━━" in output.getvalue()


TRAPS = (
    "reasoning_gym",
    "optuna",
    "pandas",
    "datasets",
    "moviepy",
    "gguf",
    "rich",
    "yaml",
    "tensorflow",
    "my_trap",
)


@pytest.fixture
def trapped(workdir):
    """Work in a folder with packages that write a file when they are imported; return the file."""
    for name in TRAPS:
        (workdir / name).mkdir()
        (workdir / name / "__init__.py").write_text(
            f"open({str(workdir / 'sprung')!r}, 'a').write({name!r})"
        )
        (workdir / f"{name}-9.dist-info").mkdir()
        (workdir / f"{name}-9.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n"
        )
    return workdir / "sprung"


@pytest.mark.slow
def test_tasks_imports_nothing_from_the_working_directory(workdir, trapped):
    process = subprocess.run(
        [sys.executable, "-m", "evogrpo", "tasks"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=workdir,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not trapped.exists(), process.stderr
    assert process.returncode == 0, process.stderr


def test_only_commands_that_run_user_code_import_from_the_working_directory(
    runs, workdir, trapped, capsys
):
    for words in (["doctor"], ["tasks"], ["best", "RUN"], ["export", "RUN"]):
        main([word.replace("RUN", str(runs[0])) for word in words])
        assert str(workdir) not in sys.path
        assert not trapped.exists()
        capsys.readouterr()
    main(["train", "--env", "my_trap:Nothing-v0", "--dry-run"])
    assert str(workdir) in sys.path
    sys.path.remove(str(workdir))
    assert trapped.exists()


def test_a_printed_command_quotes_the_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/a folder/python")
    monkeypatch.setenv("PATH", "")  # without `evogrpo`
    assert shlex.split(command("resume", "a run")) == [
        "/a folder/python",
        "-m",
        "evogrpo",
        "resume",
        "a run",
    ]
