"""Printed text of user functions: control characters are escaped."""

import contextlib
import io
import sys

import pytest

from evogrpo import HuggingFaceGym
from evogrpo.envs.worker_process import MAX_LINE_LENGTH, forward_output
from evogrpo.records import single_turn_conversations
from evogrpo.text import EscapingStream, escaped_prints

QA = [{"question": f"{n}?", "answer": str(n)} for n in range(12)]
STEERING = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\x00\u202eabc\ud800"
ESCAPED = "\\x1b[2J\\x1b]0;title\\x07\\x9b31m\n\\x08\\x00\\u202eabc\\ud800"
ONE = single_turn_conversations([0], [[3]])


def escaped(text):
    stream = io.StringIO()
    EscapingStream(stream).write(text)
    return stream.getvalue()


def test_lines_tabs_and_letters_are_unchanged():
    assert escaped("a\tb\nc\r\nd\re \N{SNOWMAN} é 漢") == "a\tb\nc\nd\ne \N{SNOWMAN} é 漢"


def printing(completion, answer, question):
    print("out", STEERING)
    print("err", STEERING, file=sys.stderr)
    sys.stdout.flush()
    return 1.0


async def printing_later(completion, answer, question):
    return printing(completion, answer, question)


@pytest.mark.parametrize("function", [printing, printing_later])
def test_prints_are_escaped_and_streams_restored(tokenizer, function, capsys):
    before = sys.stdout, sys.stderr
    HuggingFaceGym(QA, None, tokenizer, reward_fn=function).make_batch("train", [0]).score(ONE)
    assert (sys.stdout, sys.stderr) == before
    captured = capsys.readouterr()
    assert captured.out == f"out {ESCAPED}\n"
    assert captured.err == f"err {ESCAPED}\n"


@pytest.mark.parametrize("ending", ["", "\n"])
def test_output_of_other_processes_is_escaped(capsys, tmp_path, ending):
    text = f"héllo {STEERING[:-1]}\nsecond {'x' * (2 * MAX_LINE_LENGTH)}{ending}"
    (tmp_path / "printed").write_bytes(text.encode())
    forward_output((tmp_path / "printed").open("rb", buffering=0))
    assert capsys.readouterr().err == escaped(text)


def test_characters_outside_the_encoding_are_escaped():
    raw = io.BytesIO()
    target = io.TextIOWrapper(raw, encoding="ascii")
    with contextlib.redirect_stdout(target), escaped_prints():
        print("é")
    target.flush()
    assert raw.getvalue() == b"\\xe9\n"
