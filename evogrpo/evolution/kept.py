"""States that a run keeps, so that a member can go back to one later."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from evogrpo.config.checks import declared_fields
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import MemberRecord

KeptKey = tuple[int, int]
"""Names a kept state: whose it is, by index, and after which generation. A member is evaluated once a generation."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What strategies see of a learner state that was kept, as it was when it earned its fitness.

    Attributes:
        member: Whose it is, with the hyperparameters that it learnt with.
        generation: After which generation's evaluation it was kept.
        fitness: What it earned then.
    """

    member: MemberRecord
    generation: int
    fitness: Fitness

    @property
    def key(self) -> KeptKey:
        """Its name."""
        return self.member.index, self.generation

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        fitness = self.fitness.to_json()
        return {"member": self.member.to_json(), "generation": self.generation, "fitness": fitness}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        made = {"member": MemberRecord.from_json(values["member"]), "fitness": Fitness.from_json(values["fitness"])}
        return cls(**declared_fields(cls, {**values, **made}))
