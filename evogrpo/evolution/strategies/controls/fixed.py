"""No evolution at all: the control for both selection and mutation."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.plans import Plan
from evogrpo.evolution.selection import unselected
from evogrpo.evolution.strategies.strategy import Stateless


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
        return Plan.from_choices(history, unselected(last, rng))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: there are none."""
        return {}
