"""Escaping of untrusted text and formatting of numbers."""

import json
import sys
import unicodedata

import pytest

from evogrpo.text import (
    changes_text,
    count_text,
    distinct_number_texts,
    duration_text,
    number_text,
    printable,
    score_text,
    user_line,
    value_text,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字 and 🙂\n\ttoo", "plain, ünïcode, 漢字 and 🙂\n\ttoo"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\0\r\x7f\x9b", "\\x00\\r\\x7f\\x9b"),
        ("\u202egnp", "\\u202egnp"),  # reads right to left
        ("\u200b\ufeff\u2028", "\\u200b\\ufeff\\u2028"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown


def test_all_control_characters_of_unicode_are_escaped():
    characters = "".join(map(chr, range(sys.maxunicode + 1)))
    left = {
        unicodedata.category(character)
        for character in printable(characters).replace("\n", "").replace("\t", "")
    }
    assert not left & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_numbers_scores_and_durations_are_short():
    numbers = {
        None: "–",
        8: "8",
        0.2: "0.2",
        1.23456e-5: "1.23e-05",
        0.0001: "0.0001",
        0.9995: "0.9995",
    }
    assert {value: number_text(value) for value in numbers} == numbers
    assert distinct_number_texts([4, 0.12345]) == ["4", "0.123"]
    assert distinct_number_texts([0.12345, 0.12346]) == ["0.12345", "0.12346"]
    assert [count_text(value) for value in (None, 0, 1234567)] == ["–", "0", "1,234,567"]
    assert score_text(0.41249, 0.031) == "0.412 ± 0.031"
    assert score_text(0.4, None) == "0.400"
    assert (score_text(0.0, 0.0), score_text(-0.0004, 0.03)) == ("0.000 ± 0.000", "-0.000 ± 0.030")
    assert (score_text(2.34e-5, 1e-6), score_text(-1.5e30, None)) == (
        "2.34e-05 ± 1e-06",
        "-1.5e+30",
    )
    assert score_text(None, 0.1) == "–"
    seconds = {
        None: "–",
        0.4: "0 s",
        59.6: "1 min 00 s",
        61: "1 min 01 s",
        3600: "1 h 00 min",
        7384: "2 h 03 min",
    }
    assert {value: duration_text(value) for value in seconds} == seconds


def test_changes_show_old_and_new_values():
    changes = {
        "lr": (1e-4, 2e-4),
        "loss_type": ("grpo", "dapo"),
        "clip_low": (None, 0.2),
        "network": ("64", "\x1b[0m"),
    }
    expected = r"lr 0.0001 → 0.0002, loss_type grpo → dapo, clip_low – → 0.2, network 64 → \x1b[0m"
    assert changes_text(changes) == expected
    assert changes_text({}) == ""


def test_values_of_a_configuration_have_no_braces():
    texts = {
        '{"reward": 1.0, "speed": {"min": 0, "max": 2}}': "reward 1, speed 0 to 2",
        '{"a": tru': '{"a": tru',
        "[" * 3000: "[" * 3000,
        "{}": "none",
        "False": "no",
    }
    assert {value: value_text(value) for value in texts} == texts
    assert value_text({"min": 1e-4, "max": 0.01, "scale": "log"}) == "0.0001 to 0.01 (log)"
    assert value_text({"choices": ["Think.", "Answer, now."]}) == 'choices Think., "Answer, now."'


def test_the_line_of_an_error_is_in_user_code():
    def fails():
        json.loads("no JSON")  # raised inside a library

    with pytest.raises(ValueError, match="Expecting value") as caught:
        fails()
    assert user_line(caught.value) == f" ({__file__}, line {fails.__code__.co_firstlineno + 1})"
