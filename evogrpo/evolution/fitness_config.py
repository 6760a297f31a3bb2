"""How fitness is measured: on held-out questions, on what members earn while they train, or on both."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from evogrpo.config.checks import finite_number, flag, refuse_unknown, whole_between
from evogrpo.evolution.fitness import GREEDY, ROLLOUTS, SAMPLED

FitnessBy = Literal["validation", "rollouts", "both"]


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
            asked no more; see `evogrpo.evolution.racing`.
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
    def asks(self) -> bool:
        """Whether members are asked validation questions."""
        return self.by != ROLLOUTS

    @property
    def asking(self) -> str:
        """The name of what held-out questions measure: one of `MEASURES`."""
        return SAMPLED if self.sampled else GREEDY

    @property
    def selecting(self) -> str:
        """The name of what selection goes by: one of `MEASURES`."""
        return self.asking if self.by == "validation" else ROLLOUTS

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


GREEDILY = FitnessConfig(racing=False)
"""Everybody answers every validation question greedily."""
