"""Fitness on the validation questions, and how sure a difference between two members is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from evogrpo.hyperparameters import finite_number


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What one member earned on the validation questions; a failed member has None instead.

    Attributes:
        mean: Mean raw reward per question; higher is better.
        standard_error: Of that mean over questions, in reward units.
        scores: One raw reward per validation question, in the same order for all members.

    Raises:
        ValueError: If a number is not finite, or the standard error is negative.
    """

    mean: float
    standard_error: float
    scores: tuple[float, ...]

    def __post_init__(self) -> None:
        finite_number("mean", self.mean)
        if finite_number("standard_error", self.standard_error) < 0:
            raise ValueError(f"standard_error must be at least 0, got {self.standard_error}")

    @classmethod
    def from_scores(cls, scores: Sequence[float]) -> Self:
        """Average one raw reward per validation question.

        Raises:
            ValueError: If there are fewer than 2 scores, or one is not finite.
        """
        rewards = tuple(float(finite_number("each score", score)) for score in scores)
        mean, standard_error = _mean_and_standard_error(rewards)
        return cls(mean=mean, standard_error=standard_error, scores=rewards)


def paired_difference(a: Fitness, b: Fitness) -> tuple[float, float]:
    """Compare two members question by question, so that the difficulty of a question cancels.

    Args:
        a: One member's fitness.
        b: Another's, on the same questions in the same order.

    Returns:
        The mean of a's score minus b's over the questions, and the standard error of that mean, in reward units.

    Raises:
        ValueError: If the members did not answer the same number of questions, or fewer than 2.
    """
    if len(a.scores) != len(b.scores):
        raise ValueError(
            "members are compared on the same validation questions, "
            f"got {len(a.scores)} scores for one and {len(b.scores)} for the other"
        )
    return _mean_and_standard_error([x - y for x, y in zip(a.scores, b.scores, strict=True)])


def _mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    if count < 2:
        raise ValueError(f"a standard error needs at least 2 scores, got {count}: validate on more questions")
    if min(values) == max(values):
        # The mean of equal floats can miss them by rounding, which would read as a tiny but certain difference.
        return values[0], 0.0
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)
