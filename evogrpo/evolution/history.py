"""History of a run: its members and generations, as strategies see them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.fitness import Fitness
from evogrpo.validation import Real, Whole

NETWORK = "network"
"""Key of an architecture change among the changes of a birth; its old and new values are text."""

Changes = Mapping[str, tuple[Whole | Real | str | None, Whole | Real | str | None]]
"""Changed hyperparameters by name: (old value, new value)."""


def changes_between(
    before: Hyperparameters, after: Hyperparameters
) -> dict[str, tuple[Value, Value]]:
    """Return the differences of two records, by name: (old value, new value)."""
    changes = {}
    for name in {**before.by_name(), **after.by_name()}:
        old = before.get(name)
        new = after.get(name)
        if old != new:
            changes[name] = (old, new)
    return changes


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """One member at its birth: a train state that is copied into a slot under a new index.

    Attributes:
        slot: Storage place in the bank.
        index: Identity, never reused.
        parent: Index of the member whose train state it took; None for a founder.
        born: Generation whose plan created it, in the run of its birth; 0 for a first population.
        hyperparameters: Its hyperparameters.
        changes: Differences from its parent's hyperparameters, by name: (old, new).
        reason: Reason for its birth, as text.
        architecture: Its network architecture as plain JSON values; None = its parent's.
    """

    slot: Whole
    index: Whole
    parent: Whole | None
    born: Whole
    hyperparameters: Hyperparameters
    changes: Changes = field(default_factory=dict)
    reason: str = ""
    architecture: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ArchitectureChange:
    """A change of a member's network.

    Attributes:
        architecture: New architecture as plain JSON values, in the format of the members that
            proposed it.
        old: Old architecture as text.
        new: New architecture as text.
    """

    architecture: Mapping[str, Any]
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """One slot in one generation.

    Attributes:
        member: Member of the slot; None if the slot was empty.
        fitness: Fitness that selection uses, with scores per question; None if the member failed.
        tokens: Tokens (or environment steps) it processed in this generation, updates included,
            evaluations left out.
        seconds: Its share of the generation's time, by tokens, without evaluations.

    Raises:
        ValueError: If an empty slot has a fitness.
    """

    member: MemberRecord | None = None
    fitness: Fitness | None = None
    tokens: Whole = 0
    seconds: Real = 0.0

    def __post_init__(self) -> None:
        if self.member is None and self.fitness is not None:
            raise ValueError(
                "An empty slot must have no fitness. Set member, or leave fitness out."
            )


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation, as it was evaluated.

    Attributes:
        number: From 1.
        samples_per_step: Samples each member collected per learning step.
        steps_per_generation: Learning steps that were planned for it; a limit of the run may have
            ended it earlier.
        slots: One record for each slot of the bank.

    Raises:
        ValueError: If a member's slot differs from its position in `slots`.
    """

    number: Whole
    samples_per_step: Whole
    steps_per_generation: Whole
    slots: tuple[SlotRecord, ...]

    def __post_init__(self) -> None:
        for slot, record in enumerate(self.slots):
            if record.member is not None and record.member.slot != slot:
                raise ValueError(
                    f"slots[{slot}] must hold the member of slot {slot}, got slot"
                    f" {record.member.slot}."
                )

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
        return tuple(
            member.slot for member in self.members if self.slots[member.slot].fitness is None
        )

    @property
    def healthy(self) -> tuple[tuple[MemberRecord, Fitness], ...]:
        """Members that did not fail, with their fitness, the best first.

        Of equal members, the one with the lowest index comes first.

        Raises:
            ValueError: If all members failed.
        """
        healthy = [
            (record.member, record.fitness)
            for record in self.slots
            if record.member and record.fitness
        ]
        if not healthy:
            remedy = "Start a new run with a lower lr, max_grad_norm or temperature."
            raise ValueError(f"All members failed, so none can be cloned. {remedy}")

        def rank(pair: tuple[MemberRecord, Fitness]) -> tuple[float, int, int]:
            """Sort the fittest first; of equal members, the oldest."""
            member, fitness = pair
            return -fitness.mean, member.index, member.slot

        return tuple(sorted(healthy, key=rank))

    @property
    def ranked(self) -> tuple[int, ...]:
        """Slots of healthy members, the best first; see `healthy`."""
        return tuple(member.slot for member, _ in self.healthy)

    @property
    def indices(self) -> tuple[int, ...]:
        """Number of each slot for random streams: its member's index, or -1 - slot if empty."""
        numbers = []
        for slot, record in enumerate(self.slots):
            if record.member is None:
                numbers.append(-1 - slot)
            else:
                numbers.append(record.member.index)
        return tuple(numbers)

    def member(self, slot: int) -> MemberRecord:
        """Return the member of a slot.

        Raises:
            ValueError: If the slot was empty.
        """
        member = self.slots[slot].member
        if member is None:
            raise ValueError(f"Slot {slot} was empty in generation {self.number}.")
        return member


@dataclass(frozen=True, kw_only=True)
class History:
    """All generations of a run up to the one that has just been evaluated.

    Attributes:
        space: The search space.
        next_index: First unused index; children get this index and the following ones.
        generations: In order; the last one is to be planned from.

    Raises:
        ValueError: If there is no generation, or generations do not follow each other or contradict
            `next_index`.
    """

    space: HyperparameterConfig
    next_index: int
    generations: tuple[Generation, ...]

    def __post_init__(self) -> None:
        if not self.generations:
            raise ValueError("generations must hold at least one generation, got none.")
        for before, after in pairwise(self.generations):
            if after.number != before.number + 1:
                raise ValueError(
                    f"generations must be consecutive, got generation {after.number} after"
                    f" {before.number}."
                )
            if len(after.slots) != len(before.slots):
                raise ValueError(
                    f"generations must have equal numbers of slots, got {len(after.slots)} in"
                    f" generation {after.number} and {len(before.slots)} in the one before."
                )
        indices = [member.index for member in self.last.members]
        if any(index >= self.next_index for index in indices):
            raise ValueError(
                f"next_index must exceed every index in use, got {self.next_index} with {indices}."
            )

    @property
    def last(self) -> Generation:
        """The generation that has just been evaluated."""
        return self.generations[-1]

    @property
    def capacity(self) -> int:
        """Number of slots of the bank, including empty ones."""
        return len(self.last.slots)
