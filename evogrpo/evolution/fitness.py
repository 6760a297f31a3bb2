"""Fitness of a member: its estimate, how it is measured, and racing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Self, get_args

from pydantic import Field

from evogrpo.text import shown
from evogrpo.validation import REAL, WHOLE, Flag, Real, Whole, finite_number, settings

# Measures of fitness: greedy or sampled answers to validation questions, or training rewards.
GREEDY = "greedy"
SAMPLED = "sampled"
ROLLOUTS = "rollouts"


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """Raw reward of one member on held-out questions, or on training prompts (or reset seeds).

    Attributes:
        mean: Mean raw reward per question; higher is better. For a member that left a race early,
            the estimate of `algorithms.evaluation`.
        standard_error: Standard error of `mean` over questions, in reward units.
        scores: One raw reward per question.
        keys: Number of each question, the same for all members; None = 0, 1, ...

    Raises:
        ValueError: If a number is not finite, the standard error is negative, or keys repeat or are
            not one per score.
    """

    mean: Real
    standard_error: Real
    scores: tuple[Real, ...]
    keys: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        finite_number("mean", self.mean)
        if finite_number("standard_error", self.standard_error) < 0:
            raise ValueError(f"standard_error must be at least 0, got {self.standard_error}.")
        if self.keys is None:
            return
        distinct = len(set(self.keys))
        if len(self.keys) != len(self.scores):
            raise ValueError(
                f"keys must be one per score, got {len(self.keys)} for {len(self.scores)} scores."
            )
        if distinct != len(self.keys):
            raise ValueError(
                f"keys must be distinct, got {distinct} different ones of {len(self.keys)}."
            )

    @classmethod
    def from_scores(cls, scores: Sequence[float], keys: Sequence[int] | None = None) -> Self:
        """Build from one raw reward per question.

        Raises:
            ValueError: If there are fewer than 2 scores, or one is not finite.
        """
        rewards = tuple(float(finite_number("each score", score)) for score in scores)
        mean, standard_error = _mean_and_standard_error(rewards)
        if keys is None or list(keys) == list(range(len(rewards))):
            stored_keys = None
        else:
            stored_keys = tuple(map(int, keys))
        return cls(mean=mean, standard_error=standard_error, scores=rewards, keys=stored_keys)

    @cached_property
    def by_key(self) -> dict[int, float]:
        """Scores by key of the question."""
        if self.keys is None:
            return dict(enumerate(self.scores))
        return dict(zip(self.keys, self.scores, strict=True))


def paired_difference(a: Fitness, b: Fitness) -> tuple[float, float]:
    """Compare two members question by question, so that the difficulty of a question cancels.

    Args:
        a: Fitness of one member.
        b: Fitness of another member.

    Returns:
        Mean of a's scores minus b's scores over the common questions, and its standard error, in
        reward units.

    Raises:
        ValueError: If they have fewer than 2 common questions.
    """
    other = b.by_key
    differences = []
    for key, score in a.by_key.items():
        if key in other:
            differences.append(score - other[key])
    if len(differences) < 2:
        raise ValueError(
            f"A comparison needs at least 2 common questions, got {len(differences)} of"
            f" {len(a.scores)} and {len(b.scores)}. Use more validation questions."
        )
    return _mean_and_standard_error(differences)


def difference(a: Fitness, b: Fitness) -> tuple[float, float]:
    """Compare two members question by question, or by means without common questions.

    Training rewards of different generations, for example, have no question in common.

    Args:
        a: Fitness of one member.
        b: Fitness of another member.

    Returns:
        Difference of a and b and its standard error, in reward units.
    """
    # A paired difference needs two common questions for its standard error.
    if len(a.by_key.keys() & b.by_key.keys()) > 1:
        return paired_difference(a, b)
    standard_error = math.hypot(a.standard_error, b.standard_error)
    return a.mean - b.mean, standard_error


def _mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, exactly 0 for equal values."""
    count = len(values)
    if count < 2:
        raise ValueError(
            f"A standard error needs at least 2 scores, got {count}. Use more validation questions."
        )
    if min(values) == max(values):
        # Rounding could move the mean of equal floats, which would look like a tiny but certain
        # difference.
        return values[0], 0.0
    mean = math.fsum(values) / count
    squares = [(value - mean) ** 2 for value in values]
    variance = math.fsum(squares) / (count - 1)
    return mean, math.sqrt(variance / count)


FitnessBy = Literal["validation", "rollouts"]


@settings
class FitnessConfig:
    """Measure of fitness and its cost.

    Training rewards are always recorded, without extra cost: the raw rewards of the last half of a
    generation's learning steps, averaged per prompt (or reset seed). They measure the policy that
    sampled, so they lag behind learning. In the first learning steps of a child they measure its
    parent.

    Attributes:
        by: Measure that selection uses. "validation": answers to the validation questions.
            "rollouts": training rewards; there is no evaluation, and the founders' first learning
            step measures the untrained base.
        sampled: Sample answers to held-out questions at temperature 1 instead of greedily, with the
            same random numbers for all members and evaluations. Also applies to the test.
        answers: Number of sampled answers to each held-out question, which are averaged.
        racing: Evaluate in rounds; members that are clearly behind the leader leave the race early.
        race_error: Maximum probability that the best member leaves a race early.

    Raises:
        ValueError: If a setting is out of range, or has no effect given the others.
    """

    by: FitnessBy = "validation"
    sampled: Flag = False
    answers: Annotated[int, Field(ge=1, le=10_000), WHOLE] = 1
    racing: Flag = False
    race_error: Annotated[float, Field(gt=0, lt=0.5), REAL] = 0.05

    def __post_init__(self) -> None:
        if self.answers > 1 and not self.sampled:
            raise ValueError(
                f"answers must be 1 for greedy answers, which do not vary, got {self.answers}. Set"
                " sampled=True."
            )
        if self.racing and self.by == "rollouts":
            raise ValueError(
                "racing needs validation questions, but by='rollouts' uses none. Remove racing."
            )

    @classmethod
    def of(cls, value: object) -> Self:
        """Build from settings, a name for `by`, or a mapping.

        Raises:
            ValueError: If a setting is unknown or out of range.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        if not isinstance(value, str):
            raise ValueError(
                f"fitness must be one of {', '.join(get_args(FitnessBy))}, a mapping of settings or"
                f" a FitnessConfig, got {shown(value)}."
            )
        return cls(by=value)  # type: ignore[arg-type]  # the constructor checks the name

    @property
    def uses_validation(self) -> bool:
        """True if members answer validation questions."""
        return self.by != ROLLOUTS

    @property
    def validation_measure(self) -> str:
        """Measure of held-out questions: "greedy" or "sampled"."""
        return SAMPLED if self.sampled else GREEDY

    @property
    def selection_measure(self) -> str:
        """Measure used by selection: greedy, sampled or rollouts."""
        if self.uses_validation:
            return self.validation_measure
        return ROLLOUTS


GREEDY_EVALUATION = FitnessConfig()
"""Greedy answers to all validation questions."""
