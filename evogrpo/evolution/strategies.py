"""Strategies: from the history of a run to a plan of plain data, the next generation."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.plans import Plan
from evogrpo.evolution.selection import Choice, best_slot, healthy_slots, tournament
from evogrpo.hyperparameters import answering, finite_number, refuse_unknown, unknown_name_error, whole_between


class Strategy(Protocol):
    """A rule of evolution: settings, the arguments of its class, and perhaps a state that plans change.

    One that remembers nothing inherits from `Stateless`.
    """

    @property
    def mutates(self) -> bool:
        """Whether children may differ from their parents; asked only where networks evolve."""
        ...

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Decide what every slot holds next, and what the next generations spend.

        A failed member is never kept: it is replaced by a healthy one's child, or retired.

        Args:
            history: Every generation up to the one just evaluated.
            rng: The generator of this plan's draws, named by the run's seed and the generation.

        Returns:
            The plan, such as `Plan.from_choices` makes. It depends on the arguments, the settings and the state alone.

        Raises:
            ValueError: If every member failed.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: keyword arguments with which the class builds an equal strategy."""
        ...

    def state(self) -> dict[str, Any]:
        """Return as plain JSON values all that earlier plans have left behind and later ones depend on."""
        ...

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Put back what `state` returned, read from JSON: from here on plans are those that would have followed."""
        ...


class Stateless:
    """What a strategy inherits that remembers nothing from one plan to the next."""

    def state(self) -> dict[str, Any]:
        """Return the empty state."""
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Take the empty state.

        Raises:
            ValueError: If it is not empty.
        """
        if values:
            raise ValueError(
                f"{type(self).__name__} remembers nothing, got a state with {', '.join(values)}: another strategy's"
            )


@answering
@dataclass(frozen=True, kw_only=True)
class Tournament(Stateless):
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
        object.__setattr__(self, "size", whole_between("size", self.size, 1, 100_000))
        object.__setattr__(self, "z", finite_number("z", self.z))
        if self.z < 0:
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

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Hold one tournament per member; an empty slot stays empty."""
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        elite = best_slot(last.fitness)
        choices = list(tournament(last.fitness, self.size, self.z, rng, empty=last.empty))
        if not self.elitism:
            choices[elite] = Choice(parent=elite, reason="mutated: the best, without elitism")
        mutated = {}
        for slot, choice in enumerate(choices):
            renewed = choice.parent != slot or (slot == elite and not self.elitism)
            if self.mutation is not None and choice.parent is not None and renewed:
                mutated[slot], _ = self.mutation(last.member(choice.parent).hyperparameters, space, rng)
        return Plan.from_choices(history, choices, mutated)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        mutation = None if self.mutation is None else self.mutation.to_json()
        return {"size": self.size, "elitism": self.elitism, "z": self.z, "mutation": mutation}


@answering
@dataclass(frozen=True, kw_only=True)
class NoEvolution(Stateless):
    """Train every member apart: no selection and no mutation, the control for both.

    Only failed members are replaced, by exact clones of healthy members drawn at random.
    """

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Keep every healthy member; an empty slot stays empty."""
        last = history.last
        # A space that evolution would refuse is refused here too: an arm and its control take the same settings.
        history.space.for_samples_per_step(last.samples_per_step)
        healthy, empty = healthy_slots(last.fitness), last.empty
        choices = []
        for slot, value in enumerate(last.fitness):
            if slot in empty:
                choices.append(Choice(parent=None, reason="empty"))
            elif value is not None:
                choices.append(Choice(parent=slot, reason="kept: no evolution"))
            else:
                parent = int(rng.choice(healthy))
                choices.append(Choice(parent=parent, reason=f"replaced by slot {parent}: failed"))
        return Plan.from_choices(history, choices)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: there are none."""
        return {}


BUILT_IN: Mapping[str, type[Tournament] | type[NoEvolution]] = {"tournament": Tournament, "no_evolution": NoEvolution}
"""The strategies of this package by name."""


def strategy_from_json(values: Mapping[str, Any], own: Callable[..., Strategy] | None = None) -> Strategy:
    """Build a strategy from its name and its settings; settings left out take their defaults.

    Args:
        values: The settings, as `Strategy.to_json` returns them, and "name".
        own: The class to build where the name is not of `BUILT_IN`. Names are never imported here: a file that says
            one may come from anybody.

    Raises:
        ValueError: If the name or a setting is unknown, missing or refused.
    """
    name, settings = values.get("name"), {key: value for key, value in values.items() if key != "name"}
    kind = BUILT_IN.get(name, own) if isinstance(name, str) else own
    if kind is None:
        raise unknown_name_error("strategy", name, BUILT_IN)
    if isinstance(kind, type) and issubclass(kind, Tournament) and isinstance(settings.get("mutation"), Mapping):
        settings["mutation"] = Mutation.from_json(settings["mutation"])
    accepted = inspect.signature(kind)
    refuse_unknown(f"setting of {name}", settings, accepted.parameters)
    try:
        accepted.bind(**settings)
    except TypeError as error:
        raise ValueError(f"the settings of {name} are not complete: {error}") from error
    return kind(**settings)
