"""Narrowing: successive halving with PBT between the rungs (arXiv:1502.07943, arXiv:1711.09846)."""

import math
from dataclasses import field
from typing import Annotated

import numpy as np
from pydantic import Field

from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import CheckedPerturbation, Mutation
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.evolution.selection import has_stagnated, ranked_by_chance, truncation_selection
from evogrpo.validation import REAL, WHOLE, NonNegativeFloat, settings


@settings
class Narrowing(Stateless):
    """Halve the population at every rung until few members are left, and evolve the remaining ones.

    A population of n members needs n times the samples of one agent, which is wasted once good
    hyperparameters are known. At each rung the best 1 / `eta` of the members stay, as in successive
    halving, and take over the samples of the others: learning steps grow, and no generation has
    more samples than the first. After every generation the worst quarter is replaced by mutated
    clones of the best quarter, so that values no founder had can be found. If no member improved
    beyond the noise, none is stopped and all but the best are mutated in place. Improvement is
    tested with fitness by "validation" only, where generations answer the same questions.
    Equal members are stopped in random order.

    Attributes:
        eta: Inverse share of members that stay at a rung, at least 2.
        every: Generations between rungs, at least 1.
        min_members: Members that always stay, at least 1. A single member no longer evolves.
        z: Standard errors of the paired difference to the generation before above which a member
            counts as improved. No effect unless fitness is by "validation".
        quantile: Share of the members, in (0, 0.5], that clones replace in each generation; at
            least one member.
        mutation: Maps the hyperparameters of a parent to those of a child: a `Mutation`, or your
            own callable.

    Raises:
        ValueError: If a setting is out of range.

    Source: Jamieson and Talwalkar, AISTATS 2016 (arXiv:1502.07943), for rungs; Jaderberg et al.,
    2017 (arXiv:1711.09846), for selection between them.
    """

    mutates = True

    eta: Annotated[int, Field(ge=2, le=100_000), WHOLE] = 2
    every: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = 2
    min_members: Annotated[int, Field(ge=1, le=100_000), WHOLE] = 2
    z: NonNegativeFloat = 1.0
    quantile: Annotated[float, Field(gt=0, le=0.5), REAL] = 0.25
    mutation: CheckedPerturbation = field(default_factory=Mutation)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Retire failed members, and at a rung all except the best.

        Replace the worst of the remaining ones.
        """
        # 1. Choose the members that stay.
        first = history.generations[0]
        last = history.last
        founders = len(first.members)
        member_count = len(last.members)
        stagnated = has_stagnated(history, self.z)
        generations = last.number - first.number + 1
        is_rung = not stagnated and generations % self.every == 0
        if is_rung:
            survivor_count = max(self.min_members, math.ceil(member_count / self.eta))
        else:
            survivor_count = member_count
        survivors = ranked_by_chance(last, rng)[:survivor_count]
        # 2. Give them the samples of the others, and replace the worst of them by clones of the
        #    best.
        samples = first.samples_per_step * self._sample_factor(founders, len(survivors))
        choices = truncation_selection(last, survivors, self.quantile, rng)
        # 3. Retire the others. If no member improved, mutate all but the best in place.
        for slot, record in enumerate(last.slots):
            if record.member is not None and slot not in survivors:
                if record.fitness is None:
                    reason = "failed"
                else:
                    reason = f"not among the best {survivor_count}"
                choices[slot] = Choice(parent=None, reason=f"stopped: {reason}")
            elif stagnated and slot == last.ranked[0]:
                # The oldest of equal members, the same one in every generation.
                choices[slot] = Choice(parent=slot, reason="kept: the best")
            elif stagnated and slot in survivors:
                choices[slot] = Choice(
                    parent=slot, reason="mutated in place: no member improved", mutate=True
                )
        return Plan.from_choices(
            history,
            choices,
            mutation=self.mutation,
            rng=rng,
            samples_per_step=None if samples == last.samples_per_step else samples,
        )

    def _sample_factor(self, founders: int, members: int) -> int:
        """Return the largest power of eta by which samples can grow within the founders' budget.

        Group sizes that divide the samples of the first generation divide such a multiple too.
        """
        factor = 1
        while factor * self.eta * max(1, members) <= founders:
            factor *= self.eta
        return factor
