"""Parsing of untrusted YAML and JSON."""

import math
import os

import pytest

from evogrpo.safe_parsing import dump_json, dump_yaml, load_json, load_yaml, read_yaml_file
from evogrpo.training.configuration.dataset_files import read_rows
from evogrpo.training.configuration.reading import parse_override


def doubled(first: str, each: str, levels: int) -> str:
    lines = [f"a0: &a0 {first}"]
    return "\n".join(
        lines + [f"a{n}: &a{n} {each.format(before=f'*a{n - 1}')}" for n in range(1, levels)]
    )


BOMBS = {
    "lists": doubled("[x, x]", "[{before}, {before}, {before}, {before}]", 40),
    "mappings": doubled("{x: 1}", "{{x: {before}, y: {before}}}", 60),
    "keys": doubled("[x, x]", "{{? {before} : {before}}}", 60),
    "merged": doubled("{x: 1}", "{{<<: [{before}, {before}]}}", 60),
    "long texts": f"a: &a {'x' * 1_000_000}\nb: [{'*a, ' * 5000}]",
    "a list in itself": "a: &a [1, *a]",
    "a mapping in itself": "a: &a {b: {c: *a}}",
    "brackets": "a: " + "[" * 20_000,
    "braces": "{a: " * 5000,
    "dashes": "- " * 5000,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_bombs_are_refused_before_they_are_built(bomb):
    with pytest.raises(
        ValueError, match=r"f.yaml, line \d+, column \d+: (more than|nested|the alias)"
    ):
        load_yaml(BOMBS[bomb], "f.yaml")


def test_ordinary_aliases_are_read():
    text = "base: &base {lr: 1e-3, sizes: [1, 2]}\none: *base\nother: *base"
    values = load_yaml(text, "f.yaml")
    assert values["one"] == values["other"] == {"lr": 1e-3, "sizes": [1, 2]}


@pytest.mark.parametrize(
    "text", ["1e5", "7e12345", "1.e+3", "1:30", "yes", "~", "\x85", "a\u2028b", "\ufeffa", "é"]
)
def test_written_text_is_read_back_as_text(text):
    assert load_yaml(dump_yaml({"a": [text, 1e5]}), "f.yaml") == {"a": [text, 1e5]}


def test_merge_keys_are_refused():
    with pytest.raises(
        ValueError, match=r"f.yaml, line 3, column 3: merge keys \(<<\) are not supported"
    ):
        load_yaml("base: &base {lr: 1}\none:\n  <<: *base", "f.yaml")


NUMBERS = {
    "decimal": "9" * 5000,
    "negative": "-" + "9" * 5000,
    "hex": "0x" + "f" * 5000,
    "base 60": "1" + ":59" * 3000,
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_too_many_digits_are_refused(number):
    words = r"a whole number has at most 300 digits, got [59],00\d"
    with pytest.raises(ValueError, match=words):
        load_yaml(f"a: {number}", "f.yaml")
    with pytest.raises(ValueError, match=words):
        parse_override(f"seed={number}")
    if number.lstrip("-").isdigit():
        with pytest.raises(ValueError, match=words):
            load_json(f'{{"a": {number}}}')
        with pytest.raises(ValueError, match="at most 300 digits"):
            dump_json({"a": [10**5000]})
    assert math.isfinite(float(load_json("9" * 300)))
    assert load_json(dump_json(10**300 - 1)) == 10**300 - 1


@pytest.mark.parametrize(
    "value", ["2001-99-99", "!!timestamp x", "!!bool x", "!!int ''", "!!float ''", "!!set [1]"]
)
def test_values_that_do_not_match_their_tag_are_refused(value):
    with pytest.raises(ValueError, match=r"f.yaml: a value cannot be read as its YAML type"):
        load_yaml(f"a: {value}", "f.yaml")


@pytest.mark.parametrize(
    ("name", "lines"), [("a.jsonl", '{{"question": {0}}}\n'), ("a.json", '[{{"question": {0}}}]')]
)
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000])
def test_unreadable_datasets_are_named(tmp_path, name, lines, value):
    (tmp_path / name).write_text(lines.format(value))
    with pytest.raises(ValueError, match=rf"{name} is not valid JSON: .*(digits|recursion)"):
        read_rows(tmp_path / name)


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="pipe"):
        read_yaml_file(tmp_path / "config.yaml")
