"""The built-in arithmetic tasks."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.data import single_turn_conversations
from evogrpo.envs import TASKS
from evogrpo.envs.text.tasks import accuracy, final_number, sequence_questions, two_digit_questions

ASKED = re.compile(r"State the final answer to the following arithmetic problem: (\d\d) ([+-]) (\d\d) =")


def parsed(rows):
    for row in rows:
        a, sign, b = ASKED.fullmatch(row["question"]).groups()
        yield int(a), sign, int(b), int(row["answer"])


def test_answers_are_correct_and_questions_distinct():
    tables = two_digit_questions(0, 64, 256)
    assert {split: len(rows) for split, rows in tables.items()} == {"train": 7870, "validation": 64, "test": 256}
    seen = set()
    for rows in tables.values():
        for a, sign, b, answer in parsed(rows):
            assert answer == (a + b if sign == "+" else a - b)
            assert min(a, b) >= 10
            seen.add((min(a, b), sign, max(a, b)))
    assert len(seen) == 8190


def test_sequences_are_arithmetic_and_distinct():
    tables = sequence_questions(0, 64, 256)
    assert {split: len(rows) for split, rows in tables.items()} == {"train": 769, "validation": 64, "test": 256}
    seen = set()
    for row in (row for rows in tables.values() for row in rows):
        terms = re.fullmatch(r"State the next number of this sequence: (\d+, \d+, \d+, \d+)", row["question"])[1]
        numbers = [*map(int, terms.split(", ")), int(row["answer"])]
        steps = {after - before for before, after in pairwise(numbers)}
        assert len(steps) == 1
        assert 2 <= min(steps) <= 12
        seen.add(tuple(numbers))
    assert len(seen) == 1089
    assert sequence_questions(0, 64, 256) == tables != sequence_questions(1, 64, 256)
    with pytest.raises(ValueError, match="together less than 1089"):
        sequence_questions(0, 1000, 89)


@pytest.mark.parametrize(("validation", "test"), [(0, 5), (5, 0), (4095, 4095)])
def test_invalid_sizes_are_refused(validation, test):
    with pytest.raises(ValueError, match=f"less than 8190, got {validation} and {test}"):
        two_digit_questions(0, validation, test)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("23 - 45 = -22", -22),
        ("23 - 45 = - 22", -22),
        ("- 22", -22),
        ("-22.0", -22),
        ("**Answer:** \N{MINUS SIGN}22", -22),
        (r"\boxed{-22}", -22),
        ("(-22)", -22),
        ("45-22", 22),
        ("45 - 22", 22),
        ("x = (45)-22", 22),
        ("First:\n- 45\n- 22", 22),
        ("1,068", 1068),
        ("68.5", 68.5),
        ("no number", None),
        ("", None),
        ("\u0666\u0668", None),
        ("-", None),
    ],
)
def test_final_number_parses_text(text, number):
    assert final_number(text) == number


@given(st.integers(-89, 198), st.text())
def test_accuracy_is_one_if_the_last_number_is_the_answer(answer, before):
    assert accuracy(f"{before} = {answer}", str(answer), "") == 1.0
    assert accuracy(f"{before} = {answer + 1}", str(answer), "") == 0.0


@given(st.lists(st.integers(-89, 198), min_size=1, max_size=30), st.sampled_from([" ", ", ", "\n", " = "]))
def test_only_the_last_of_several_numbers_counts(numbers, separator):
    text = separator.join(map(str, numbers))
    earned = [answer for answer in range(-89, 199) if accuracy(text, str(answer), "") == 1.0]
    assert earned == [numbers[-1]]


def test_tasks_are_registered_and_build(tokenizer, encode):
    assert list(TASKS) == ["two_digit_sums", "number_sequences"]
    task = TASKS["two_digit_sums"]
    assert "\n" not in task.description
    env = task.build(tokenizer, seed=4, validation_size=8, test_size=16)
    assert [env.size(split) for split in ("train", "validation", "test")] == [8166, 8, 16]
    assert not any(counts.duplicates or counts.held_out for counts in env.filtered.values())
    row = two_digit_questions(4, 8, 16)["test"][2]
    episodes = env.open("test", [2])
    assert episodes.prompts == (encode(f"<u>{row['question']}<eos><a>"),)
    scores = episodes.score(single_turn_conversations([0, 0], [encode(row["answer"] + "<eos>"), encode("1000")]))
    assert scores.rewards.tolist() == [1.0, 0.0]
