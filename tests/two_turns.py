"""A user-defined environment of two turns: guess a digit, with a hint after the first guess.

It uses the protocol only: `GroupEnvironment` makes a `PromptBatch`.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from evogrpo.envs.protocol import REPLY, SPLITS, Scores, Split, shuffled_starts
from evogrpo.randomness import generator
from evogrpo.records import Conversation

SIZES = {"train": 40, "validation": 10, "test": 10}
HINTS = {True: " up ", False: " down "}


def guess(text: str) -> int | None:
    """Return the first digit of a text."""
    return next((int(character) for character in text if character in string.digits), None)


@dataclass(frozen=True, kw_only=True)
class GuessTwice:
    """Behind each box, named by two letters, is a digit.

    The reward is 1 less the distance of the last guess.

    A second guess follows a wrong first one, after the hint.

    Attributes:
        tokenizer: Turns text into token ids and back.
        seed: Seed of the digits and of the order of the boxes.
    """

    tokenizer: Any
    seed: int = 0
    observation_space: gymnasium.Space[Any] = field(init=False)
    action_space: gymnasium.Space[Any] = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = gymnasium.spaces.Discrete(len(self.tokenizer))
        for name in ("observation_space", "action_space"):
            object.__setattr__(self, name, gymnasium.spaces.Sequence(vocabulary))

    def size(self, split: Split) -> int:
        return SIZES[split]

    def select_starts(self, step: int, count: int, starts_per_step: int) -> tuple[int, ...]:
        return shuffled_starts(self.seed, self.size("train"), step, count, starts_per_step)

    def make_batch(self, split: Split, starts: Sequence[int]) -> "Boxes":
        if split not in SIZES or not all(0 <= start < SIZES[split] for start in starts):
            raise ValueError(
                f"boxes of {split} are numbered up to {SIZES.get(split, 0)}, got {list(starts)}"
            )
        first = sum(SIZES[earlier] for earlier in SPLITS[: SPLITS.index(split)])
        digits = generator(self.seed, "boxes").integers(10, size=sum(SIZES.values()))
        letters = string.ascii_lowercase
        numbers = [first + start for start in starts]
        return Boxes(
            tokenizer=self.tokenizer,
            questions=tuple(
                f"{letters[number // 26]}{letters[number % 26]}?" for number in numbers
            ),
            digits=tuple(int(digits[number]) for number in numbers),
        )


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Opened boxes."""

    tokenizer: Any
    questions: tuple[str, ...]
    digits: tuple[int, ...]
    max_turns: int = 2

    @property
    def prompts(self) -> list[list[int]]:
        return [self._ids(question) for question in self.questions]

    def respond(self, conversations: Sequence[Conversation]) -> list[list[int] | None]:
        return [self._hint(conversation) for conversation in conversations]

    def score(self, conversations: Sequence[Conversation]) -> Scores:
        closeness = np.array(
            [self._closeness(conversation) for conversation in conversations], dtype=np.float64
        )
        return Scores(
            rewards=closeness,
            components={"closeness": closeness},
            completions=tuple(self._shown(conversation) for conversation in conversations),
            weights=np.ones((len(closeness), 1)),
        )

    def _hint(self, conversation: Conversation) -> list[int] | None:
        guessed = guess(self._text(conversation.completions[-1]))
        digit = self.digits[conversation.start]
        if len(conversation.completions) == self.max_turns or guessed == digit:
            return None
        return self._ids(HINTS[guessed is None or guessed < digit])

    def _closeness(self, conversation: Conversation) -> float:
        guessed = guess(self._text(conversation.completions[-1]))
        if guessed is None:
            return 0.0
        return 1 - abs(guessed - self.digits[conversation.start]) / 9

    def _shown(self, conversation: Conversation) -> str:
        first, *second = (self._text(part) for part in conversation.completions)
        hints = [f"\n{REPLY}{self._text(part)}\n" for part in conversation.replies]
        return "".join([first, *hints, *second])

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
