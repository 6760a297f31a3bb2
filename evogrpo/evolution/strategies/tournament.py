"""Tournament selection with a test for noise: a significantly better challenger replaces a member."""

from dataclasses import dataclass, field

import numpy as np

from evogrpo.config.checks import finite_number, flag, names_unknown, whole_between
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation, Perturbation, check_perturbation
from evogrpo.evolution.plan import Choice, Plan
from evogrpo.evolution.selection import has_stagnated, tournament
from evogrpo.evolution.strategies.strategy import Stateless


@names_unknown
@dataclass(frozen=True, kw_only=True)
class Tournament(Stateless):
    """Replace each member that a challenger beats significantly by a mutated clone of the challenger.

    The challenger of a member is the best of `size` random members. It wins if the paired difference of their scores
    exceeds `z` standard errors. If no member improved significantly over a generation, all but the best are mutated in
    place, so that a population leaves hyperparameters with which no member learns.

    Attributes:
        size: Members per tournament, at least 1. More members select more strongly.
        elitism: Keep the best member unchanged. If False, it is replaced by a mutated clone of itself.
        z: Standard errors of the paired difference that a challenger must lead by; 0 accepts any lead.
        mutation: Maps the hyperparameters of a parent to those of a child: a `Mutation`, your own callable (see
            `evogrpo.evolution.Perturbation`), or None for exact clones, as in `SelectionOnly`.
        explore_when_stuck: Mutate all but the best in place if no member improved.

    Raises:
        ValueError: If a setting is out of range, or elitism is off without a mutation.
    """

    size: int = 2
    elitism: bool = True
    z: float = 1.0
    mutation: Perturbation | None = field(default_factory=Mutation)
    explore_when_stuck: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole_between("size", self.size, 1, 100_000))
        object.__setattr__(self, "z", finite_number("z", self.z))
        if self.z < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        for name in ("elitism", "explore_when_stuck"):
            flag(name, getattr(self, name))
        if self.mutation is not None:
            check_perturbation(self.mutation)
        if self.mutation is None and not self.elitism:
            raise ValueError("elitism=False needs a mutation, got mutation=None.")

    @property
    def mutates(self) -> bool:
        """True if children may differ from their parents."""
        return self.mutation is not None

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Hold one tournament per member; an empty slot stays empty."""
        choices = tournament(history.last, self.size, self.z, rng)
        best, *others = history.last.ranked
        if not self.elitism:
            choices[best] = Choice(parent=best, reason="mutated: the best, without elitism", mutate=True)
        if self.explore_when_stuck and self.mutation is not None and has_stagnated(history, self.z):
            for slot in others:
                if choices[slot].parent == slot:
                    choices[slot] = Choice(parent=slot, reason="mutated in place: no member improved", mutate=True)
        return Plan.from_choices(history, choices, mutation=self.mutation, rng=rng)
