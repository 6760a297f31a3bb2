"""Output fits into 80 columns with and without colour; pipes get unwrapped lines."""

import io
import re
import sys

import pytest

from evogrpo.cli import main
from tests.cli.project import CONTROL, Terminal
from tests.reporting.journals import generation, member, outcome, written


@pytest.fixture
def run_dir(stored_network_run):
    return stored_network_run.folder


def output_of(
    monkeypatch, arguments, *, colour: bool, terminal: bool = True, to: str = "stdout", width=80
) -> str:
    streams = {name: Terminal() if terminal else io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setenv("COLUMNS", f"{width if terminal else 200}")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    main(arguments)
    return streams[to].getvalue()


def words(text: str) -> list[str]:
    return CONTROL.sub("", text).replace("│", " ").split()


@pytest.mark.parametrize("command", [["lineage"], ["best"]])
def test_records_fit_and_keep_all_words(monkeypatch, run_dir, command):
    monkeypatch.chdir(run_dir.parent)
    arguments = [*command, "run"]
    coloured = output_of(monkeypatch, arguments, colour=True)
    plain = output_of(monkeypatch, arguments, colour=False)
    piped = output_of(monkeypatch, arguments, colour=True, terminal=False)
    for text in (coloured, plain):
        lines = CONTROL.sub("", text).splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert words(text) == words(piped)
        assert "…" not in text
    assert "\x1b[3" in coloured or "\x1b[2m" in coloured
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7])m", plain)  # bold and dim are allowed
    assert "\x1b" not in piped


@pytest.mark.parametrize("width", [48, 80])
def test_compare_breaks_no_word(monkeypatch, tmp_path, width):
    """In 48 columns, the runs are below each other."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one", "a-run-of-another-seed")):
        schedule = {"steps_per_generation": number, "evaluations_count": number}
        begin = {"event": "run", "evolvable": {}, "seed": number, "schedule": schedule}
        written(tmp_path / name, begin, generation(1, member(0, 0)), outcome(0))
    arguments = ["compare", "one", "a-run-of-another-seed"]
    whole = output_of(monkeypatch, arguments, colour=False, terminal=False)
    narrow = output_of(monkeypatch, arguments, colour=False, width=width)
    assert max(map(len, CONTROL.sub("", narrow).splitlines())) <= width
    assert set(words(narrow)) == set(words(whole))


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "resume",
            "a-folder-with-a-name-that-is-long-enough-to-need-more-than-one-line-of-eighty-columns-alone",
        ],
        ["train", "--env", "CartPole-v1", "hyperparameters.lerning_rate=3"],
        ["train", "--env", "CartPole-v1", "population.size=0"],
        ["train", "nowhere.yaml"],
    ],
)
def test_errors_are_wrapped_on_a_terminal_and_one_line_in_a_pipe(monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    wrapped = output_of(monkeypatch, arguments, colour=True, to="stderr")
    piped = output_of(monkeypatch, arguments, colour=True, terminal=False, to="stderr")
    assert CONTROL.sub("", wrapped).startswith("error: ")
    # A name without spaces is broken inside.
    assert words(wrapped) == words(piped) or "-" in arguments[1]
    assert max(map(len, CONTROL.sub("", wrapped).splitlines())) <= 80
    assert piped.count("\n") == 1
