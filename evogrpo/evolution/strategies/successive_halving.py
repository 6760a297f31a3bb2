"""Successive halving: stop the worst members and give others their budget (arXiv:1502.07943)."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from evogrpo.evolution.fitness import Fitness, difference
from evogrpo.evolution.history import Generation, History
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.evolution.selection import ranked_by_chance
from evogrpo.validation import WHOLE, settings

Grow = Literal["steps_per_generation", "samples_per_step"]
NOISE = 2.0
"""Standard errors that a difference must exceed before members are stopped."""


@settings
class SuccessiveHalving(Stateless):
    """Keep the better members at every rung until one is left; all rungs cost the same.

    Of n members, ceil(n / eta) stay after the first rung, ceil(n / eta^2) after the second, and so
    on. The budget of stopped members goes to the rest: generations get longer, or learning steps
    larger. Hyperparameters never change, so the winner was trained with one setting throughout, and
    values that no founder has are never found. Founders should therefore be spread over the search
    space.

    While no member is better than in the first generation by more than the noise, members are
    stopped only if they are worse than the best by more than the noise: the others may not have
    learned anything yet. The next rung then also stops those that stayed for this reason. Equal
    members are stopped in random order.

    All rungs get the same number of generations if `every` is generations / (1 + log_eta(members)).

    Attributes:
        eta: Inverse share of members that stay at a rung, at least 2.
        every: Generations between rungs, at least 1.
        grow: Budget that grows: "steps_per_generation" or "samples_per_step".

    Raises:
        ValueError: If a setting is out of range.

    Source: Jamieson and Talwalkar, AISTATS 2016 (arXiv:1502.07943).
    """

    mutates = False

    eta: Annotated[int, Field(ge=2, le=100_000), WHOLE] = 2
    every: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = 1
    grow: Grow = "steps_per_generation"

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Retire failed members, and at a rung all members except the best."""
        # 1. Choose the members that stay.
        first = history.generations[0]
        last = history.last
        generations = last.number - first.number + 1
        rungs, remainder = divmod(generations, self.every)
        quotient = len(first.members) / self.eta**rungs
        # At least 1, as the quotient underflows to 0 in a long run.
        survivor_count = max(1, math.ceil(quotient))
        survivors = ranked_by_chance(last, rng)
        if remainder:
            kept = "no halving in this generation"
        elif _shows_progress(history):
            kept = "among the best"
            survivors = survivors[:survivor_count]
        else:
            kept = "as good as the best up to noise"
            equal = _as_good_as_best(last, survivors)
            survivors = sorted({*survivors[:survivor_count], *equal}, key=survivors.index)
        # 2. Retire the others, and give their budget to those that stay.
        choices = []
        for slot, record in enumerate(last.slots):
            if record.member is None:
                choices.append(Choice(parent=None, reason="empty"))
            elif slot in survivors:
                choices.append(Choice(parent=slot, reason=f"kept: {kept}"))
            else:
                if record.fitness is None:
                    reason = "failed"
                else:
                    reason = f"not among the best {survivor_count}"
                choices.append(Choice(parent=None, reason=f"stopped: {reason}"))
        steps, samples = self._budgets(history, len(survivors))
        return Plan.from_choices(
            history,
            choices,
            steps_per_generation=None if steps == last.steps_per_generation else steps,
            samples_per_step=None if samples == last.samples_per_step else samples,
        )

    def _budgets(self, history: History, members: int) -> tuple[int, int]:
        """Return steps per generation and samples per step for this number of members."""
        first = history.generations[0]
        last = history.last
        if self.grow == "samples_per_step":  # a multiple, so that group sizes divide it
            factor = max(1, len(first.members) // members)
            return last.steps_per_generation, first.samples_per_step * factor
        # Count from the start of the run, so that learning steps lost to rounding are added to a
        # later generation.
        generations = history.generations
        taken = [len(each.members) * each.steps_per_generation for each in generations]
        per_generation = len(first.members) * first.steps_per_generation
        allowed = per_generation * (len(generations) + 1)
        left = allowed - sum(taken)
        return max(1, left // members), last.samples_per_step


def _shows_progress(history: History) -> bool:
    """Return True if a healthy member is significantly better than in the first generation."""
    first = {
        record.member.index: record.fitness
        for record in history.generations[0].slots
        if record.member
    }
    for member, fitness in history.last.healthy:
        earlier = first.get(member.index)
        if earlier is not None and _is_better(fitness, earlier):
            return True
    return False


def _as_good_as_best(last: Generation, ranked: Sequence[int]) -> list[int]:
    """Return the slots of members that are not significantly worse than the best.

    Args:
        last: Generation that was evaluated.
        ranked: Slots of healthy members, the best first.
    """
    best = last.slots[ranked[0]].fitness
    chosen = []
    for slot in ranked:
        fitness = last.slots[slot].fitness
        assert best is not None and fitness is not None  # healthy members only
        if not _is_better(best, fitness):
            chosen.append(slot)
    return chosen


def _is_better(fitness: Fitness, other: Fitness) -> bool:
    """Return True if a fitness is higher by more than the noise."""
    lead, standard_error = difference(fitness, other)
    return lead > NOISE * standard_error
