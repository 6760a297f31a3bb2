"""Records from plain values, and one sentence for each error."""

from dataclasses import dataclass

import pytest
from pydantic import Field

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.validation import MAX_ERRORS, Record, dump, validate


class Child(Record, extra="forbid"):
    lr: float
    name: str = "child"


class Parent(Record, extra="forbid"):
    size: int = Field(default=1, ge=1)
    flag: bool = False
    children: tuple[Child, ...] = ()
    by_name: dict[str, Child] = Field(default_factory=dict)
    source: str | tuple[int, ...] | None = None


class Later(Record):
    size: int


@dataclass(frozen=True)
class Line:
    size: int
    child: Child | None = None
    others: tuple[float, ...] = ()


def errors_of(model, data):
    with pytest.raises(ValueError, match=r"^f\.json: ") as caught:
        validate(model, data, "f.json")
    assert type(caught.value) is ValueError
    return str(caught.value).splitlines()


def test_records_are_frozen_and_hold_tuples():
    record = validate(
        Parent, {"children": [{"lr": 1}], "by_name": {"a": {"lr": 0.5}}, "source": [1, 2]}
    )
    assert record == Parent(children=(Child(lr=1.0),), by_name={"a": Child(lr=0.5)}, source=(1, 2))
    with pytest.raises(ValueError, match="frozen"):
        record.size = 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"size": 0}, ["size must", "got 0"]),
        ({"size": "1"}, ["size must be an integer", "got '1'"]),
        ({"flag": 1}, ["flag must be true or false"]),
        ({"children": [{"lr": 1}, {"lr": float("nan")}]}, ["children[1].lr must be finite"]),
        ({"children": [{}]}, ["children[0].lr must be given"]),
        ({"children": {}}, ["children must be a list"]),
        ({"by_name": {"a": 3}}, ["by_name.a must be a mapping"]),
        (
            {"by_name": {"a": {"lr": 1, "nam": "x"}}},
            ["key in by_name.a 'nam'", "did you mean 'name'"],
        ),
        (
            {"children": [{"lr": 1, "nam": "x"}]},
            ["key in children[0] 'nam'", "did you mean 'name'"],
        ),
        ({"siz": 3}, ["unknown key 'siz'", "did you mean 'size'"]),
        ({"source": 3}, ["source must be text or a list, got 3"]),
        ({"source": {"a": 1}}, ["source must be text or a list, got {'a': 1}"]),
        ({"source": [1, "x"]}, ["source[1] must be an integer, got 'x'"]),
        ([], ["must be a mapping"]),
        ({"flag": "\x1b[31m" + "x" * 1000}, ["\\x1b[31mxxx", "more characters"]),
    ],
)
def test_an_error_has_one_line_with_key_value_and_rule(data, words):
    (line,) = errors_of(Parent, data)
    assert all(word in line for word in words), line
    assert len(line) < 250


def test_all_errors_come_at_once_up_to_ten():
    assert len(errors_of(Parent, {"size": 0, "flag": 1, "extra": 2, "other": 3})) == 4
    lines = errors_of(Parent, {"children": [{}] * 30})
    assert len(lines) == MAX_ERRORS + 1
    assert lines[-1] == "f.json: and 20 more errors"


def test_forward_records_ignore_unknown_keys():
    assert validate(Later, {"size": 3, "added_later": [1]}) == Later(size=3)
    assert errors_of(Later, {"added_later": 1}) == ["f.json: size must be given"]


def test_readers_may_ignore_unknown_keys():
    values = {"size": 3, "added_later": [1], "child": {"lr": 1, "added_later": 2}}
    assert validate(Line, values, extra="ignore") == Line(size=3, child=Child(lr=1.0))
    with pytest.raises(ValueError, match="added_later"):
        validate(Line, values, extra="forbid")


def test_what_is_dumped_is_read_again():
    line = Line(size=3, child=Child(lr=0.5), others=(1.0, 2.0))
    assert validate(Line, load_json(dump_json(dump(line)))) == line
