"""Successive halving: begin wide, stop the hopeless rung by rung, and let the rest have what they would have spent."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from evogrpo.config.checks import names_unknown, refuse_unknown, whole_between
from evogrpo.evolution.history import History
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.selection import Choice, healthy_slots
from evogrpo.evolution.strategies.strategy import Stateless

Grow = Literal["steps_per_generation", "samples_per_step"]


@names_unknown
@dataclass(frozen=True, kw_only=True)
class SuccessiveHalving(Stateless):
    """Keep the better of the members at every rung, until one is left; all rungs cost the same.

    Of n members ceil(n / eta) are left after the first rung, ceil(n / eta^2) after the second and so on. Whoever is
    stopped hands its budget to the rest: generations get longer, or learning steps larger, as members get fewer.
    Nothing mutates: what the winner has learnt, it has learnt with the hyperparameters that it began with. Such a run
    is fair to hyperparameters that should stay as they are, and needs members that begin spread over the space: what no
    founder has is never found.

    Each rung gets the same share of a run of `generations` where `every` is generations / (1 + log_eta(members)).

    Attributes:
        eta: One in how many is kept at a rung, at least 2.
        every: Generations from one rung to the next, at least 1.
        grow: Which budget grows.

    Raises:
        ValueError: If a setting is out of range.

    Source: Jamieson and Talwalkar, AISTATS 2016 (arXiv:1502.07943).
    """

    mutates = False

    eta: int = 2
    every: int = 1
    grow: Grow = "steps_per_generation"

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", whole_between("eta", self.eta, 2, 100_000))
        object.__setattr__(self, "every", whole_between("every", self.every, 1, 1_000_000))
        refuse_unknown("grow", [self.grow], get_args(Grow))

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Retire whoever failed, and at a rung all but the best."""
        first, last = history.generations[0], history.last
        history.space.for_samples_per_step(first.samples_per_step)
        healthy_slots(last.fitness)
        done, rest = divmod(last.number - first.number + 1, self.every)
        places = math.ceil(len(first.members) / self.eta**done)
        kept = last.ranked[:places]
        choices = []
        for slot, record in enumerate(last.slots):
            if record.member is None:
                choices.append(Choice(parent=None, reason="empty"))
            elif slot in kept:
                choices.append(Choice(parent=slot, reason="kept: among the best" if rest == 0 else "kept: no rung yet"))
            else:
                why = "failed" if record.fitness is None else f"not among the best {places}"
                choices.append(Choice(parent=None, reason=f"stopped: {why}"))
        steps, samples = self._budgets(history, len(kept))
        return Plan.from_choices(
            history,
            choices,
            steps_per_generation=None if steps == last.steps_per_generation else steps,
            samples_per_step=None if samples == last.samples_per_step else samples,
        )

    def _budgets(self, history: History, members: int) -> tuple[int, int]:
        """Return the steps of the next generation and the samples of its steps, for so many members."""
        first, last = history.generations[0], history.last
        if self.grow == "samples_per_step":  # a multiple, so that every group size still divides it
            return last.steps_per_generation, first.samples_per_step * max(1, len(first.members) // members)
        # What rounding has left over in one generation is spent in the next.
        allowed = len(first.members) * first.steps_per_generation * (len(history.generations) + 1)
        spent = sum(len(each.members) * each.steps_per_generation for each in history.generations)
        return max(1, (allowed - spent) // members), last.samples_per_step

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"eta": self.eta, "every": self.every, "grow": self.grow}
