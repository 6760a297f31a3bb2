"""Mutation without selection: how much of a result is changing hyperparameters at all."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.perturbation import Perturbation, checked_perturbation, perturbation_to_json, proposals
from evogrpo.evolution.plans import Plan
from evogrpo.evolution.selection import Choice, unselected
from evogrpo.evolution.strategies.strategy import Stateless


@dataclass(frozen=True, kw_only=True)
class MutationOnly(Stateless):
    """Mutate every member but the best in place, after every generation; nobody is copied.

    Only failed members are replaced, by mutated clones of healthy ones drawn at random.

    Attributes:
        mutation: How hyperparameters change.

    Raises:
        ValueError: If the mutation is none.
    """

    mutates = True

    mutation: Perturbation = field(default_factory=Mutation)

    def __post_init__(self) -> None:
        checked_perturbation(self.mutation)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Mutate whom there is; an empty slot stays empty."""
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        choices, draws = list(unselected(last, rng)), {}
        for slot, choice in enumerate(choices):
            if choice.parent is None:
                continue
            if slot == last.ranked[0]:
                choices[slot] = Choice(parent=slot, reason="kept: the best")
                continue
            if choice.parent == slot:
                choices[slot] = Choice(parent=slot, reason="mutated in place")
            draws[slot] = proposals(self.mutation, history, last.member(choice.parent), space)
        return Plan.from_choices(history, choices, draws, rng=rng)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"mutation": perturbation_to_json(self.mutation)}
