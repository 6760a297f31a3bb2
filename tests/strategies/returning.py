"""A strategy that uses kept states."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from evogrpo.evolution import Choice, History, Plan, best_slot, healthy_slots


class Returning:
    """Alternate between keeping the best member's state and restoring it in the worst slot.

    Its state counts the restorations.
    """

    mutates = False

    def __init__(self) -> None:
        self.returns = 0

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        last, healthy = history.last, healthy_slots(history.last.fitness)
        worst = min(healthy, key=lambda slot: (last.fitness[slot].mean, slot))
        back = history.kept_states[0].key if history.kept_states else None
        self.returns += back is not None
        choices = [
            Choice(parent=None, kept_state=back, reason=f"went back to #{back[0]}, return {self.returns}")
            if back and (slot == worst or slot in last.failed)
            else Choice(parent=slot if slot in healthy else None, reason="kept" if slot in healthy else "failed")
            for slot in range(history.capacity)
        ]
        if back:
            return Plan.from_choices(history, choices, drop=[back])
        return Plan.from_choices(history, choices, keep=[best_slot(last.fitness)])

    def to_json(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"returns": self.returns}

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.returns = values["returns"]
