"""The finalists of a run on a second set of questions, which selection never saw."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from evogrpo.history.checked_fields import JournalFields
from evogrpo.history.estimates import Estimate, EvaluationCost


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """One of the best members, as it was after a generation.

    Attributes:
        index: Who it was.
        generation: When.
        chosen: What it earned when it was chosen: the best of many, so it is likely to be too high.
        second: What it earned on the second set.
    """

    index: int
    generation: int
    chosen: Estimate
    second: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        estimates = {"chosen": self.chosen.to_json(), "second": self.second.to_json()}
        return {"index": self.index, "generation": self.generation, **estimates}

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read what `to_json` returned."""
        return cls(
            index=fields.whole("index"),
            generation=fields.whole("generation"),
            chosen=Estimate.from_json(fields.inner("chosen")),
            second=Estimate.from_json(fields.inner("second")),
        )


@dataclass(frozen=True, kw_only=True)
class FinalsReport:
    """The finalists on the second set, and who is the run's best.

    Attributes:
        questions: How many the second set has.
        index: Whose state is the run's best.
        generation: As it was after which generation.
        finalists: All of them.
        measure: How the answers were given, "greedy" or "sampled".
        cost: What they took.
    """

    event: ClassVar[str] = "finals"

    questions: int
    index: int
    generation: int
    finalists: tuple[Finalist, ...]
    measure: str
    cost: EvaluationCost

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        nested = {"finalists": [each.to_json() for each in self.finalists], "cost": self.cost.to_json()}
        return {**vars(self), **nested}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned; raises ValueError for a value that is not what it must be."""
        fields = JournalFields(values, "the finals event")
        return cls(
            questions=fields.whole("questions"),
            index=fields.whole("index"),
            generation=fields.whole("generation"),
            finalists=tuple(Finalist.from_json(each) for each in fields.each("finalists", "a finalist")),
            measure=fields.text("measure"),
            cost=EvaluationCost.from_json(fields.inner("cost")),
        )
