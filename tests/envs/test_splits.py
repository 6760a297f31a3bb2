"""Disjoint, deduplicated splits."""

import warnings
from array import array
from dataclasses import replace
from itertools import chain

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evogrpo.envs.protocol import SPLITS
from evogrpo.envs.text.datasets import (
    HELD_OUT_FRACTION,
    Filtered,
    PromptSplit,
    RowHashes,
    check_table,
    make_splits,
)

NONE = {"validation": None, "test": None}


def rows(*questions):
    return [{"question": str(question)} for question in questions]


def read(table):
    return PromptSplit(
        table=table,
        rows=range(len(table)),
        prompts=[array("i", map(ord, row["question"])) for row in table],
        hashes=[RowHashes.of(row["question"], row) for row in table],
    )


def split(tables, max_prompt_length=None, sizes=NONE, seed=0):
    """Return the questions of each split, and the counts of rows that are left out."""
    read_tables = {name: read(table) for name, table in tables.items()}
    parts, filtered = make_splits(
        read_tables, max_prompt_length=max_prompt_length, sizes=sizes, seed=seed
    )
    for part in parts.values():
        assert ["".join(map(chr, ids)) for ids in part.prompts] == questions(part)
    return {name: questions(part) for name, part in parts.items()}, filtered


def questions(part):
    return [part.table[row]["question"] for row in part.rows]


@settings(max_examples=40)
@given(
    *[st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=12)] * 2,
    st.sampled_from([(), ("test",), ("validation",), ("test", "validation")]),
)
def test_splits_are_disjoint_and_every_row_is_counted(train, held_out, given_splits):
    tables = {"train": rows(*train, *(f"long{n}" for n in range(9)))}
    tables |= {name: rows(*held_out, f"own {name}") for name in given_splits}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts, filtered = split(tables, max_prompt_length=20)
    used = list(chain.from_iterable(parts.values()))
    assert len(used) == len(set(used))
    assert all(parts.values())
    left_out = sum(c.too_long + c.duplicates + c.held_out for c in filtered.values())
    assert len(used) + left_out == sum(len(table) for table in tables.values())


def test_left_out_rows_are_counted_by_reason():
    tables = {
        "train": rows("a", "a", "v", "t", "too long", "b"),
        "validation": rows("v", "t", "v"),
        "test": rows("t", "too long"),
    }
    with pytest.warns(UserWarning, match=r"train: 1 too long, 1 duplicates, 2 held out") as caught:
        parts, filtered = split(tables, max_prompt_length=3)
    assert len(caught) == 1
    assert parts == {"train": ["a", "b"], "validation": ["v"], "test": ["t"]}
    assert filtered == {
        "train": Filtered(too_long=1, duplicates=1, held_out=2),
        "validation": Filtered(duplicates=1, held_out=1),
        "test": Filtered(too_long=1),
    }


def test_a_question_with_two_answers_is_kept_in_one_split():
    answers = [{"question": str(number % 20), "answer": str(number)} for number in range(40)]
    with pytest.warns(UserWarning, match="1 duplicates"):
        parts, filtered = split(
            {"train": [*answers, answers[0]]}, sizes={"validation": 3, "test": 3}
        )
    assert sum(map(len, parts.values())) + filtered["train"].held_out == len(answers)
    for name, part in parts.items():
        others = set()
        for other in parts:
            if other != name:
                others.update(parts[other])
        assert not others & set(part)
    assert max(parts["train"].count(question) for question in parts["train"]) == 2
    with pytest.raises(ValueError, match="1 question"):
        split({"train": [{"question": "a", "answer": str(number)} for number in range(9)]})


def test_the_draw_depends_only_on_questions_and_seed():
    tables = {"train": rows(*range(50))}
    drawn = [
        split(tables, seed=seed, sizes={"validation": 5, "test": 7})[0]["test"]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 7
    table = read(tables["train"])
    # Another template makes longer prompts.
    longer = replace(table, prompts=[array("i", [7, *ids]) for ids in table.prompts])
    parts, _ = make_splits({"train": longer}, max_prompt_length=None, sizes=NONE, seed=0)
    assert {name: questions(part) for name, part in parts.items()} == split(tables)[0]


@settings(max_examples=40)
@given(
    st.sets(st.integers(0, 9999), min_size=12, max_size=60),
    st.sets(st.integers(0, 9999), max_size=60),
    st.sampled_from([NONE, {"validation": 2, "test": 2}, {"validation": None, "test": 1}]),
    st.randoms(use_true_random=False),
)
def test_added_rows_move_no_question_between_splits(first, added, sizes, order):
    texts = list(first | added)
    order.shuffle(texts)
    before, _ = split({"train": rows(*first)}, sizes=sizes)
    after, _ = split({"train": rows(*texts)}, sizes=sizes)
    home = {}
    for name in SPLITS:
        home.update(dict.fromkeys(after[name], name))
    assert {home.get(question, "train") for question in before["train"]} == {"train"}
    for name in ("validation", "test"):
        # If no question is in the interval, the nearest one is held out.
        held = [question for question in before[name] if depth(name, question) < HELD_OUT_FRACTION]
        assert {home.get(question, name) for question in held if sizes[name] is None} <= {name}


def depth(name, question):
    position = RowHashes.of(question, {}).position(0)
    return position if name == "test" else 1 - position


@pytest.mark.parametrize("more", [50, 1000])
def test_training_questions_are_never_held_out_later(more):
    sizes = {"validation": 20, "test": 20}
    before, _ = split({"train": rows(*range(1000))}, sizes=sizes)
    after, _ = split({"train": rows(*range(1000 + more))}, sizes=sizes)
    assert len(before["train"]) == 1000 - 40
    for name, other in (("validation", "test"), ("test", "validation")):
        assert set(before[name]).isdisjoint(after[other])
        assert set(before["train"]).isdisjoint(after[name])


def test_default_sizes_are_bounded():
    parts, _ = split({"train": rows(*range(3000))})
    assert (len(parts["validation"]), len(parts["test"])) == (64, 256)
    assert [len(part) for part in split({"train": rows("a", "b", "c")})[0].values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("tables", "size", "message"),
    [
        *(
            ({"train": rows(*range(10)), "test": rows("x")}, n, rf"size .* 9\], got {n}")
            for n in (0, 10, 11, -1)
        ),
        (
            {"train": rows("a", "b"), "test": rows("b", "a")},
            None,
            r"train_dataset was left out.* 2 held out",
        ),
        ({"train": rows("a")}, None, "test_dataset"),
        ({"train": rows("a", "b", "a")}, None, "validation_dataset"),
    ],
)
def test_invalid_sizes_and_empty_splits_are_refused(tables, size, message):
    with pytest.raises(ValueError, match=message):
        split(tables, sizes={"validation": size, "test": None})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"train": [1]}, r"\['train'\]"),
        ({"question": ["a"], "answer": ["b"]}, r"\['question', 'answer'\]"),
        ("questions.csv", "'questions.csv'"),
        (["a", "b"], "mapping.*'a'"),
        (iter([1]), "list_iterator"),
        ([], "at least one row"),
        ([{"prompt": "a"}], r"columns \['question'\], got \['prompt'\].*Missing: \['question'\]"),
        (datasets.Dataset.from_dict({"question": []}), "at least one row"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"question": ["a"]})}), "train"),
        (datasets.Dataset.from_dict({"question": ["a"]}).to_iterable_dataset(), "IterableDataset"),
    ],
)
def test_invalid_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=f"my_dataset.*{message}"):
        check_table(table, ["question"], "my_dataset")
