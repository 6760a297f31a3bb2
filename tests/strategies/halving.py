"""Repeated successive halving: the worse half retires at doubled cost, then all slots fill.

Source: Jamieson and Talwalkar, AISTATS 2016, for successive halving.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from evogrpo.evolution import Choice, History, Mutation, Plan, Stateless, proposals


@dataclass(frozen=True, kw_only=True)
class Halving(Stateless):
    """Keep the better half, at least `survivors`, and double the samples; then fill all slots and start again.

    Attributes:
        survivors: Number of members that start a new round.
    """

    survivors: int = 1
    mutates = True

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        last, first = history.last, history.generations[0]
        ranked = last.ranked  # the best first
        elite = ranked[0]
        if len(ranked) > self.survivors:
            kept = ranked[: max(self.survivors, len(ranked) // 2)]
            choices = [
                Choice(parent=slot, reason="kept: in the better half")
                if slot in kept
                else Choice(parent=None, reason="out")
                for slot in range(history.capacity)
            ]
            return Plan.from_choices(history, choices, samples_per_step=2 * last.samples_per_step)
        space = history.space.for_samples_per_step(first.samples_per_step)
        new = proposals(Mutation(), history, last.member(elite), space)
        choices, founded = [], False
        for slot in range(history.capacity):
            if slot in ranked:
                choices.append(Choice(parent=slot, reason="kept: survived the round"))
                continue
            choices.append(Choice(parent=elite if founded else None, reason="a new round", hyperparameters=new))
            founded = True
        return Plan.from_choices(history, choices, rng=rng, samples_per_step=first.samples_per_step)

    def to_json(self) -> dict[str, Any]:
        return {"survivors": self.survivors}
