"""What members earned, question by question, and how sure a difference between two of them is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from evogrpo.config.checks import declared_fields, finite_number

GREEDY, SAMPLED, ROLLOUTS = "greedy", "sampled", "rollouts"
MEASURES = (GREEDY, SAMPLED, ROLLOUTS)
"""How a member can be measured: by greedy or by sampled answers to validation questions, or by its training rewards."""


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What one member earned on held-out questions, or on the starts that it trained on; a failed member has None.

    Attributes:
        mean: Mean raw reward per question; higher is better. For a member that answered fewer questions than the leader
            of its race, what the leader earned on all less what the member was behind on those that both answered.
        standard_error: Of that mean over questions, in reward units.
        scores: One raw reward per question.
        keys: Which questions these are, by numbers that mean the same for all members; None = the first ones, in order.

    Raises:
        ValueError: If a number is not finite, the standard error is negative, or keys repeat or are not one per score.
    """

    mean: float
    standard_error: float
    scores: tuple[float, ...]
    keys: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        finite_number("mean", self.mean)
        if finite_number("standard_error", self.standard_error) < 0:
            raise ValueError(f"standard_error must be at least 0, got {self.standard_error}")
        if self.keys is not None and not len(set(self.keys)) == len(self.keys) == len(self.scores):
            raise ValueError(
                f"keys must name one question per score, each once, got {len(set(self.keys))} different ones among "
                f"{len(self.keys)} for {len(self.scores)} scores"
            )

    @classmethod
    def from_scores(cls, scores: Sequence[float], keys: Sequence[int] | None = None) -> Self:
        """Average one raw reward per question.

        Raises:
            ValueError: If there are fewer than 2 scores, or one is not finite.
        """
        rewards = tuple(float(finite_number("each score", score)) for score in scores)
        mean, standard_error = _mean_and_standard_error(rewards)
        named = None if keys is None or list(keys) == list(range(len(rewards))) else tuple(map(int, keys))
        return cls(mean=mean, standard_error=standard_error, scores=rewards, keys=named)

    @property
    def by_key(self) -> dict[int, float]:
        """The scores by question."""
        return dict(zip(range(len(self.scores)) if self.keys is None else self.keys, self.scores, strict=True))

    def to_json(self) -> list[float] | dict[str, Any]:
        """Return plain JSON values: the scores alone, where everything else follows from them."""
        if type(self).from_scores(self.scores) == self:
            return list(self.scores)
        values = {"mean": self.mean, "standard_error": self.standard_error, "scores": list(self.scores)}
        return values if self.keys is None else {**values, "keys": list(self.keys)}

    @classmethod
    def from_json(cls, values: Sequence[float] | Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        if not isinstance(values, Mapping):
            return cls.from_scores(values)
        keys = values.get("keys")
        listed = {"scores": tuple(values["scores"]), "keys": None if keys is None else tuple(keys)}
        return cls(**declared_fields(cls, {**values, **listed}))


def paired_difference(a: Fitness, b: Fitness) -> tuple[float, float]:
    """Compare two members question by question, so that the difficulty of a question cancels.

    Args:
        a: One member's fitness.
        b: Another's.

    Returns:
        The mean of a's score minus b's over the questions that both answered, and the standard error of that mean, in
        reward units.

    Raises:
        ValueError: If both answered fewer than 2 of the same questions.
    """
    other = b.by_key
    differences = [score - other[key] for key, score in a.by_key.items() if key in other]
    if len(differences) < 2:
        raise ValueError(
            f"members are compared on the same questions, at least 2 of them, got {len(differences)} that both "
            f"answered, of {len(a.scores)} and {len(b.scores)}"
        )
    return _mean_and_standard_error(differences)


def difference_between(a: Fitness, b: Fitness) -> tuple[float, float]:
    """Return a's mean less b's, and its standard error: paired where both answered questions, else of two samples.

    States of different generations are compared by this, as what they trained on was not the same.
    """
    if len(a.by_key.keys() & b.by_key.keys()) >= 2:
        return paired_difference(a, b)
    return a.mean - b.mean, math.hypot(a.standard_error, b.standard_error)


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
