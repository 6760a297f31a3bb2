"""Selection without mutation: how much of a result is choosing among seeds and founders."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.plans import Plan
from evogrpo.evolution.strategies.strategy import Stateless
from evogrpo.evolution.strategies.tournament import Tournament


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
