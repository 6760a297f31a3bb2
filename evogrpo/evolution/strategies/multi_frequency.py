"""Multiple-frequencies PBT: sub-populations evolve at different intervals (Doulazmi et al., arXiv:2506.03225)."""

from dataclasses import field
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import (
    CheckedPerturbation,
    Mutation,
    Proposal,
    proposals,
)
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.evolution.selection import truncation_selection
from evogrpo.validation import WHOLE, settings

QUARTER = 0.25


@settings
class MultiFrequency(Stateless):
    """Evolve sub-populations at different intervals and exchange members between them.

    Selection after every generation favours short-term gains, such as a learning rate that falls too early. Here the
    members form sub-populations of equal size, each with its own interval. At the end of its interval:

    1. The worst quarter of a sub-population is replaced by mutated clones of its best quarter.
    2. The quarter above the worst is replaced by migrants: better members of other sub-populations. A migrant from a
       slower sub-population keeps its hyperparameters, mutated like those of every clone. A migrant from a faster one
       brings its weights only and takes the hyperparameters of the best member of its new sub-population, so that
       short-sighted hyperparameters do not spread.

    With fewer than four members per interval, the longest intervals are left out. The first generation's members are
    assigned to sub-populations in turn, in the order of their indices.

    Attributes:
        intervals: Generations between selections, in ascending order, usually starting with 1.
        mutation: Maps the hyperparameters of a parent to those of a child: a `Mutation`, or your own callable.

    Raises:
        ValueError: If a setting is out of range.

    Source: Doulazmi et al., 2025 (arXiv:2506.03225).
    """

    mutates = True

    intervals: Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000), WHOLE], ...], Field(min_length=1)] = (1, 4)
    mutation: CheckedPerturbation = field(default_factory=Mutation)

    def __post_init__(self) -> None:
        if any(after <= before for before, after in pairwise(self.intervals)):
            raise ValueError(f"intervals must be in ascending order, got {list(self.intervals)}")

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Evolve the sub-populations whose interval has ended; failed members are always replaced."""
        last = history.last
        groups = self._groups(history)
        choices = truncation_selection(last, QUARTER, rng, among=())
        for position, group in enumerate(groups):
            is_ready = last.number % self.intervals[position] == 0
            selected = truncation_selection(last, QUARTER, rng, among=group)
            for slot in group:
                if is_ready or slot in last.failed:
                    choices[slot] = selected[slot]
            if is_ready:
                self._replace_by_migrants(history, groups, position, choices)
        return Plan.from_choices(history, choices, mutation=self.mutation, rng=rng)

    def _groups(self, history: History) -> list[list[int]]:
        """Return the slots of each sub-population."""
        first = history.generations[0]
        founders = sorted((member.index, member.slot) for member in first.members)
        count = max(1, min(len(self.intervals), len(founders) // 4))
        return [
            [slot for position, (_, slot) in enumerate(founders) if position % count == group] for group in range(count)
        ]

    def _replace_by_migrants(
        self, history: History, groups: list[list[int]], number: int, choices: list[Choice]
    ) -> None:
        """Replace the quarter above the worst of a sub-population by better members of others."""
        last, group = history.last, groups[number]
        space = history.space.for_samples_per_step(last.samples_per_step)
        residents = [slot for slot in last.ranked if slot in group]
        candidates = [slot for slot in last.ranked if slot not in group]
        quarter = max(1, round(QUARTER * len(residents)))
        for slot in residents[max(1, len(residents) - 2 * quarter) : len(residents) - quarter]:
            if not candidates or last.ranked.index(candidates[0]) > last.ranked.index(slot):
                break
            migrant, hyperparameters = candidates.pop(0), None
            origin = next(position for position, other in enumerate(groups) if migrant in other)
            if origin < number:
                host = last.member(residents[0])
                hyperparameters = _unless_taken(host.hyperparameters, proposals(self.mutation, history, host, space))
            inherited = "weights and hyperparameters" if hyperparameters is None else "weights only"
            choices[slot] = Choice(
                parent=migrant,
                reason=f"replaced by slot {migrant}: member of another sub-population with {inherited}",
                hyperparameters=hyperparameters,
            )


def _unless_taken(values: Hyperparameters, draw: Proposal) -> Proposal:
    """Propose these hyperparameters first, and others if another member has them."""
    first = [values]
    return lambda rng: first.pop() if first else draw(rng)
