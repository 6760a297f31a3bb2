"""Random search: as many draws from the space as there are members, each trained to the end."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from evogrpo.evolution.founders import anywhere
from evogrpo.evolution.history import History
from evogrpo.evolution.plans import Plan
from evogrpo.evolution.selection import Choice, unselected
from evogrpo.evolution.strategies.strategy import Stateless


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
        choices, draws = list(unselected(last, rng)), {}
        oldest = min(last.ranked, key=lambda slot: last.indices[slot])  # has the values that do not evolve
        for slot in last.failed:
            choices[slot] = Choice(parent=None, reason="a fresh founder: its predecessor failed")
            draws[slot] = partial(anywhere, space, last.member(oldest).hyperparameters)
        return Plan.from_choices(history, choices, draws, rng=rng)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: there are none."""
        return {}
