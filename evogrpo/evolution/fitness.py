"""Fitness of a member: its estimate, how it is measured, and racing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from evogrpo.config.checks import declared_fields, finite_number, flag, names_unknown, refuse_unknown, whole_between

GREEDY, SAMPLED, ROLLOUTS = "greedy", "sampled", "rollouts"
MEASURES = (GREEDY, SAMPLED, ROLLOUTS)
"""Measures of fitness: greedy or sampled answers to validation questions, or training rewards."""


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """Raw reward of one member on held-out questions or training starts; a failed member has no fitness.

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


FitnessBy = Literal["validation", "rollouts", "both"]


@names_unknown
@dataclass(frozen=True, kw_only=True)
class FitnessConfig:
    """How fitness is measured, and what it may cost.

    Training rewards are always looked at, as they cost nothing: the raw rewards of the last half of a generation's
    learning steps, averaged per start. They speak for the policy that sampled, so they lag behind what a generation
    taught, and in the first learning steps of a child for its parent.

    Attributes:
        by: What selection goes by. "validation": answers to the validation questions. "rollouts": training rewards;
            nothing else is asked, and what the untrained base is worth is told by the founders' first learning step.
            "both": training rewards decide who is replaced, and the run's best is chosen on validation questions, which
            only those are asked who could be the best by their training rewards.
        sampled: Whether held-out questions are answered by sampling at temperature 1 rather than greedily, with the
            same random numbers for all members and at every evaluation. This holds for the test as well.
        answers: Sampled answers to each held-out question, which are averaged.
        racing: Whether validation questions are asked in rounds, and members that are clearly behind the leader are
            asked no more; see `evogrpo.evolution.fitness`.
        race_error: How often, at most, a race may leave the best member behind.
        candidates: For "both", the most members of a generation that are asked validation questions.
        z: For "both", within how many standard errors of the paired difference to the best by training rewards these
            lie.
        second_set: How many validation questions, the last ones of the split, selection never sees. At the run's end
            the finalists answer them, and the best by all its answers is the run's best; what it earned there is told
            beside what it was chosen by, which is the luckiest of many. 0 = none.
        finalists: How many of the generations' best are kept for that. With 1 the second set only measures: what it
            says is not biased at all.

    Raises:
        ValueError: If a setting is out of range, or has no effect beside the others.
    """

    by: FitnessBy = "validation"
    sampled: bool = False
    answers: int = 1
    racing: bool = False
    race_error: float = 0.05
    candidates: int = 2
    z: float = 1.0
    second_set: int = 0
    finalists: int = 3

    def __post_init__(self) -> None:
        if self.by not in get_args(FitnessBy):
            raise ValueError(f"fitness is measured by one of {', '.join(get_args(FitnessBy))}, got {self.by!r:.80}")
        for name in ("sampled", "racing"):
            flag(name, getattr(self, name))
        object.__setattr__(self, "answers", whole_between("answers", self.answers, 1, 10_000))
        object.__setattr__(self, "candidates", whole_between("candidates", self.candidates, 1, 100_000))
        object.__setattr__(self, "second_set", whole_between("second_set", self.second_set, 0))
        object.__setattr__(self, "finalists", whole_between("finalists", self.finalists, 1, 1000))
        if self.second_set == 1:
            raise ValueError("second_set must be 0 or at least 2, got 1: one question gives no standard error")
        for name in ("race_error", "z"):
            object.__setattr__(self, name, finite_number(name, getattr(self, name)))
        if self.answers > 1 and not self.sampled:
            raise ValueError(
                f"answers must be 1 where answers are greedy, as these do not vary, got {self.answers}: set sampled"
            )
        if not 0 < self.race_error < 0.5:
            raise ValueError(f"race_error must lie in (0, 0.5), got {self.race_error}")
        if self.z < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        if self.racing and self.by == "rollouts":
            raise ValueError("racing saves validation questions, and fitness by rollouts asks none: leave racing out")

    @classmethod
    def of(cls, given: object) -> Self:
        """Return the settings that a caller gave: a record of them, one of the names of `by`, or a mapping.

        Raises:
            ValueError: If a setting is unknown or refused.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            refuse_unknown("setting of fitness", given, list(cls.__dataclass_fields__))
            return cls(**given)
        if not isinstance(given, str):
            raise ValueError(
                f"fitness must be one of {', '.join(get_args(FitnessBy))}, a mapping of settings or a FitnessConfig, "
                f"got {given!r:.80}"
            )
        return cls(by=given)  # type: ignore[arg-type]  # any other text is refused

    @property
    def uses_validation(self) -> bool:
        """True if members answer validation questions."""
        return self.by != ROLLOUTS

    @property
    def validation_measure(self) -> str:
        """Measure of held-out questions: one of `MEASURES`."""
        return SAMPLED if self.sampled else GREEDY

    @property
    def selection_measure(self) -> str:
        """Measure used by selection: one of `MEASURES`."""
        return self.validation_measure if self.by == "validation" else ROLLOUTS

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


GREEDY_EVALUATION = FitnessConfig(racing=False)
"""Greedy answers to all validation questions."""


FIRST_ROUND = 8
"""Questions of the first round; each further look is taken after twice as many."""


def rounds(questions: int, *, racing: bool) -> Iterator[tuple[int, int]]:
    """Yield where each round begins and ends; a single one without racing, or with few questions."""
    first, last = 0, FIRST_ROUND if racing else questions
    while last < questions:
        yield first, last
        first, last = last, 2 * last
    yield first, questions


def looks(questions: int) -> int:
    """Return how often a race is looked at before its last round."""
    return sum(1 for _ in rounds(questions, racing=True)) - 1


def clearly_behind(leader: NDArray[np.float64], other: NDArray[np.float64], error: float) -> bool:
    """Return True if a member is significantly behind the leader, with error probability at most `error`.

    Args:
        leader: `[n]` the leader's scores.
        other: `[n]` the member's, on the same questions; NaN where either has none.
        error: Of this one comparison.
    """
    differences = (leader - other)[np.isfinite(leader - other)]
    if len(differences) < 2 or differences.mean() <= 0:
        return False
    contradicted = np.append(differences, -np.abs(differences).max())
    standard_error = contradicted.std(ddof=1) / math.sqrt(len(contradicted))
    return bool(contradicted.mean() > t_quantile(1 - error, len(differences)) * standard_error)


def still_racing(scores: NDArray[np.float64], error: float) -> list[int]:
    """Return the rows of `scores` `[members, n]` that are not clearly behind the leader, itself among them.

    Args:
        scores: On the same questions; NaN where there is none.
        error: Of each comparison.
    """
    scored = np.isfinite(scores)
    means = np.where(scored, scores, 0.0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
    leader = int(np.where(scored.any(axis=1), means, -np.inf).argmax())
    return [row for row, own in enumerate(scores) if row == leader or not clearly_behind(scores[leader], own, error)]


def on_all_questions(fitness: Fitness, leader: Fitness) -> Fitness:
    """Estimate what a member would have earned on all questions that the leader of its race answered.

    It is what the leader earned, less what the member was behind on the questions that both answered: these may be
    easier or harder than the others.
    """
    if len(fitness.scores) == len(leader.scores):
        return fitness
    difference, standard_error = paired_difference(fitness, leader)
    return replace(
        fitness, mean=leader.mean + difference, standard_error=math.hypot(leader.standard_error, standard_error)
    )


def ahead(fitness: Fitness, rival: Fitness) -> bool:
    """Tell whether a member earned more than a rival: on what both answered, where that is not the same for both."""
    own, others = fitness.by_key.keys(), rival.by_key.keys()
    if own != others and len(own & others) >= 2:
        return paired_difference(fitness, rival)[0] > 0
    return fitness.mean > rival.mean


def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t, accurate to a thousandth for 7 degrees of freedom or more.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms: Sequence[float] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
