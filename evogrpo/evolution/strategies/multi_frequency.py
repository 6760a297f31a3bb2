"""Several sub-populations that evolve at different intervals, so that what pays late is not lost to what pays soon."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from evogrpo.config.checks import flag, names_unknown, whole_between
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.backtracking import apply_backtracking
from evogrpo.evolution.children import Perturbation, Proposal, checked_perturbation, perturbation_to_json, proposals
from evogrpo.evolution.history import History
from evogrpo.evolution.lineage import MemberRecord
from evogrpo.evolution.mutation import Mutation
from evogrpo.evolution.plan import Plan, parent_of
from evogrpo.evolution.selection import Choice, truncation_selection
from evogrpo.evolution.strategies.strategy import Stateless

QUARTER = 0.25


@names_unknown
@dataclass(frozen=True, kw_only=True)
class MultiFrequency(Stateless):
    """Let sub-populations evolve every so many generations each; migrants bring weights, and to the faster all.

    Selection after every generation favours what pays at once, such as a learning rate that falls too soon. Here the
    members are shared out among sub-populations of equal size. At the end of its own interval a sub-population replaces
    its worst quarter by mutated clones of its best, as truncation selection does. The quarter above the worst is open
    to migrants, the best members of other sub-populations, where these rank higher: from a slower sub-population a
    migrant comes with its hyperparameters, mutated as every clone's; from a faster one it brings what it has learnt
    only, and goes on with the hyperparameters of the best member where it arrives, so that short-sighted ones do not
    spread.

    With fewer than four members for each interval, the longest ones are left out. Members belong where the first
    generation's members, in the order of their indices, were dealt to.

    Attributes:
        intervals: In generations, ascending; the first one is 1 as a rule.
        mutation: How the clones of the best differ from them: a `Mutation`, or a function or an object of your own.
        backtrack: Whether members that have collapsed go back to the best state of their line; see
            `evogrpo.evolution.backtracking`.

    Raises:
        ValueError: If a setting is out of range.

    Source: Doulazmi et al., 2025 (arXiv:2506.03225).
    """

    mutates = True

    intervals: Sequence[int] = (1, 4)
    mutation: Perturbation = field(default_factory=Mutation)
    backtrack: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.intervals, str) or not isinstance(self.intervals, Sequence) or not self.intervals:
            raise ValueError(f"intervals must be a list of whole numbers, got {self.intervals!r}")
        intervals = tuple(whole_between("each of intervals", each, 1, 1_000_000) for each in self.intervals)
        if any(after <= before for before, after in pairwise(intervals)):
            raise ValueError(f"intervals must ascend, each longer than the one before, got {list(intervals)}")
        object.__setattr__(self, "intervals", intervals)
        checked_perturbation(self.mutation)
        flag("backtrack", self.backtrack)

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Let the sub-populations evolve whose interval has ended; who failed is replaced everywhere."""
        last = history.last
        space = history.space.for_samples_per_step(last.samples_per_step)
        groups = self._groups(history)
        ready = [last.number % interval == 0 for interval in self.intervals]
        choices = list(truncation_selection(last, QUARTER, rng, among=()))
        hosts: dict[int, MemberRecord] = {}
        for number, group in enumerate(groups):
            inside = truncation_selection(last, QUARTER, rng, among=group)
            for slot in group:
                if ready[number] or slot in last.failed:
                    choices[slot] = inside[slot]
            if ready[number]:
                hosts |= self._migrants(history, groups, number, choices)
        states = apply_backtracking(history, choices, allowed=self.backtrack)
        draws: dict[int, Proposal] = {}
        for slot, choice in enumerate(states.choices):
            parent = parent_of(history, choice)
            if parent is None or choice.parent == slot:
                continue
            draws[slot] = proposals(self.mutation, history, parent, space)
            if slot in hosts and choice.kept_state is None:
                host = hosts[slot]
                draws[slot] = _unless_taken(host.hyperparameters, proposals(self.mutation, history, host, space))
        return Plan.from_choices(history, states.choices, draws, rng=rng, keep=states.keep, drop=states.drop)

    def _groups(self, history: History) -> list[list[int]]:
        """Return the slots of each sub-population."""
        first = history.generations[0]
        founders = sorted((member.index, member.slot) for member in first.members)
        count = max(1, min(len(self.intervals), len(founders) // 4))
        return [[slot for place, (_, slot) in enumerate(founders) if place % count == group] for group in range(count)]

    def _migrants(
        self, history: History, groups: list[list[int]], number: int, choices: list[Choice]
    ) -> dict[int, MemberRecord]:
        """Let better members of other sub-populations clone themselves into one; return with whose hyperparameters."""
        last, group = history.last, groups[number]
        inside = [slot for slot in last.ranked if slot in group]
        outside = [slot for slot in last.ranked if slot not in group]
        share = max(1, round(QUARTER * len(inside)))
        arrived: dict[int, MemberRecord] = {}
        for slot in inside[max(1, len(inside) - 2 * share) : len(inside) - share]:
            if not outside or last.ranked.index(outside[0]) > last.ranked.index(slot):
                break
            migrant = outside.pop(0)
            home = next(place for place, other in enumerate(groups) if migrant in other)
            slower = home > number
            if not slower:
                arrived[slot] = last.member(inside[0])
            brings = "its hyperparameters too" if slower else "its weights alone"
            choices[slot] = Choice(parent=migrant, reason=f"replaced by slot {migrant}: a migrant, bringing {brings}")
        return arrived

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "intervals": list(self.intervals),
            "mutation": perturbation_to_json(self.mutation),
            "backtrack": self.backtrack,
        }


def _unless_taken(values: Hyperparameters, draw: Proposal) -> Proposal:
    """Return what proposes these values first, and others where they are taken."""
    first = [values]
    return lambda rng: first.pop() if first else draw(rng)
