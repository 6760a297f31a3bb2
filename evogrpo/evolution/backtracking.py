"""Going back: a member that has collapsed takes up an earlier state of its own line again.

Source: Zhang et al., AISTATS 2021 (arXiv:2102.13651): population-based training with backtracking. There members go
back to an elite of all times; here each to the best state of its own line of descent, so that one lucky evaluation does
not take over the population.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evogrpo.evolution.fitness import difference_between
from evogrpo.evolution.history import History, KeptState, KeptStateKey
from evogrpo.evolution.lineage import MemberRecord
from evogrpo.evolution.selection import Choice

COLLAPSE = 3.0
"""Standard errors of the paired difference that a member has to fall below its line's best state. The best of many
evaluations is partly luck, so that smaller falls are common where nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Backtracking:
    """What selection decided, with those sent back who have collapsed; and which states that needs.

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
    """Send members back that have collapsed, and keep the best state of every line that lives on.

    A member has collapsed if it failed, or if it earns less than its line's best kept state by more than `z` standard
    errors of their paired difference. It goes back there, unless selection puts a clone of somebody into its slot who
    earned at least as much, or leaves the slot to nobody or to a founder.

    Args:
        history: What is planned from.
        choices: What selection decided.
        allowed: Whether anybody goes back; if not, nothing is kept.
        z: Standard errors.
    """
    if not allowed:
        return Backtracking(choices=tuple(choices), keep=(), drop=tuple(kept.key for kept in history.kept_states))
    lines = _Lines(history)
    sent = tuple(lines.sent_back(slot, choice, z) for slot, choice in enumerate(choices))
    needed = {key for slot, choice in enumerate(sent) if (key := lines.needed(slot, choice)) is not None}
    now = history.last.number
    keep = tuple(member.slot for member in history.last.members if (member.index, now) in needed)
    return Backtracking(
        choices=sent, keep=keep, drop=tuple(kept.key for kept in history.kept_states if kept.key not in needed)
    )


class _Lines:
    """The lines of descent that a history knows, and the states of theirs that are kept."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._records = {member.index: member for each in history.generations for member in each.members}
        self._records |= {kept.member.index: kept.member for kept in history.kept_states}

    def sent_back(self, slot: int, choice: Choice, z: float) -> Choice:
        """Return the choice for a slot, or that its member goes back."""
        record = self._history.last.slots[slot]
        kept = None if record.member is None or choice.parent is None else self.best(record.member)
        if kept is None:
            return choice
        successor = None if choice.parent in (slot, None) else self._history.last.fitness[choice.parent]
        if successor is not None and successor.mean >= kept.fitness.mean:
            return choice
        whither = f"went back to #{kept.member.index} as it was in generation {kept.generation}"
        if record.fitness is None:
            return Choice(parent=None, kept_state=kept.key, reason=f"{whither}: failed")
        fall, standard_error = difference_between(kept.fitness, record.fitness)
        if fall <= z * standard_error:
            return choice
        return Choice(parent=None, kept_state=kept.key, reason=f"{whither}: fell by {fall:.3g} +- {standard_error:.2g}")

    def needed(self, slot: int, choice: Choice) -> KeptStateKey | None:
        """Return which state the line that lives in a slot next would go back to: the best it has had so far."""
        if choice.kept_state is not None or choice.parent is None:
            return choice.kept_state
        member, earned = self._history.last.member(choice.parent), self._history.last.fitness[choice.parent]
        kept = self.best(member)
        if kept is None or (earned is not None and earned.mean >= kept.fitness.mean):
            return member.index, self._history.last.number
        return kept.key

    def best(self, member: MemberRecord) -> KeptState | None:
        """Return the kept state of a member's line that earned most, the first of equal ones."""
        samples = self._history.last.samples_per_step
        usable = (each for each in self._kept(member) if samples % each.member.hyperparameters.group_size == 0)
        return max(usable, key=lambda each: (each.fitness.mean, -each.generation), default=None)

    def _kept(self, member: MemberRecord) -> Iterator[KeptState]:
        """Yield the kept states that a member's own goes back to."""
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
