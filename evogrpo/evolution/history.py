"""History of a run: the input of strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from evogrpo.config.checks import declared_fields
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import MemberRecord


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """One slot in one generation.

    Attributes:
        member: Member of the slot; None if the slot was empty.
        fitness: Fitness that selection uses, with scores per question; None if the member failed.
        tokens: Tokens (or environment steps) it processed in this generation, updates included, evaluations left out.
        seconds: Its share of the generation's time, by tokens, without evaluations.
        measured: Fitness by other measures, by their names in `evogrpo.evolution.fitness.MEASURES`.
        evaluation_tokens: Tokens (or environment steps) that its evaluation took.
        evaluation_seconds: Its share of the time that the evaluation took.

    Raises:
        ValueError: If an empty slot has a fitness.
    """

    member: MemberRecord | None = None
    fitness: Fitness | None = None
    tokens: int = 0
    seconds: float = 0.0
    measured: Mapping[str, Fitness] = field(default_factory=dict)
    evaluation_tokens: int = 0
    evaluation_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.member is None and self.fitness is not None:
            raise ValueError("An empty slot must have no fitness. Set member, or leave fitness out.")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation, as it was evaluated.

    Attributes:
        number: From 1.
        samples_per_step: Samples each member collected per learning step.
        steps_per_generation: Learning steps that were planned for it; a limit of the run may have ended it earlier.
        slots: One for each slot of the bank.

    Raises:
        ValueError: If a member's slot differs from its position in `slots`.
    """

    number: int
    samples_per_step: int
    steps_per_generation: int
    slots: tuple[SlotRecord, ...]

    def __post_init__(self) -> None:
        for place, record in enumerate(self.slots):
            if record.member is not None and record.member.slot != place:
                slot = record.member.slot
                raise ValueError(f"slots[{place}] must hold the member of slot {place}, got the member of slot {slot}.")

    @property
    def members(self) -> tuple[MemberRecord, ...]:
        """Living members, in slot order."""
        return tuple(record.member for record in self.slots if record.member is not None)

    @property
    def fitness(self) -> tuple[Fitness | None, ...]:
        """One entry per slot; None for failed members and empty slots."""
        return tuple(record.fitness for record in self.slots)

    @property
    def empty(self) -> tuple[int, ...]:
        """Empty slots."""
        return tuple(slot for slot, record in enumerate(self.slots) if record.member is None)

    @property
    def failed(self) -> tuple[int, ...]:
        """Slots of failed members; none of them can be kept or cloned."""
        return tuple(member.slot for member in self.members if self.slots[member.slot].fitness is None)

    @property
    def ranked(self) -> tuple[int, ...]:
        """Slots of healthy members, the best first; of equal ones the lowest index first."""
        healthy = ((record.fitness, record.member) for record in self.slots)
        best_first = sorted((-earned.mean, who.index, who.slot) for earned, who in healthy if earned and who)
        return tuple(slot for _, _, slot in best_first)

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of the member of each slot, which names random streams; a negative number for empty slots."""
        members = (record.member for record in self.slots)
        return tuple(-1 - slot if member is None else member.index for slot, member in enumerate(members))

    def member(self, slot: int) -> MemberRecord:
        """Return the member of a slot.

        Raises:
            ValueError: If the slot was empty.
        """
        member = self.slots[slot].member
        if member is None:
            raise ValueError(f"Slot {slot} was empty in generation {self.number}. Choose one of {self.ranked}.")
        return member

    @classmethod
    def from_event(cls, event: Mapping[str, Any], *, slots: int, measure: str) -> Self:
        """Build from a generation event of the journal.

        Args:
            event: The event; every member has its scores by measure.
            slots: Number of slots of the bank.
            measure: Measure that selection uses; see `evogrpo.evolution.fitness.MEASURES`.
        """
        records = [SlotRecord()] * slots
        for values in event["members"]:
            member = MemberRecord.from_json({name: values[name] for name in MemberRecord.__dataclass_fields__})
            scores = {name: Fitness.from_json(each) for name, each in values["scores"].items()}
            fitness, evaluation = scores.pop(measure, None), values["evaluation"]
            fields = {
                "member": member,
                "fitness": fitness,
                "tokens": values["tokens"],
                "seconds": values["seconds"],
                "measured": scores,
                "evaluation_tokens": evaluation["tokens"],
                "evaluation_seconds": evaluation["seconds"],
            }
            records[member.slot] = SlotRecord(**declared_fields(SlotRecord, fields))
        fields = {
            "number": event["generation"],
            "samples_per_step": event["samples_per_step"],
            "steps_per_generation": event["steps_per_generation"],
            "slots": tuple(records),
        }
        return cls(**declared_fields(cls, fields))


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything up to the generation that has just been evaluated.

    Attributes:
        space: The search space.
        next_index: First unused index; children take this one and those after it.
        generations: All generations, the one to plan from last.

    Raises:
        ValueError: If there is no generation, or generations do not follow each other or contradict `next_index`.
    """

    space: HyperparameterConfig
    next_index: int
    generations: tuple[Generation, ...]

    def __post_init__(self) -> None:
        if not self.generations:
            raise ValueError("generations must hold at least one generation, got none.")
        for before, after in pairwise(self.generations):
            if after.number != before.number + 1 or len(after.slots) != len(before.slots):
                raise ValueError(
                    "generations must be consecutive, with equal numbers of slots, got generation "
                    f"{after.number} with {len(after.slots)} after {before.number} with {len(before.slots)}."
                )
        indices = [member.index for member in self.last.members]
        if any(index >= self.next_index for index in indices):
            raise ValueError(f"next_index must exceed every index in use, got {self.next_index} with {indices}.")

    @property
    def last(self) -> Generation:
        """The generation that has just been evaluated."""
        return self.generations[-1]

    @property
    def capacity(self) -> int:
        """Number of slots of the bank, including empty ones."""
        return len(self.last.slots)
