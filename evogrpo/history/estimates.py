"""A mean with its standard error, and what finding it out took."""

from dataclasses import dataclass
from typing import Any, Self

from evogrpo.evolution.fitness import MEASURES
from evogrpo.history.checked_fields import JournalFields
from evogrpo.text import score_text


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and how sure it is.

    Attributes:
        mean: Mean raw reward over questions or starts; higher is better.
        standard_error: Of that mean, in reward units.
    """

    mean: float
    standard_error: float

    def __str__(self) -> str:
        return score_text(self.mean, self.standard_error)

    def __repr__(self) -> str:
        return f"Estimate({score_text(self.mean, self.standard_error)})"

    def to_json(self) -> dict[str, float]:
        """Return plain JSON values."""
        return {"fitness": self.mean, "standard_error": self.standard_error}

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read what `to_json` returned."""
        return cls(mean=fields.number("fitness"), standard_error=fields.number("standard_error"))

    @classmethod
    def read_each(cls, fields: JournalFields, name: str) -> dict[str, Self]:
        """Read those that stand under a name, by how they were measured."""
        inner = fields.inner(name)
        return {measure: cls.from_json(inner.inner(measure)) for measure in MEASURES if measure in inner.values}


@dataclass(frozen=True, kw_only=True)
class EvaluationCost:
    """What evaluating took.

    Attributes:
        tokens: Tokens that were read and written, or steps in the environment.
        seconds: Wall-clock time.
    """

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "EvaluationCost") -> "EvaluationCost":
        return EvaluationCost(tokens=self.tokens + other.tokens, seconds=self.seconds + other.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read what `to_json` returned."""
        return cls(tokens=fields.whole("tokens"), seconds=fields.number("seconds"))
