"""Narrowing: begin wide, let ever fewer members evolve, and give them what the others would have spent."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evogrpo.config.checks import finite_number, names_unknown, whole_between
from evogrpo.evolution.children import Perturbation, Proposal, checked_perturbation, perturbation_to_json, proposals
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.selection import Choice, has_stagnated, truncation_selection
from evogrpo.evolution.strategies.strategy import Stateless


@names_unknown
@dataclass(frozen=True, kw_only=True)
class Narrowing(Stateless):
    """Halve the population at every rung until few are left, and let those that remain evolve.

    A population of n takes n times the samples of one agent. That pays while nobody knows which hyperparameters are
    good, and is a waste from then on. So at a rung one in `eta` is kept and the rest are stopped, as in successive
    halving, and those that remain take their samples too: learning steps grow as members get fewer, and no generation
    has more samples than the first. In each generation the worst quarter of those that remain are replaced by mutated
    clones of the best, so that what no founder had is found, and what is good later is found later. Where nobody got
    better beyond the noise there is nothing to narrow down to yet: nobody is stopped, and all but the best are mutated
    in place.

    Attributes:
        eta: One in how many is kept at a rung, at least 2.
        every: Generations from one rung to the next, at least 1.
        least: Members that are left in the end, at least 1; with 1 nothing evolves any more from there on.
        z: Standard errors of the paired difference that somebody must have got better by.
        quantile: Share of those that remain, in (0, 0.5], that clones replace in each generation; at least one.
        mutation: How clones differ: a `Mutation`, or a function or an object of your own.

    Raises:
        ValueError: If a setting is out of range.

    Source: Jamieson and Talwalkar, AISTATS 2016 (arXiv:1502.07943), for rungs; Jaderberg et al., 2017
    (arXiv:1711.09846), for what happens between them.
    """

    mutates = True

    eta: int = 2
    every: int = 2
    least: int = 2
    z: float = 1.0
    quantile: float = 0.25
    mutation: Perturbation = field(default_factory=Mutation)

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", whole_between("eta", self.eta, 2, 100_000))
        object.__setattr__(self, "every", whole_between("every", self.every, 1, 1_000_000))
        object.__setattr__(self, "least", whole_between("least", self.least, 1, 100_000))
        object.__setattr__(self, "quantile", finite_number("quantile", self.quantile))
        object.__setattr__(self, "z", finite_number("z", self.z))
        if self.z < 0:
            raise ValueError(f"z must be at least 0, got {self.z}")
        if not 0 < self.quantile <= 0.5:
            raise ValueError(f"quantile must lie in (0, 0.5], got {self.quantile}")
        checked_perturbation(self.mutation)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Stop all but the best at a rung, and replace the worst of the rest."""
        first, last = history.generations[0], history.last
        founders, living = len(first.members), len(last.members)
        stuck = has_stagnated(history, self.z)
        rung = not stuck and (last.number - first.number + 1) % self.every == 0
        places = max(self.least, math.ceil(living / self.eta)) if rung else living
        kept = last.ranked[:places]
        samples = first.samples_per_step * self._times(founders, len(kept))
        space = history.space.for_samples_per_step(samples)
        choices = list(truncation_selection(last, self.quantile, rng, among=kept))
        draws: dict[int, Proposal] = {}
        for slot, record in enumerate(last.slots):
            if record.member is not None and slot not in kept:
                why = "failed" if record.fitness is None else f"not among the best {places}"
                choices[slot] = Choice(parent=None, reason=f"stopped: {why}")
            elif stuck and slot in last.ranked[1:]:
                choices[slot] = Choice(parent=slot, reason="mutated in place: nobody got better")
            parent = choices[slot].parent
            if parent is not None and (parent != slot or (stuck and slot in last.ranked[1:])):
                draws[slot] = proposals(self.mutation, history, last.member(parent), space)
        return Plan.from_choices(
            history,
            choices,
            draws,
            rng=rng,
            samples_per_step=None if samples == last.samples_per_step else samples,
        )

    def _times(self, founders: int, left: int) -> int:
        """Return how many times as many samples each of those left can take: a power, so that groups stay whole."""
        times = 1
        while times * self.eta * max(1, left) <= founders:
            times *= self.eta
        return times

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "eta": self.eta,
            "every": self.every,
            "least": self.least,
            "z": self.z,
            "quantile": self.quantile,
            "mutation": perturbation_to_json(self.mutation),
        }
