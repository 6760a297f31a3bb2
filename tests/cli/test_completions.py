"""The completions table in the terminal."""

import io
import re

import pytest
from rich.cells import cell_len

from evogrpo.reporting.records import Example
from evogrpo.training.console import make_console
from evogrpo.training.display import completions_table, one_line


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def example(index=0, prompt="3+4=", completion="7", reward=1.0, **fields):
    return Example(prompt=prompt, completion=completion, reward=reward, index=index, **fields)


def drawn(examples, best=0, width=120):
    stream = io.StringIO()
    console = make_console(stream)
    table = completions_table(examples, best, width)
    console.print(table, width=width)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_completions_of_the_best_member_are_shown_with_one_question():
    examples = [
        example(0, completion="a", reward=0.0, advantage=0.0, step=5),
        example(2, completion="c", reward=1.0, advantage=0.5, step=5),
        example(2, completion="d", reward=0.0, advantage=-1.25, step=5),
    ]
    head, *rows = drawn(examples, best=2)
    assert head.split() == ["step", "6", "question", "completion", "reward", "advantage"]
    assert [row.split() for row in rows] == [
        ["#2", "3+4=", "c", "1", "+0.5"],
        ["#2", "d", "0", "-1.25"],
    ]
    assert drawn(examples, best=7)[1].split() == ["#0", "3+4=", "a", "0", "0"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_long_texts_are_cut_in_the_middle(width):
    question = "Say " + "please " * 60 + "now?"
    answer = "First " + "blah " * 100 + "so 42"
    lines = drawn(
        [example(0, question, answer, advantage=1.0), example(0, question, "no")], width=width
    )
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    assert re.search(r"Say .*….*now\?", lines[1])
    assert re.search(r"First .*….*so 42", lines[1])
    short = drawn([example(0, "3+4=", answer)], width=width)
    assert "3+4=" in short[1]


def test_columns_of_reward_functions_are_left_out_in_a_narrow_terminal():
    rewards = dict.fromkeys(("digits", "brief", "polite"), 0.25)
    numbers = [*rewards, "reward", "advantage"]
    shown = {120: numbers, 66: ["digits", "reward", "advantage"], 46: ["reward"]}
    for width, expected in shown.items():
        head = drawn([example(rewards=rewards, advantage=0.75)], width=width)[0]
        assert head.split() == ["step", "1", "question", "completion", *expected]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_east_asian_texts_leave_room_for_the_numbers(width):
    texts = "请把下面的句子翻译成英文。" * 9, "a好" * 60 + "完"
    head, row = drawn([example(0, *texts, advantage=-1.25)], width=width)
    assert max(cell_len(head), cell_len(row)) <= width
    assert re.search(r"请.*….*。 .*a好.*….*完 +1 +-1\.25$", row)


def test_a_reward_function_may_be_called_reward_or_advantage():
    head, row = drawn([example(rewards={"reward": 0.25, "advantage": 0.5}, advantage=0.75)])
    assert head.split()[-4:] == ["reward", "advantage", "reward", "advantage"]
    assert row.split()[-4:] == ["0.25", "0.5", "1", "+0.75"]


def test_untrusted_text_is_escaped():
    text = "[bold]x[/bold]\x1b[31m\u202e\n\n\ty\r"
    assert one_line(text) == r"[bold]x[/bold]\x1b[31m\u202e ⏎ y\r"
    lines = drawn(
        [example(prompt=text, completion=text, rewards={"\x1b[2J": 1.0, "g": 0.0})], width=200
    )
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert lines[1].count("[bold]x[/bold]") == 2
