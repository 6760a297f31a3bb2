"""Baselines that evolution is compared with: one part of it alone, or none."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from evogrpo.evolution.children import Perturbation, checked_perturbation, perturbation_to_json, proposals
from evogrpo.evolution.founders import random_founder
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.selection import Choice, no_selection
from evogrpo.evolution.strategies.strategy import Stateless
from evogrpo.evolution.strategies.tournament import Tournament


@dataclass(frozen=True, kw_only=True)
class Fixed(Stateless):
    """Train every member apart: no selection and no mutation, the control for both.

    Only failed members are replaced, by exact clones of healthy members drawn at random.
    """

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Keep every healthy member; an empty slot stays empty."""
        last = history.last
        # A space that evolution would refuse is refused here too: an arm and its control take the same settings.
        history.space.for_samples_per_step(last.samples_per_step)
        return Plan.from_choices(history, no_selection(last, rng))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: there are none."""
        return {}


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
        choices, draws = list(no_selection(last, rng)), {}
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


@dataclass(frozen=True, kw_only=True)
class RandomSearch(Stateless):
    """Change nothing: founders, which a first population spreads over the space, train apart, and the best one wins.

    A member that failed makes room for a fresh founder from anywhere in the space, untrained as all were.

    Source: Bergstra and Bengio, JMLR 13 (2012); the first population is a Latin hypercube, which covers every range
        better than independent draws do.
    """

    mutates = False

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Keep every healthy member; an empty slot stays empty."""
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        choices, draws = list(no_selection(last, rng)), {}
        oldest = min(last.ranked, key=lambda slot: last.indices[slot])  # has the values that do not evolve
        for slot in last.failed:
            choices[slot] = Choice(parent=None, reason="a fresh founder: its predecessor failed")
            draws[slot] = partial(random_founder, space, last.member(oldest).hyperparameters)
        return Plan.from_choices(history, choices, draws, rng=rng)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: there are none."""
        return {}


@dataclass(frozen=True, kw_only=True)
class SelectionOnly(Stateless):
    """Hold the tournament, but let winners take over as exact clones: hyperparameters are those of some founder.

    Attributes:
        size: Contestants of a tournament, at least 1.
        z: How many standard errors of the paired difference a challenger must be ahead, at least 0.

    Raises:
        ValueError: If a setting is out of range.
    """

    mutates = False

    size: int = 2
    z: float = 1.0

    def __post_init__(self) -> None:
        same = self._tournament
        object.__setattr__(self, "size", same.size)
        object.__setattr__(self, "z", same.z)

    @property
    def _tournament(self) -> Tournament:
        return Tournament(size=self.size, z=self.z, mutation=None)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Hold one tournament per member; an empty slot stays empty."""
        return self._tournament.plan(history, rng)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"size": self.size, "z": self.z}
