"""Step rewards: rewards at positions inside a completion, for process supervision."""

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Unit = Literal["token", "character"]
MAX_REWARD = 3.4e38
"""Largest reward: float32, which members learn in, has none beyond."""


def fits_float32(value: Any) -> bool:
    """Return True for numbers that are finite in float32."""
    return bool(abs(value) <= MAX_REWARD)  # also False for NaN and integers beyond float64


@dataclass(frozen=True)
class StepRewards:
    """Rewards at positions inside one completion, which a reward function may return instead of a number.

    The completion's reward is the sum of the values. Several values at one position are added. Without values the
    reward is 0.

    Attributes:
        values: Rewards, each finite.
        positions: Position of each reward from 0, in the completion's token ids or in its text. A character's reward
            goes to the token that completes it. Usually the last token or character of a step.
        unit: Unit of positions: "token" or "character".

    Raises:
        ValueError: If values and positions have different lengths or invalid types.
    """

    values: Sequence[float]
    positions: Sequence[int]
    unit: Unit = "token"

    def __post_init__(self) -> None:
        values, positions = _checked_list("values", self.values), _checked_list("positions", self.positions)
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit of StepRewards must be "token" or "character", got {self.unit!r:.80}.')
        if len(values) != len(positions):
            raise ValueError(
                f"positions of StepRewards must match values, got {len(values)} values and {len(positions)} positions."
            )
        for value in values:
            if not isinstance(value, numbers.Real) or not fits_float32(value):
                raise ValueError(f"values of StepRewards must be finite numbers, got {value!r:.80}.")
        for position in positions:
            if not isinstance(position, numbers.Integral) or isinstance(position, bool) or position < 0:
                raise ValueError(f"positions of StepRewards must be whole numbers from 0, got {position!r:.80}.")
        object.__setattr__(self, "values", tuple(float(value) for value in values))
        object.__setattr__(self, "positions", tuple(int(position) for position in positions))

    @property
    def total(self) -> float:
        """Sum of the values."""
        return math.fsum(self.values)


def _checked_list(name: str, items: Any) -> list[Any]:
    if hasattr(items, "tolist"):  # arrays and tensors
        items = items.tolist()
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ValueError(f"{name} of StepRewards must be a list, got {items!r:.80}.")
    return [item.tolist() if hasattr(item, "tolist") else item for item in items]


def token_positions(
    rewards: StepRewards, token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]
) -> list[int]:
    """Return the token position of each value of a completion's step rewards.

    A character belongs to the token that completes it: if its bytes are spread over several tokens, to the last one.

    Args:
        rewards: The step rewards.
        token_ids: Tokens of the completion.
        text: `decode(token_ids)`.
        decode: The tokenizer's decoding, without special tokens.
    """
    if rewards.unit == "token" or not rewards.positions:
        return list(rewards.positions)
    ends = character_ends(token_ids, text, decode)
    return [next(token for token, end in enumerate(ends) if end > position) for position in rewards.positions]


def character_ends(token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]) -> list[int]:
    """Return the number of complete characters of a text after each of its tokens, non-decreasing.

    Args:
        token_ids: The tokens.
        text: `decode(token_ids)`.
        decode: The tokenizer's decoding, without special tokens.
    """
    # 1. Fast: tokens that decode to the same text alone as in context.
    pieces = [decode([token]) for token in token_ids]
    ends: list[int] = []
    if "".join(pieces) == text:
        for piece in pieces:
            ends.append(len(piece) + (ends[-1] if ends else 0))
    else:
        # 2. Slow: decode every prefix, as spaces between words and parts of characters depend on context.
        for count in range(1, len(token_ids) + 1):
            prefix = decode(list(token_ids[:count]))
            pairs = zip(prefix, text, strict=False)
            common = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(prefix), len(text)))
            ends.append(max(common, ends[-1] if ends else 0))
    if ends:
        ends[-1] = len(text)
    return ends
