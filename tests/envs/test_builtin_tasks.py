"""The built-in arithmetic tasks and tasks of reasoning-gym (extra `reasoning`)."""

import importlib.metadata
import re
import string
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.tasks import (
    TASKS,
    accuracy,
    closeness,
    final_number,
    right_digits,
    sequence_questions,
    split_rows,
    three_digit_questions,
    two_digit_questions,
)
from evogrpo.records import single_turn_conversations

LETTERS = f"{string.printable}\N{MINUS SIGN}\u0663é漢"
ASKED = re.compile(
    r"State the final answer to the following arithmetic problem: (\d\d) ([+-]) (\d\d) ="
)


@pytest.fixture(scope="module")
def sums():
    return split_rows(two_digit_questions(0), 64, 256)


def test_answers_are_correct_and_questions_distinct(sums):
    assert {split: len(rows) for split, rows in sums.items()} == {
        "train": 7870,
        "validation": 64,
        "test": 256,
    }
    seen = set()
    for row in chain.from_iterable(sums.values()):
        a, sign, b = ASKED.fullmatch(row["question"]).groups()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert min(int(a), int(b)) >= 10
        seen.add((min(a, b), sign, max(a, b)))
    assert len(seen) == 8190


def test_sums_of_three_digits_are_correct_and_distinct():
    rows = three_digit_questions(0)
    seen = set()
    for row in rows:
        a, b = map(int, re.search(r"^(\d{3}) \+ (\d{3}) =$", row["question"]).groups())
        assert int(row["answer"]) == a + b
        seen.add((min(a, b), max(a, b)))
    assert len(seen) == len(rows) == 4000


@pytest.mark.parametrize(
    ("completion", "digits", "near"),
    [
        ("It is 579.", 1, 1),
        ("569", 2 / 3, 0.5),
        ("1,579", 0, 1 / 101),
        ("579.5", 0, 1 / 1.05),
        ("none", 0, 0),
    ],
)
def test_partial_credit(completion, digits, near):
    assert right_digits(completion, "579", "") == pytest.approx(digits)
    assert closeness(completion, "579", "") == pytest.approx(near)


def test_a_number_too_long_for_a_float_has_no_credit():
    digits = "9" * 400
    assert right_digits(digits, "579", "") == closeness(digits, "579", "") == 0


def test_sequences_are_arithmetic_and_distinct():
    rows = sequence_questions(0)
    seen = set()
    for row in rows:
        terms = re.fullmatch(
            r"State the next number of this sequence: (\d+, \d+, \d+, \d+)", row["question"]
        )[1]
        numbers = [*map(int, terms.split(", ")), int(row["answer"])]
        (step,) = {after - before for before, after in pairwise(numbers)}
        assert 2 <= step <= 12
        seen.add(tuple(numbers))
    assert len(seen) == len(rows) == 1089
    assert sequence_questions(0) == rows != sequence_questions(1)


@pytest.mark.parametrize(("validation", "test"), [(0, 5), (5, 0), (4095, 4095)])
def test_invalid_sizes_are_refused(validation, test):
    with pytest.raises(ValueError, match=f"below 8190, got {validation} and {test}"):
        split_rows(two_digit_questions(0), validation, test)


NUMBERS = {
    -22: [
        "23 - 45 = -22",
        "23 - 45 = - 22",
        "- 22",
        "-22.0",
        "**Answer:** \N{MINUS SIGN}22",
        r"\boxed{-22}",
        "(-22)",
    ],
    22: ["45-22", "45 - 22", "x = (45)-22", "First:\n- 45\n- 22"],
    1068: ["1,068", "12,1,068"],
    1234567.5: ["1,234,567.5"],
    13: ["5,7,9,11,13", "1000,13", "1,0013"],
    68.5: ["68.5"],
    None: ["no number", "", "\u0666\u0668", "-"],
}


@pytest.mark.parametrize(
    ("text", "number"), [(text, number) for number, texts in NUMBERS.items() for text in texts]
)
def test_final_number_parses_text(text, number):
    assert final_number(text) == number


@settings(max_examples=30)
@given(
    st.text(LETTERS),
    st.lists(st.integers(-89, 198), min_size=1),
    st.sampled_from([" ", ", ", "\n", " = "]),
)
def test_accuracy_is_one_if_the_last_number_is_the_answer(before, numbers, separator):
    text = f"{before} = {separator.join(map(str, numbers))}"
    assert accuracy(text, str(numbers[-1]), "") == 1.0
    assert accuracy(text, str(numbers[-1] + 1), "") == 0.0


def test_tasks_are_registered_and_build(tokenizer, encode):
    assert list(TASKS) == ["two_digit_sums", "three_digit_sums", "number_sequences"]
    env = TASKS["number_sequences"].build(tokenizer, seed=4, validation_size=8, test_size=16)
    assert [env.size(split) for split in ("train", "validation", "test")] == [1065, 8, 16]
    assert not any(counts.duplicates or counts.held_out for counts in env.filtered.values())
    row = split_rows(sequence_questions(4), 8, 16)["test"][2]
    episodes = env.make_batch("test", [2])
    assert episodes.prompts == (encode(f"<u>{row['question']}<eos><a>"),)
    scores = episodes.score(
        single_turn_conversations([0, 0], [encode(row["answer"] + "<eos>"), encode("1000")])
    )
    assert scores.rewards.tolist() == [1.0, 0.0]


# ---- reasoning-gym

SIZES = {"train": 40, "validation": 8, "test": 9}


def test_a_missing_package_raises_import_error(monkeypatch, tokenizer):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    with pytest.raises(
        ImportError, match=r"'chain_sum' requires reasoning_gym.*pip install .*\[reasoning\]"
    ):
        HuggingFaceGym.from_reasoning_gym("chain_sum", tokenizer=tokenizer)


@pytest.fixture
def make(tokenizer):
    pytest.importorskip("reasoning_gym")

    def make(name="chain_sum", **options):
        return HuggingFaceGym.from_reasoning_gym(
            name, tokenizer=tokenizer, **{"sizes": SIZES, "seed": 1, **options}
        )

    return make


@pytest.mark.parametrize("tag", [None, "answer"])
def test_tasks_use_their_own_score(make, tokenizer, encode, tag):
    env = make(min_digits=3, max_digits=4, answer_tag=tag, system_prompt="Tag it.")
    assert [env.size(split) for split in SIZES] == list(SIZES.values())
    episodes = env.make_batch("test", [0])
    assert tokenizer.decode(episodes.prompts[0]).startswith("<s>Tag it.")
    assert "State the final answer" in tokenizer.decode(episodes.prompts[0])
    answer = episodes.rows[0]["answer"]
    texts = [f"{answer}<eos>", f" {answer}\n", "none", f"12 <answer>{answer}</answer>"]
    scores = episodes.score(single_turn_conversations([0] * 4, [encode(text) for text in texts]))
    expected = [1.0, 1.0, 0.0] if tag is None else [0.0, 0.0, 0.0, 1.0]
    assert scores.rewards.tolist()[: len(expected)] == expected
    assert list(scores.components) == ["chain_sum"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "'chain_sums'.*chain_sum"),
        ("chain_sum", {"terms": 2}, "chain_sum.*terms"),
        ("chain_sum", {"min_terms": 0}, "chain_sum"),
        ("chain_sum", {"sizes": {"dev": 3}}, "sizes .*dev"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(make, name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)
