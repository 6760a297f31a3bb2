"""Backtracking: a collapsed member returns to the best earlier state of its own lineage.

Source: Zhang et al., AISTATS 2021 (arXiv:2102.13651). There, members return to the best states of the whole population;
here each member returns to its own lineage, so that one lucky evaluation does not take over the population.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evogrpo.evolution.fitness import difference_between
from evogrpo.evolution.history import History, KeptState, KeptStateKey
from evogrpo.evolution.lineage import MemberRecord
from evogrpo.evolution.selection import Choice

COLLAPSE = 3.0
"""Standard errors by which a collapsed member is below the best state of its lineage. The best of many evaluations is
partly luck, so smaller drops are common in healthy runs."""


@dataclass(frozen=True, kw_only=True)
class Backtracking:
    """Choices of selection with collapsed members sent back, and the states to keep and drop.

    Attributes:
        choices: One per slot.
        keep: See `Plan.keep`.
        drop: See `Plan.drop`.
    """

    choices: tuple[Choice, ...]
    keep: tuple[int, ...]
    drop: tuple[KeptStateKey, ...]


def apply_backtracking(
    history: History, choices: Sequence[Choice], *, allowed: bool = True, z: float = COLLAPSE
) -> Backtracking:
    """Return collapsed members to earlier states, and keep the best state of every surviving lineage.

    A member has collapsed if it failed, or if its fitness is more than `z` standard errors of the paired difference
    below the best kept state of its lineage. It returns to that state, unless selection fills its slot with a clone of
    at least that fitness or with a founder, or empties the slot.

    Args:
        history: History to plan from.
        choices: One choice of selection per slot.
        allowed: If False, no member goes back and no state is kept.
        z: Standard errors of the paired difference.
    """
    if not allowed:
        return Backtracking(choices=tuple(choices), keep=(), drop=tuple(kept.key for kept in history.kept_states))
    lineages = _Lineages(history)
    backtracked = tuple(lineages.backtracked_choice(slot, choice, z) for slot, choice in enumerate(choices))
    needed = {
        key for slot, choice in enumerate(backtracked) if (key := lineages.best_state_key(slot, choice)) is not None
    }
    generation = history.last.number
    keep = tuple(member.slot for member in history.last.members if (member.index, generation) in needed)
    return Backtracking(
        choices=backtracked, keep=keep, drop=tuple(kept.key for kept in history.kept_states if kept.key not in needed)
    )


class _Lineages:
    """Lineages of a history with their kept states."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._records = {member.index: member for state in history.generations for member in state.members}
        self._records |= {kept.member.index: kept.member for kept in history.kept_states}

    def backtracked_choice(self, slot: int, choice: Choice, z: float) -> Choice:
        """Return the choice for a slot, replaced by a return if its member collapsed."""
        record = self._history.last.slots[slot]
        kept = None if record.member is None or choice.parent is None else self.best(record.member)
        if kept is None:
            return choice
        successor = None if choice.parent in (slot, None) else self._history.last.fitness[choice.parent]
        if successor is not None and successor.mean >= kept.fitness.mean:
            return choice
        reason = f"went back to #{kept.member.index} as it was in generation {kept.generation}"
        if record.fitness is None:
            return Choice(parent=None, kept_state=kept.key, reason=f"{reason}: failed")
        drop, standard_error = difference_between(kept.fitness, record.fitness)
        if drop <= z * standard_error:
            return choice
        return Choice(parent=None, kept_state=kept.key, reason=f"{reason}: fell by {drop:.3g} +- {standard_error:.2g}")

    def best_state_key(self, slot: int, choice: Choice) -> KeptStateKey | None:
        """Return the key of the best state so far of the lineage in a slot."""
        if choice.kept_state is not None or choice.parent is None:
            return choice.kept_state
        member, fitness = self._history.last.member(choice.parent), self._history.last.fitness[choice.parent]
        kept = self.best(member)
        if kept is None or (fitness is not None and fitness.mean >= kept.fitness.mean):
            return member.index, self._history.last.number
        return kept.key

    def best(self, member: MemberRecord) -> KeptState | None:
        """Return the fittest kept state of a member's lineage, the earliest of equal ones."""
        samples = self._history.last.samples_per_step
        usable = (
            state for state in self._kept_states(member) if samples % state.member.hyperparameters.group_size == 0
        )
        return max(usable, key=lambda state: (state.fitness.mean, -state.generation), default=None)

    def _kept_states(self, member: MemberRecord) -> Iterator[KeptState]:
        """Yield the kept states among the ancestors of a member's state."""
        ancestor, latest = member, self._history.last.number
        while True:
            for kept in self._history.kept_states:
                if kept.member.index == ancestor.index and kept.generation <= latest:
                    yield kept
            latest = ancestor.born if ancestor.back_to is None else ancestor.back_to
            parent = None if ancestor.parent is None else self._records.get(ancestor.parent)
            if parent is None:
                return
            ancestor = parent
