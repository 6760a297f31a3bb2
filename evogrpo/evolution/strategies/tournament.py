"""The tournament: whom a challenger beats beyond the noise gets a mutated clone of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evogrpo.evolution.backtracking import backtracked
from evogrpo.evolution.distinct import Draw
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.perturbation import proposals
from evogrpo.evolution.plans import Plan, parent_of
from evogrpo.evolution.selection import Choice, best_slot, tournament
from evogrpo.evolution.strategies.strategy import Stateless
from evogrpo.hyperparameters import answering, finite_number, whole_between


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
        backtrack: Whether members that have collapsed go back to the best state of their line, which is kept for that,
            the best of the generation included; see `evogrpo.evolution.backtracking`.

    Raises:
        ValueError: If a setting is out of range, or elitism is off without a mutation.
    """

    size: int = 2
    elitism: bool = True
    z: float = 1.0
    mutation: Mutation | None = field(default_factory=Mutation)
    backtrack: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole_between("size", self.size, 1, 100_000))
        object.__setattr__(self, "z", finite_number("z", self.z))
        if self.z < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        if not isinstance(self.elitism, bool):
            raise ValueError(f"elitism must be True or False, got {self.elitism!r}")
        if not isinstance(self.backtrack, bool):
            raise ValueError(f"backtrack must be True or False, got {self.backtrack!r}")
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
        elite = best_slot(last.fitness, last.ranked or None)
        choices = list(tournament(last.fitness, self.size, self.z, rng, empty=last.empty, names=last.indices))
        if not self.elitism:
            choices[elite] = Choice(parent=elite, reason="mutated: the best, without elitism")
        states = backtracked(history, choices, allowed=self.backtrack)
        draws: dict[int, Draw] = {}
        for slot, choice in enumerate(states.choices):
            parent = parent_of(history, choice)
            renewed = choice.parent != slot or (slot == elite and not self.elitism)
            if self.mutation is not None and parent is not None and renewed:
                draws[slot] = proposals(self.mutation, history, parent, space)
        return Plan.from_choices(history, states.choices, draws, rng=rng, keep=states.keep, drop=states.drop)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        mutation = None if self.mutation is None else self.mutation.to_json()
        return {
            "size": self.size,
            "elitism": self.elitism,
            "z": self.z,
            "mutation": mutation,
            "backtrack": self.backtrack,
        }
