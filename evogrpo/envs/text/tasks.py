"""Built-in tasks: arithmetic and number sequences."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from evogrpo.envs.protocol import TEST_SIZE, VALIDATION_SIZE, Split
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.reward_functions import RewardFn
from evogrpo.envs.text.templates import Tokenizer
from evogrpo.randomness import generator

# With commas between thousands, or none.
_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
THREE_DIGIT_QUESTIONS = 4000
_MINUS = re.compile(r"(?:^|[^\w)])-$|(?:^|[=:])\s*- +$", re.ASCII)


def final_number(text: str) -> float | None:
    """Return the last number in a text, or None if there is none.

    A minus directly before the digits is a sign unless it joins two terms ("45-22"). A minus
    followed by a space is a sign only after "=" or ":" or at the start of the text.

    Args:
        text: Untrusted text.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[-1]
    # Commas between thousands are no decimal point.
    value = float(number[0].replace(",", ""))
    # A few characters decide whether a minus is a sign.
    start = number.start()
    before = text[max(0, start - 16) : start]
    return -value if _MINUS.search(before) else value


def accuracy(completion: str, answer: str, question: str) -> float:
    """Return 1.0 if the last number of the completion equals the answer, else 0.0.

    Only the last number counts, so listing many numbers is not rewarded.
    """
    return float(final_number(completion) == float(answer))


def right_digits(completion: str, answer: str, question: str) -> float:
    """Return the share of right digits if the last number has as many digits as the answer, else 0.

    Digits are compared place by place.
    """
    number = final_number(completion)
    # Also False for infinity, which a number of hundreds of digits becomes.
    if number is None or not number.is_integer():
        return 0.0
    given = str(int(number))
    if len(given) != len(answer):
        return 0.0
    return sum(map(str.__eq__, given, answer)) / len(answer)


def closeness(completion: str, answer: str, question: str) -> float:
    """Return 1 / (1 + d / 10) for a number that differs by d from the answer; 0 without a number.

    That is 1 for the right number, and 0.5 for one that differs by 10.
    """
    number = final_number(completion)
    if number is None:
        return 0.0
    return 1 / (1 + abs(number - float(answer)) / 10)


def two_digit_questions(seed: int) -> list[dict[str, str]]:
    """Return all questions of the task two_digit_sums, in random order.

    Each unordered pair of numbers from 10 to 99 occurs once as a sum and once as a difference, in
    random order. No held-out question is a training question with exchanged terms.

    Args:
        seed: Seed of the order of questions and terms.

    Returns:
        8190 rows with the columns question and answer.
    """
    rng = generator(seed, "two_digit_sums")
    pairs = list(combinations_with_replacement(range(10, 100), 2))
    # Questions 2k and 2k + 1 are the sum and the difference of pair k.
    exchange = rng.random(2 * len(pairs)) < 0.5
    rows = []
    for number in rng.permutation(2 * len(pairs)):
        a, b = pairs[number // 2]
        if exchange[number]:
            a, b = b, a
        problem = f"{a} + {b}"
        answer = a + b
        if number % 2:
            problem = f"{a} - {b}"
            answer = a - b
        question = f"State the final answer to the following arithmetic problem: {problem} ="
        rows.append({"question": question, "answer": str(answer)})
    return rows


def three_digit_questions(seed: int) -> list[dict[str, str]]:
    """Return 4,000 questions of the task three_digit_sums, in random order.

    Each is the sum of two numbers from 100 to 499, which has three digits too; no unordered pair
    occurs twice.

    Args:
        seed: Seed of the pairs, of their order and of the order of terms.

    Returns:
        4000 rows with the columns question and answer.
    """
    rng = generator(seed, "three_digit_sums")
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    while len(pairs) < THREE_DIGIT_QUESTIONS:
        a, b = rng.integers(100, 500, size=2).tolist()
        pairs.setdefault(frozenset((a, b)), (a, b))
    rows = []
    for a, b in pairs.values():
        question = f"{a} + {b} ="
        rows.append({"question": question, "answer": str(a + b)})
    return rows


def sequence_questions(seed: int) -> list[dict[str, str]]:
    """Return all questions of the task number_sequences, in random order.

    A sequence has four numbers with equal differences, and the fifth is the answer. Every first
    number from 1 to 99 occurs once with every difference from 2 to 12.

    Args:
        seed: Seed of the order.

    Returns:
        1089 rows with the columns question and answer.
    """
    rng = generator(seed, "number_sequences")
    differences = range(2, 13)
    rows = []
    for number in rng.permutation(99 * len(differences)):
        first = 1 + number // len(differences)
        step = differences[number % len(differences)]
        *terms, answer = range(first, first + 5 * step, step)
        question = f"State the next number of this sequence: {', '.join(map(str, terms))}"
        rows.append({"question": question, "answer": str(answer)})
    return rows


def split_rows(
    rows: list[dict[str, str]], validation_size: int, test_size: int
) -> dict[Split, list[dict[str, str]]]:
    """Return the rows by split, in order: train, validation, test.

    Raises:
        ValueError: If a size is not positive or leaves no training question.
    """
    held_out = validation_size + test_size
    if min(validation_size, test_size) < 1 or held_out >= len(rows):
        sizes = f"{validation_size} and {test_size}"
        raise ValueError(
            f"validation_size and test_size must be at least 1, together below {len(rows)}, got"
            f" {sizes}."
        )
    # Training takes what the held-out splits leave.
    first_test = len(rows) - test_size
    first_validation = first_test - validation_size
    return {
        "train": rows[:first_validation],
        "validation": rows[first_validation:first_test],
        "test": rows[first_test:],
    }


@dataclass(frozen=True, kw_only=True)
class Task:
    """A built-in task, whose metric is `accuracy`.

    Attributes:
        description: Question and rewards, in one line.
        questions: `questions(seed)` returns all questions, in random order.
        others: Rewards beside `accuracy`. Their weights are 0 unless a search space changes them.
    """

    description: str
    questions: Callable[[int], list[dict[str, str]]]
    others: tuple[RewardFn, ...] = ()

    def build(
        self,
        tokenizer: Tokenizer,
        *,
        validation_size: int = VALIDATION_SIZE,
        test_size: int = TEST_SIZE,
        seed: int = 0,
        **gym_options: Any,
    ) -> HuggingFaceGym:
        """Return the environment of the task.

        Args:
            tokenizer: A transformers tokenizer.
            validation_size: Questions for fitness.
            test_size: Questions for the final report.
            seed: Seed of the split and of the training order.
            gym_options: Other arguments of HuggingFaceGym, e.g. conversation_template or
                data_batch_size.
        """
        tables = split_rows(self.questions(seed), validation_size, test_size)
        rewards: dict[str, Any] = {"reward_fn": accuracy}
        if self.others:
            rewards = {
                "reward_fn": [accuracy, *self.others],
                "reward_weights": [1.0] + [0.0] * len(self.others),
                "metric": accuracy,
            }
        return HuggingFaceGym(tables, tokenizer=tokenizer, seed=seed, **{**rewards, **gym_options})


TASKS: Mapping[str, Task] = {
    "two_digit_sums": Task(
        description=(
            "sums and differences of two two-digit numbers; reward 1 if the last number is right"
        ),
        questions=two_digit_questions,
    ),
    "three_digit_sums": Task(
        description=(
            "sums of two three-digit numbers; reward 1 if the last number is right; right_digits"
            " and closeness have weight 0 until a search space changes it"
        ),
        questions=three_digit_questions,
        others=(right_digits, closeness),
    ),
    "number_sequences": Task(
        description=(
            "next number after four with equal differences; reward 1 if the last number is right"
        ),
        questions=sequence_questions,
    ),
}
"""Built-in tasks by name."""
