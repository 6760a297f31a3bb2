"""Who descends from whom as a tree to print: one line a member, quiet lines collapsed, the winner's path marked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evogrpo.history.checked_fields import REMEDY
from evogrpo.history.descent import line_of
from evogrpo.history.records import MemberReport
from evogrpo.reporting.family import winner
from evogrpo.reporting.summary import summarise
from evogrpo.reporting.told.births import ToldBirth, told_births

_FEW = 2
"""As many members in a row are shown one by one before they are collapsed."""


@dataclass(frozen=True, kw_only=True)
class FamilyTree:
    """A run's lineage.

    Attributes:
        births: Every birth, by index; a parent comes before its children.
        lives: What each member came to, in order, by its index; members that were never evaluated have none.
        winner: The best member as it won, None if there is none yet.
        path: Indices of the winner and its ancestors, its founder first.
    """

    births: tuple[ToldBirth, ...]
    lives: Mapping[int, tuple[MemberReport, ...]]
    winner: MemberReport | None
    path: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "winner": None if self.winner is None else self.winner.index,
            "path": list(self.path),
            "members": [{**_birth_json(birth), "lived": self._lived(birth.index)} for birth in self.births],
        }

    def _lived(self, index: int) -> list[dict[str, Any]]:
        names = ("generation", "fitness", "standard_error", "failed")
        return [{name: getattr(each, name) for name in names} for each in self.lives.get(index, ())]


@dataclass(frozen=True, kw_only=True)
class TreeLine:
    """One line to print.

    Attributes:
        indent: How deep.
        members: Who it tells of: one member, or several that are collapsed.
        wins: Whether it is on the winner's path.
        skips: Whether the members are a line of descent that is cut short, rather than siblings that died out.
    """

    indent: int
    members: tuple[ToldBirth, ...]
    wins: bool
    skips: bool = False


def family_tree(events: Sequence[Mapping[str, Any]]) -> FamilyTree:
    """Read a run's lineage out of its journal.

    Args:
        events: What `read_journal` returned; untrusted input.

    Raises:
        ValueError: If a value is not what it must be.
    """
    summary, births = summarise(events), told_births(events)
    for birth in births:
        if birth.parent is not None and birth.parent >= birth.index:
            raise ValueError(f"a parent is born before its child, got {birth.parent} of {birth.index}: {REMEDY}")
    lives: dict[int, list[MemberReport]] = {}
    for generation in summary.generations:
        for member in generation.members:
            lives.setdefault(member.index, []).append(member)
    best = winner(summary)
    line = () if best is None else line_of(summary.generations, best)
    return FamilyTree(
        births=births,
        lives={index: tuple(own) for index, own in lives.items()},
        winner=best,
        path=tuple(dict.fromkeys(report.index for report in line)),
    )


def tree_lines(tree: FamilyTree, *, every: bool = False) -> tuple[TreeLine, ...]:
    """Lay a lineage out: the main line of descent of every member goes on under it, side lines are indented.

    Args:
        tree: The lineage.
        every: Whether each member gets a line. By default more than two siblings without children are collapsed into
            one line, and so is the middle of a line of descent that nothing branches off, except on the winner's path.
    """
    return tuple(_Layout(tree, every=every).lines())


@dataclass
class _Layout:
    """Finds the order: of several children the one on the winner's path goes on, else the one with most descendants.

    A side line therefore holds at most half as many members as what it branches off from: indentation stays small
    however long a run is.
    """

    tree: FamilyTree
    every: bool
    children: dict[int | None, list[ToldBirth]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def lines(self) -> Iterator[TreeLine]:
        known = {birth.index for birth in self.tree.births}
        for birth in self.tree.births:
            self.children.setdefault(birth.parent if birth.parent in known else None, []).append(birth)
        for birth in reversed(self.tree.births):
            self.sizes[birth.index] = 1 + sum(self.sizes[child.index] for child in self.children.get(birth.index, ()))
        for group in self._grouped(self.children.get(None, [])):
            yield from self._line(group, 0)

    def _line(self, group: tuple[ToldBirth, ...], indent: int) -> Iterator[TreeLine]:
        """Lay out several collapsed siblings, or one member and its main line of descent."""
        if len(group) > 1:
            yield TreeLine(indent=indent, members=group, wins=False)
            return
        run: list[ToldBirth] = []
        member: ToldBirth | None = group[0]
        while member is not None:
            below = self.children.get(member.index, [])
            after = max(below, key=lambda child: (self._wins(child), self.sizes[child.index]), default=None)
            sides = [child for child in below if child is not after]
            run.append(member)
            if sides or after is None or self._wins(member):
                yield from self._straight(run, indent)
                run = []
            for each in self._grouped(sides):
                yield from self._line(each, indent + 1)
            member = after

    def _straight(self, run: Sequence[ToldBirth], indent: int) -> Iterator[TreeLine]:
        """Lay out members of one line of descent that nothing branches off before the last."""
        middle = run[1:-1]
        cut = len(middle) > _FEW and not self.every
        for member in run[:1] if cut else run[:-1]:
            yield self._single(member, indent)
        if cut:
            yield TreeLine(indent=indent, members=tuple(middle), wins=False, skips=True)
        yield self._single(run[-1], indent)

    def _single(self, member: ToldBirth, indent: int) -> TreeLine:
        return TreeLine(indent=indent, members=(member,), wins=self._wins(member))

    def _grouped(self, siblings: Sequence[ToldBirth]) -> Iterator[tuple[ToldBirth, ...]]:
        """Yield siblings one by one, those without children and without merit together where they are many."""
        quiet = [each for each in siblings if not self.children.get(each.index) and not self._wins(each)]
        together = len(quiet) > _FEW and not self.every
        yield from ((each,) for each in siblings if not (together and each in quiet))
        if together:
            yield tuple(quiet)

    def _wins(self, member: ToldBirth) -> bool:
        return member.index in self.tree.path


def _birth_json(birth: ToldBirth) -> dict[str, Any]:
    return {
        **vars(birth),
        "hyperparameters": birth.hyperparameters.to_json(),
        "changes": {name: list(change) for name, change in birth.changes.items()},
    }
