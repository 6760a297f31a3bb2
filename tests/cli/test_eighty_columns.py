"""What is said fits into 80 columns, with and without colour, and nothing of it is cut off; a pipe gets whole lines."""

import io
import re
import sys

import pytest
from rich.console import Console
from rich.text import Text

from evogrpo.cli import main
from evogrpo.training.display.console import Hung
from tests.tiny_steps import step_run
from tests.tiny_training import finish

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    finish(step_run(folder, generations=4))
    return folder


def said(monkeypatch, arguments, *, colour: bool, terminal: bool = True, to: str = "stdout") -> str:
    streams = {name: Terminal() if terminal else io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    main(arguments)
    return streams[to].getvalue()


def words(text: str) -> list[str]:
    return CONTROL.sub("", text).replace("│", " ").split()


@pytest.mark.parametrize("command", [["lineage"], ["lineage", "--all"], ["best"]])
def test_records_fit_and_lose_nothing(monkeypatch, run_dir, command):
    monkeypatch.chdir(run_dir.parent)
    arguments = [*command, "run"]
    coloured = said(monkeypatch, arguments, colour=True)
    plain = said(monkeypatch, arguments, colour=False)
    piped = said(monkeypatch, arguments, colour=True, terminal=False)
    for text in (coloured, plain):
        lines = CONTROL.sub("", text).splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert words(text) == words(piped)
        assert "…" not in text
    assert "\x1b[3" in coloured or "\x1b[2m" in coloured
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7])m", plain)  # bold and dim may stay
    assert "\x1b" not in piped


def test_the_tasks_fit_and_further_lines_of_an_entry_are_indented(monkeypatch):
    lines = CONTROL.sub("", said(monkeypatch, ["tasks"], colour=True)).splitlines()
    told = [line for line in lines if "pip install" not in line and "reasoning-gym" not in line]
    assert max(map(len, told)) <= 80, max(told, key=len)
    heads = ("Built in", "Gymnasium", "PettingZoo", "Your own")
    assert [line for line in told if line.strip() and not line.startswith((*heads, "  "))] == []
    assert any(line.startswith("    ") for line in told)


@pytest.mark.parametrize("indent", [2, 12])
@pytest.mark.parametrize("width", [14, 33])
def test_a_hung_text_loses_nothing_and_stands_clear_of_what_follows(width, indent):
    stream = io.StringIO()
    told = "selection: #1 is retired, since nobody was ever further behind than this member"
    Console(file=stream, width=width).print(Hung(Text(told), indent))
    first, *rest = stream.getvalue().splitlines()
    assert " ".join(stream.getvalue().split()).replace(" ", "") == told.replace(" ", "")
    assert not first.startswith(" ")
    assert rest
    assert all(line.startswith(" " * indent) and len(line) <= width for line in rest)


@pytest.mark.parametrize(
    "arguments",
    [
        ["resume", "a-folder-with-a-name-that-is-long-enough-to-need-more-than-one-line-of-eighty-columns-alone"],
        ["train", "--env", "CartPole-v1", "hyperparameters.lerning_rate=3"],
        ["train", "--env", "CartPole-v1", "population.size=0"],
        ["train", "nowhere.yaml"],
    ],
)
def test_errors_are_wrapped_on_a_terminal_and_one_line_in_a_pipe(monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    shown = said(monkeypatch, arguments, colour=True, to="stderr")
    piped = said(monkeypatch, arguments, colour=True, terminal=False, to="stderr")
    assert CONTROL.sub("", shown).startswith("error: ")
    assert words(shown) == words(piped) or "-" in arguments[1]  # a name without spaces is broken within
    assert max(map(len, CONTROL.sub("", shown).splitlines())) <= 80
    assert piped.count("\n") == 1
