"""Rewards inside a completion: what a reward function returns for process supervision, and the tokens they land on."""

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Unit = Literal["token", "character"]
MAX_REWARD = 3.4e38
"""What rewards may amount to: members learn in float32, in which more than this is infinite."""


def fits_float32(value: Any) -> bool:
    """Tell whether a number can be learnt from: finite, in float32 too."""
    return bool(abs(value) <= MAX_REWARD)  # of NaN, and of an integer that no float holds, as well


@dataclass(frozen=True)
class StepRewards:
    """Rewards at positions inside one completion; a reward function may return this instead of a number.

    The function's reward for the completion is the sum of the values. Several values at one position add up; no values
    at all are a reward of 0 that stands nowhere.

    Attributes:
        values: Rewards, each finite.
        positions: Where each one is earned, counted from 0: in the completion's token ids, or in its text, where the
            token that completes the character gets it. A step's last token or character is the usual choice.
        unit: What positions count.

    Raises:
        ValueError: If values and positions differ in number, or one of them is of the wrong kind.
    """

    values: Sequence[float]
    positions: Sequence[int]
    unit: Unit = "token"

    def __post_init__(self) -> None:
        values, positions = _listed("values", self.values), _listed("positions", self.positions)
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit of StepRewards must be "token" or "character", got {self.unit!r:.80}')
        if len(values) != len(positions):
            raise ValueError(
                f"StepRewards needs one position per value, got {len(values)} values and {len(positions)} positions"
            )
        for value in values:
            if not isinstance(value, numbers.Real) or not fits_float32(value):
                raise ValueError(f"values of StepRewards must be finite numbers, got {value!r:.80}")
        for position in positions:
            if not isinstance(position, numbers.Integral) or isinstance(position, bool) or position < 0:
                raise ValueError(f"positions of StepRewards must be whole numbers from 0, got {position!r:.80}")
        object.__setattr__(self, "values", tuple(float(value) for value in values))
        object.__setattr__(self, "positions", tuple(int(position) for position in positions))

    @property
    def total(self) -> float:
        """The sum of the values."""
        return math.fsum(self.values)


def _listed(name: str, given: Any) -> list[Any]:
    if hasattr(given, "tolist"):  # arrays and tensors
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"{name} of StepRewards must be a list, got {given!r:.80}")
    return [value.tolist() if hasattr(value, "tolist") else value for value in given]


def token_positions(
    rewards: StepRewards, token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]
) -> list[int]:
    """Return the token that each value of a completion's step rewards belongs to.

    A character belongs to the token with which it is complete: one whose bytes are spread over several tokens to the
    last of them.

    Args:
        rewards: Positions inside the completion.
        token_ids: Its tokens.
        text: `decode(token_ids)`.
        decode: The tokenizer's decoding, special tokens left out.
    """
    if rewards.unit == "token" or not rewards.positions:
        return list(rewards.positions)
    ends = character_ends(token_ids, text, decode)
    return [next(token for token, end in enumerate(ends) if end > position) for position in rewards.positions]


def character_ends(token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]) -> list[int]:
    """Return how many characters of a completion's text are complete after each of its tokens; never fewer than before.

    Args:
        token_ids: The tokens.
        text: `decode(token_ids)`.
        decode: The tokenizer's decoding, special tokens left out.
    """
    pieces = [decode([token]) for token in token_ids]
    ends: list[int] = []
    if "".join(pieces) == text:
        for piece in pieces:
            ends.append(len(piece) + (ends[-1] if ends else 0))
    else:
        # Tokens that do not stand for their text alone: spaces that only show between words, parts of a character.
        for count in range(1, len(token_ids) + 1):
            known = _common(decode(list(token_ids[:count])), text)
            ends.append(max(known, ends[-1] if ends else 0))
    if ends:
        ends[-1] = len(text)
    return ends


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
