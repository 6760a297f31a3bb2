"""Strict parsing of YAML and JSON."""

import math

import pytest

from evogrpo.safe_parsing import dump_json, load_json, load_yaml
from evogrpo.training.configuration.question_tasks import read_rows
from evogrpo.training.configuration.reading import parse_override


def test_ordinary_aliases_are_read():
    text = "base: &base {lr: 1e-3, sizes: [1, 2]}\none: *base\nother: *base"
    values = load_yaml(text, "f.yaml")
    assert values["one"] == values["other"] == {"lr": 1e-3, "sizes": [1, 2]}


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000])
def test_numbers_of_too_many_digits_are_refused(number):
    for read in (lambda: load_yaml(f"a: {number}", "f.yaml"), lambda: parse_override(f"seed={number}")):
        with pytest.raises(ValueError, match="digits"):
            read()
    with pytest.raises(ValueError, match=r"a whole number has at most 300 digits, got 5,00\d"):
        load_json(f'{{"a": {number}}}')
    with pytest.raises(ValueError, match="at most 300 digits"):
        dump_json({"a": [10**5000]})
    assert math.isfinite(float(load_json("9" * 300)))
    assert load_json(dump_json(10**300 - 1)) == 10**300 - 1


@pytest.mark.parametrize("value", ["2001-99-99", "!!timestamp x", "!!bool x", "!!int ''", "!!float ''", "!!set [1]"])
def test_values_that_do_not_match_their_tag_are_refused(value):
    with pytest.raises(ValueError, match=r"f.yaml: a value cannot be read as its YAML type"):
        load_yaml(f"a: {value}", "f.yaml")


@pytest.mark.parametrize(("name", "lines"), [("a.jsonl", '{{"question": {0}}}\n'), ("a.json", '[{{"question": {0}}}]')])
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000])
def test_unreadable_datasets_are_named(tmp_path, name, lines, value):
    (tmp_path / name).write_text(lines.format(value))
    with pytest.raises(ValueError, match=rf"{name} is not valid JSON: .*(digits|recursion)"):
        read_rows(tmp_path / name)
