"""History of a run: what strategies plan from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from evogrpo.config.checks import declared_fields
from evogrpo.config.search_space import HyperparameterConfig
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


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One slot in one generation.

    Attributes:
        member: Who lived there; None where nobody did.
        fitness: What the member earned, question by question: what selection goes by; None if it failed.
        tokens: Tokens (or environment steps) it processed in this generation, updates included, evaluations left out.
        seconds: Its share of the generation's time, by tokens; likewise.
        measured: What it earned as measured in other ways, by their names in `evogrpo.evolution.fitness.MEASURES`.
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
            raise ValueError("a slot without a member has no fitness, got one: leave it out")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {
            "member": None if self.member is None else self.member.to_json(),
            "scores": None if self.fitness is None else self.fitness.to_json(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "measured": {name: fitness.to_json() for name, fitness in self.measured.items()},
            "evaluation_tokens": self.evaluation_tokens,
            "evaluation_seconds": self.evaluation_seconds,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        member, scores = values["member"], values["scores"]
        plain = {name: value for name, value in values.items() if name not in ("member", "scores", "measured")}
        made = {
            "member": None if member is None else MemberRecord.from_json(member),
            "fitness": None if scores is None else Fitness.from_json(scores),
            "measured": {name: Fitness.from_json(each) for name, each in values["measured"].items()},
        }
        return cls(**declared_fields(cls, {**plain, **made}))


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation, as it was evaluated.

    Attributes:
        number: From 1.
        samples_per_step: Samples each member collected per learning step.
        steps_per_generation: Learning steps that were planned for it; a limit of the run may have ended it earlier.
        seats: One for each slot of the bank.

    Raises:
        ValueError: If a member stands at another slot than its own.
    """

    number: int
    samples_per_step: int
    steps_per_generation: int
    seats: tuple[Seat, ...]

    def __post_init__(self) -> None:
        slots = {place: seat.member.slot for place, seat in enumerate(self.seats) if seat.member is not None}
        if any(place != slot for place, slot in slots.items()):
            raise ValueError(f"members must come in slot order, got slots {list(slots.values())} at {list(slots)}")

    @property
    def fitness(self) -> tuple[Fitness | None, ...]:
        """One entry per slot; None where the member failed or nobody lived."""
        return tuple(seat.fitness for seat in self.seats)

    @property
    def empty(self) -> tuple[int, ...]:
        """The slots where nobody lived."""
        return tuple(slot for slot, seat in enumerate(self.seats) if seat.member is None)

    @property
    def failed(self) -> tuple[int, ...]:
        """The slots of members that failed: none of them can be kept or copied."""
        return tuple(slot for slot, seat in enumerate(self.seats) if seat.member is not None and seat.fitness is None)

    @property
    def ranked(self) -> tuple[int, ...]:
        """The slots of members that did not fail, the best first; of equal ones the lowest index, the older, first."""
        healthy = ((seat.fitness, seat.member) for seat in self.seats)
        best_first = sorted((-earned.mean, who.index, who.slot) for earned, who in healthy if earned and who)
        return tuple(slot for _, _, slot in best_first)

    @property
    def indices(self) -> tuple[int, ...]:
        """For each slot the index of its member, by which draws are named; for an empty one a number below 0."""
        return tuple(-1 - slot if seat.member is None else seat.member.index for slot, seat in enumerate(self.seats))

    def member(self, slot: int) -> MemberRecord:
        """Return who lived in a slot.

        Raises:
            ValueError: If nobody did.
        """
        member = self.seats[slot].member
        if member is None:
            raise ValueError(f"slot {slot} held nobody in generation {self.number}, so nothing can be copied from it")
        return member

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**vars(self), "seats": [seat.to_json() for seat in self.seats]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        return cls(**{**values, "seats": tuple(Seat.from_json(seat) for seat in values["seats"])})


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything up to the generation that has just been evaluated.

    Attributes:
        space: What evolves.
        next_index: The first index no member ever had; children take this one and those after it.
        generations: The oldest first, the one to plan from last.
        kept: The states that are kept, in the order in which they were: a plan may let children begin with them. Never
            more than there are slots.

    Raises:
        ValueError: If there is no generation, generations do not follow each other or contradict `next_index`, or a
            state is kept twice.
    """

    space: HyperparameterConfig
    next_index: int
    generations: tuple[Generation, ...]
    kept: tuple[Kept, ...] = ()

    def __post_init__(self) -> None:
        if not self.generations:
            raise ValueError("a history must hold the generation to plan from, got none")
        for before, after in pairwise(self.generations):
            if after.number != before.number + 1 or len(after.seats) != len(before.seats):
                raise ValueError(
                    "generations must follow each other with equally many slots, got "
                    f"{after.number} of {len(after.seats)} after {before.number} of {len(before.seats)}"
                )
        indices = [seat.member.index for seat in self.last.seats if seat.member is not None]
        if any(index >= self.next_index for index in indices):
            raise ValueError(f"next_index must exceed every index in use, got {self.next_index} for {indices}")
        keys = [kept.key for kept in self.kept]
        if len(set(keys)) < len(keys):
            raise ValueError(f"a state is kept once, got members and generations {keys}")

    @property
    def last(self) -> Generation:
        """The generation that has just been evaluated."""
        return self.generations[-1]

    @property
    def capacity(self) -> int:
        """Slots of the bank, those that hold nobody included."""
        return len(self.last.seats)

    def find_kept(self, key: KeptKey) -> Kept:
        """Return a kept state.

        Raises:
            ValueError: If no such state is kept.
        """
        for kept in self.kept:
            if kept.key == key:
                return kept
        states = ", ".join(
            f"#{index} after generation {generation}" for index, generation in (kept.key for kept in self.kept)
        )
        raise ValueError(
            f"no state of #{key[0]} after generation {key[1]} is kept, only {states or 'nobody at all'}: a plan goes "
            "back to what an earlier plan said to keep"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {
            "space": self.space.to_json(),
            "next_index": self.next_index,
            "generations": [generation.to_json() for generation in self.generations],
            "kept": [kept.to_json() for kept in self.kept],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        return cls(
            space=HyperparameterConfig.from_json(values["space"]),
            next_index=values["next_index"],
            generations=tuple(Generation.from_json(each) for each in values["generations"]),
            kept=tuple(Kept.from_json(each) for each in values["kept"]),
        )
