"""Tournament selection: a significantly better challenger replaces a member."""

from dataclasses import field
from typing import Annotated

import numpy as np
from pydantic import Field

from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import CheckedPerturbation, Mutation
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.evolution.selection import has_stagnated, tournament
from evogrpo.validation import WHOLE, Flag, NonNegativeFloat, settings


@settings
class Tournament(Stateless):
    """Replace each member that a challenger beats significantly by the challenger's mutated clone.

    The challenger of a member is the best of `size` random members. It wins if the paired
    difference of their scores exceeds `z` standard errors. If no member improved significantly over
    a generation, all but the best are mutated in place, so that a population leaves hyperparameters
    with which no member learns. Improvement is tested with fitness by "validation" only, where
    generations answer the same questions.

    Attributes:
        size: Members per tournament, at least 1. More members select more strongly.
        elitism: Keep the best member unchanged. If False, it is replaced by a mutated clone of
            itself.
        z: Standard errors of the paired difference that a challenger must lead by; 0 accepts any
            lead.
        mutation: Maps the hyperparameters of a parent to those of a child: a `Mutation`, your own
            callable (see `evogrpo.evolution.Perturbation`), or None for exact clones, as in
            `SelectionOnly`.
        explore_when_stuck: Mutate all but the best in place if no member improved. No effect unless
            fitness is by "validation".

    Raises:
        ValueError: If a setting is out of range, or elitism is off without a mutation.
    """

    size: Annotated[int, Field(ge=1, le=100_000), WHOLE] = 2
    elitism: Flag = True
    z: NonNegativeFloat = 1.0
    mutation: CheckedPerturbation | None = field(default_factory=Mutation)
    explore_when_stuck: Flag = True

    def __post_init__(self) -> None:
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
            choices[best] = Choice(
                parent=best, reason="mutated: the best, without elitism", mutate=True
            )
        if self.explore_when_stuck and self.mutation is not None and has_stagnated(history, self.z):
            for slot in others:
                if choices[slot].parent == slot:
                    choices[slot] = Choice(
                        parent=slot, reason="mutated in place: no member improved", mutate=True
                    )
        return Plan.from_choices(history, choices, mutation=self.mutation, rng=rng)
