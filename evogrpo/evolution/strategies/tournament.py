"""The tournament: whom a challenger beats beyond the noise gets a mutated clone of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evogrpo.config.checks import finite_number, flag, names_unknown, whole_between
from evogrpo.evolution.backtracking import apply_backtracking
from evogrpo.evolution.children import Perturbation, Proposal, checked_perturbation, perturbation_to_json, proposals
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.plan import Plan, parent_of
from evogrpo.evolution.selection import Choice, best_slot, has_stagnated, tournament
from evogrpo.evolution.strategies.strategy import Stateless


@names_unknown
@dataclass(frozen=True, kw_only=True)
class Tournament(Stateless):
    """Replace members that a challenger beats beyond the noise by a mutated clone of it; keep everyone else.

    Where nobody got better over a generation beyond the noise, there is nothing to select and nothing to lose: then all
    but the best are mutated in place, each on its own line, until somebody finds a way on. That is how a population
    leaves hyperparameters with which nobody learns.

    Attributes:
        size: Contestants of a tournament, at least 1; more select harder.
        elitism: Whether the best member stays untouched. If not, it is replaced by a mutated clone of itself.
        z: How many standard errors of the paired difference a challenger must be ahead; 0 turns this off.
        mutation: How children differ from their parents: a `Mutation`, a function or an object of your own (see
            `evogrpo.evolution.Perturbation`), or None for exact clones, as in `SelectionOnly`.
        backtrack: Whether members that have collapsed go back to the best state of their line, which is kept for that,
            the best of the generation included; see `evogrpo.evolution.backtracking`.
        explore_when_stuck: Whether all but the best are mutated in place where nobody got better.

    Raises:
        ValueError: If a setting is out of range, or elitism is off without a mutation.
    """

    size: int = 2
    elitism: bool = True
    z: float = 1.0
    mutation: Perturbation | None = field(default_factory=Mutation)
    backtrack: bool = False
    explore_when_stuck: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole_between("size", self.size, 1, 100_000))
        object.__setattr__(self, "z", finite_number("z", self.z))
        if self.z < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        for name in ("elitism", "backtrack", "explore_when_stuck"):
            flag(name, getattr(self, name))
        if self.mutation is not None:
            checked_perturbation(self.mutation)
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
        elite = best_slot(last.fitness, last.ranked or None)
        choices = list(tournament(last.fitness, self.size, self.z, rng, empty=last.empty, names=last.indices))
        if not self.elitism:
            choices[elite] = Choice(parent=elite, reason="mutated: the best, without elitism")
        if self.explore_when_stuck and self.mutation is not None and has_stagnated(history, self.z):
            for slot in last.ranked[1:]:
                if choices[slot].parent == slot:
                    choices[slot] = Choice(parent=slot, reason="mutated in place: nobody got better")
        states = apply_backtracking(history, choices, allowed=self.backtrack)
        draws: dict[int, Proposal] = {}
        for slot, choice in enumerate(states.choices):
            parent = parent_of(history, choice)
            renewed = choice.parent != slot or choice.reason.startswith("mutated")
            if self.mutation is not None and parent is not None and renewed:
                draws[slot] = proposals(self.mutation, history, parent, space)
        return Plan.from_choices(history, states.choices, draws, rng=rng, keep=states.keep, drop=states.drop)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "size": self.size,
            "elitism": self.elitism,
            "z": self.z,
            "mutation": perturbation_to_json(self.mutation),
            "backtrack": self.backtrack,
            "explore_when_stuck": self.explore_when_stuck,
        }
