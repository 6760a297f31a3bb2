"""Strategies: from the members and their fitness to a plan of plain data, the next generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import Child, MemberRecord
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.selection import Choice, best_slot, healthy_slots, tournament
from evogrpo.hyperparameters import (
    HyperparameterConfig,
    finite_number,
    refuse_unknown,
    unknown_name_error,
    whole_number,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to every slot between two generations, as plain data.

    Attributes:
        generation: The generation whose fitness it was made from.
        parents: For each slot, the slot whose learner state it takes, its own if unchanged, or None for a fresh
            initialisation: the argument of `bank.inherit`.
        children: One birth for every slot whose member changes; the members of all other slots keep their index.
        reasons: Why, one for each slot.
        elite: The slot of the best member at this evaluation.

    Raises:
        ValueError: If the fields contradict each other.
    """

    generation: int
    parents: tuple[int | None, ...]
    children: tuple[Child, ...]
    reasons: tuple[str, ...]
    elite: int

    def __post_init__(self) -> None:
        slots = range(len(self.parents))
        born = [child.slot for child in self.children]
        if len(self.reasons) != len(slots):
            raise ValueError(f"a plan has one reason per slot, got {len(self.reasons)} for {len(slots)} slots")
        if any(slot is not None and slot not in slots for slot in (*self.parents, self.elite, *born)):
            raise ValueError(
                f"every slot must lie in 0..{len(slots) - 1}, got parents {self.parents}, elite {self.elite} "
                f"and children in {born}"
            )
        if len(set(born)) != len(born) or len({child.index for child in self.children}) != len(born):
            raise ValueError(
                f"children have slots and indices of their own, got {[(c.slot, c.index) for c in self.children]}"
            )
        unborn = [slot for slot in slots if self.parents[slot] != slot and slot not in born]
        if unborn:
            raise ValueError(f"a slot that takes another's state needs a child with a new index, missing in {unborn}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {
            "generation": self.generation,
            "parents": list(self.parents),
            "children": [child.to_json() for child in self.children],
            "reasons": list(self.reasons),
            "elite": self.elite,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        return cls(
            generation=values["generation"],
            parents=tuple(values["parents"]),
            children=tuple(Child.from_json(child) for child in values["children"]),
            reasons=tuple(values["reasons"]),
            elite=values["elite"],
        )


class Strategy(Protocol):
    """A rule of evolution. It holds settings only: what it decides depends on its arguments alone."""

    @property
    def mutates(self) -> bool:
        """Whether children may differ from their parents; asked only where networks evolve."""
        ...

    def plan(
        self,
        members: Sequence[MemberRecord],
        fitness: Sequence[Fitness | None],
        space: HyperparameterConfig,
        *,
        next_index: int,
        generation: int,
        rng: np.random.Generator,
        samples_per_step: int,
    ) -> Plan:
        """Decide what every slot holds next.

        Args:
            members: One record per slot, in slot order.
            fitness: One entry per slot; None for a failed member, which is always replaced by a healthy clone.
            space: What evolves.
            next_index: The first index no member ever had; children take this one and those after it.
            generation: The number of the generation just evaluated.
            rng: The generator of every draw of this plan.
            samples_per_step: Samples each member collects per learning step; proposed group sizes divide it.

        Returns:
            The plan. It does not depend on anything but the arguments.

        Raises:
            ValueError: If every member failed, or the arguments contradict each other.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values; `strategy_from_json` reads them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tournament:
    """Replace members that a challenger beats beyond the noise by a mutated clone of it; keep everyone else.

    With `mutation=None` it selects without changing hyperparameters: the control that shows how much of a result
    is selection among seeds alone.

    Attributes:
        size: Contestants of a tournament, at least 1; more select harder.
        elitism: Whether the best member stays untouched. If not, it is replaced by a mutated clone of itself.
        z: How many standard errors of the paired difference a challenger must be ahead; 0 turns this off.
        mutation: How children differ from their parents, or None for exact clones.

    Raises:
        ValueError: If a setting is out of range, or elitism is off without a mutation.
    """

    size: int = 2
    elitism: bool = True
    z: float = 1.0
    mutation: Mutation | None = field(default_factory=Mutation)

    def __post_init__(self) -> None:
        if whole_number("size", self.size) < 1:
            raise ValueError(f"a tournament needs at least 1 contestant, got size={self.size}")
        if finite_number("z", self.z) < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        if not isinstance(self.elitism, bool):
            raise ValueError(f"elitism must be True or False, got {self.elitism!r}")
        if self.mutation is not None and not isinstance(self.mutation, Mutation):
            raise ValueError(f"mutation must be a Mutation or None, got {self.mutation!r}")
        if self.mutation is None and not self.elitism:
            raise ValueError("elitism=False mutates the best member and mutation=None never mutates: set one of them")

    @property
    def mutates(self) -> bool:
        """Whether children differ from their parents."""
        return self.mutation is not None

    def plan(
        self,
        members: Sequence[MemberRecord],
        fitness: Sequence[Fitness | None],
        space: HyperparameterConfig,
        *,
        next_index: int,
        generation: int,
        rng: np.random.Generator,
        samples_per_step: int,
    ) -> Plan:
        """Hold one tournament per slot; see `Strategy.plan` for the arguments."""
        _check_members(members, fitness, next_index)
        space = space.for_samples_per_step(samples_per_step)
        elite = best_slot(fitness)
        choices = list(tournament(fitness, self.size, self.z, rng))
        renewed = set() if self.elitism else {elite}
        if renewed:
            choices[elite] = Choice(parent=elite, reason="mutated: the best, without elitism")
        return _plan(members, choices, renewed, self.mutation, space, elite, next_index, generation, rng)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        mutation = None if self.mutation is None else self.mutation.to_json()
        return {"name": "tournament", "size": self.size, "elitism": self.elitism, "z": self.z, "mutation": mutation}


@dataclass(frozen=True, kw_only=True)
class NoEvolution:
    """Train every member apart: no selection and no mutation, the control for both.

    Only failed members are replaced, by exact clones of healthy members drawn at random.
    """

    mutates = False

    def plan(
        self,
        members: Sequence[MemberRecord],
        fitness: Sequence[Fitness | None],
        space: HyperparameterConfig,
        *,
        next_index: int,
        generation: int,
        rng: np.random.Generator,
        samples_per_step: int,
    ) -> Plan:
        """Keep every healthy member; see `Strategy.plan` for the arguments."""
        _check_members(members, fitness, next_index)
        # A space that evolution would refuse is refused here too: an arm and its control take the same settings.
        space = space.for_samples_per_step(samples_per_step)
        healthy = healthy_slots(fitness)
        choices = []
        for slot, value in enumerate(fitness):
            if value is not None:
                choices.append(Choice(parent=slot, reason="kept: no evolution"))
            else:
                parent = int(rng.choice(healthy))
                choices.append(Choice(parent=parent, reason=f"replaced by slot {parent}: failed"))
        return _plan(members, choices, set(), None, space, best_slot(fitness), next_index, generation, rng)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"name": "no_evolution"}


def strategy_from_json(values: Mapping[str, Any]) -> Strategy:
    """Build a strategy from what its `to_json` returned; settings left out take their defaults.

    Raises:
        ValueError: If the name or a setting is unknown or refused.
    """
    settings = {key: value for key, value in values.items() if key != "name"}
    match values.get("name"):
        case "tournament":
            refuse_unknown("setting of tournament", settings, ["size", "elitism", "z", "mutation"])
            if isinstance(settings.get("mutation"), Mapping):
                settings["mutation"] = Mutation.from_json(settings["mutation"])
            return Tournament(**settings)
        case "no_evolution":
            refuse_unknown("setting of no_evolution", settings, [])
            return NoEvolution()
        case name:
            raise unknown_name_error("strategy", name, ["tournament", "no_evolution"])


def _check_members(members: Sequence[MemberRecord], fitness: Sequence[Fitness | None], next_index: int) -> None:
    if len(members) != len(fitness):
        raise ValueError(f"every member has one fitness entry, got {len(members)} members and {len(fitness)} entries")
    if [member.slot for member in members] != list(range(len(members))):
        raise ValueError(f"members must come in slot order, got slots {[member.slot for member in members]}")
    if any(member.index >= next_index for member in members):
        raise ValueError(
            f"next_index must exceed every index in use, got {next_index} for {[member.index for member in members]}"
        )


def _plan(
    members: Sequence[MemberRecord],
    choices: Sequence[Choice],
    renewed: set[int],
    mutation: Mutation | None,
    space: HyperparameterConfig,
    elite: int,
    next_index: int,
    generation: int,
    rng: np.random.Generator,
) -> Plan:
    """Turn the choices into a plan: a child in every slot that takes another's state or is in `renewed`."""
    children: list[Child] = []
    for slot, choice in enumerate(choices):
        if choice.parent == slot and slot not in renewed:
            continue
        parent = members[choice.parent]
        hyperparameters, changes = (
            (parent.hyperparameters, {}) if mutation is None else mutation(parent.hyperparameters, space, rng)
        )
        children.append(
            Child(
                slot=slot,
                index=next_index + len(children),
                parent=parent.index,
                hyperparameters=hyperparameters,
                changes=changes,
                reason=choice.reason,
            )
        )
    return Plan(
        generation=generation,
        parents=tuple(choice.parent for choice in choices),
        children=tuple(children),
        reasons=tuple(choice.reason for choice in choices),
        elite=elite,
    )
