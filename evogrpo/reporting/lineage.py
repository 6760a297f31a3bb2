"""Lineage of a run: ancestors of a member, births, and the tree in text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.reporting.descent import best_member, lineage_of, origin_of
from evogrpo.reporting.records import GenerationReport, MemberReport
from evogrpo.reporting.step_records import REMEDY, JournalFields
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.storage.journal import latest_generations


@dataclass(frozen=True, kw_only=True)
class MemberHistory:
    """One member's results over its life.

    Attributes:
        index: The member.
        founder: Index of its first ancestor.
        origin: Its parent's result where its line begins: the last one before its birth, or that of the earlier state
            that it went back to; None for a founder.
        results: Its own results, one per generation that it lived through, in order.
    """

    index: int
    founder: int
    origin: MemberReport | None
    results: tuple[MemberReport, ...]


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """One stage on the way from a founder to a member.

    Attributes:
        index: The ancestor.
        parent: Its parent's index, or None for a founder.
        generations: The first and the last generation in which the line was carried by this ancestor.
        hyperparameters: What it learned with.
        changes: Old and new value of every hyperparameter that changed at its birth.
        reason: Why it was born.
        result: Its last result on this line: for an ancestor, the one at which its child was born, or whose state its
            child went back to.
        back_to: The generation after which its parent's state was kept that it began with; None = that of its birth.
    """

    index: int
    parent: int | None
    generations: tuple[int, int]
    hyperparameters: Hyperparameters
    changes: Mapping[str, tuple[Value, Value]]
    reason: str
    result: MemberReport
    back_to: int | None = None


def member_histories(summary: RunSummary) -> tuple[MemberHistory, ...]:
    """Return the line of every member that ever finished a generation, by index.

    Args:
        summary: The run.

    Returns:
        One line per index; a parent's line comes before its children's.
    """
    results: dict[int, list[MemberReport]] = {}
    for generation in summary.generations:
        for member in generation.members:
            results.setdefault(member.index, []).append(member)
    lines: dict[int, MemberHistory] = {}
    for index in sorted(results, key=lambda index: (results[index][0].generation, index)):
        first = results[index][0]
        parent = lines.get(first.parent) if first.parent is not None else None
        lines[index] = MemberHistory(
            index=index,
            founder=parent.founder if parent else index,
            origin=origin_of(first, parent.results) if parent else None,
            results=tuple(results[index]),
        )
    return tuple(lines.values())


def fitness_before(summary: RunSummary) -> dict[tuple[int, int], float | None]:
    """Return the fitness of the state that every member began each of its generations with.

    Args:
        summary: The run.

    Returns:
        By index and generation: its own or, in its first one, its parent's before its birth; of a founder that of the
        untrained baseline; None where it is unknown.
    """
    baseline = None if summary.start is None else summary.start.mean
    found: dict[tuple[int, int], float | None] = {}
    for line in member_histories(summary):
        founder = line.results[0].parent is None
        before = line.origin.fitness if line.origin is not None else baseline if founder else None
        for result in line.results:
            found[result.index, result.generation] = before
            before = result.fitness
    return found


def winner(summary: RunSummary) -> MemberReport | None:
    """Return the run's best member, as it was when it was stored as the best; None if no member was evaluated."""
    return best_member(summary.generations)


def ancestors(summary: RunSummary, member: MemberReport | None) -> tuple[Ancestor, ...]:
    """Return the ancestors of a member as it was after one generation.

    Args:
        summary: The run.
        member: The member's report of that generation; None = no member.

    Returns:
        The founder first, the member itself last.
    """
    lines = {line.index: line for line in member_histories(summary)}
    chain: list[Ancestor] = []
    line, last = (None, None) if member is None else (lines.get(member.index), member)
    while line is not None and last is not None:
        first = line.results[0]
        chain.append(
            Ancestor(
                index=line.index,
                parent=first.parent,
                generations=(first.generation, last.generation),
                hyperparameters=first.hyperparameters,
                changes=first.changes,
                reason=first.reason,
                result=last,
                back_to=first.back_to,
            )
        )
        # An origin lies in an earlier generation, so this ends.
        last = line.origin
        line = lines.get(last.index) if last else None
    return tuple(reversed(chain))


@dataclass(frozen=True, kw_only=True)
class ToldBirth:
    """One birth, as a journal tells it.

    Attributes:
        index: The member.
        parent: Whom it was cloned from; None for a founder.
        born: The generation whose plan gave birth to it; 0 for the first founders.
        slot: Where it lived.
        hyperparameters: Its own.
        changes: How they differ from its parent's, by name: (old, new).
        reason: Why it was born; untrusted.
        back_to: The generation after which its parent's state was kept that it began with; None = that of its birth.
    """

    index: int
    parent: int | None
    born: int
    slot: int
    hyperparameters: Hyperparameters
    changes: Mapping[str, tuple[Value, Value]] = field(default_factory=dict)
    reason: str = "founder"
    back_to: int | None = None


def read_births(events: Sequence[Mapping[str, Any]]) -> tuple[ToldBirth, ...]:
    """Return every birth, by index; those of generations that were given up when the run was resumed do not count.

    Raises:
        ValueError: If a value is not what it must be.
    """
    births: dict[int, ToldBirth] = {}
    for birth in _all(events):
        births.setdefault(birth.index, birth)
    return tuple(births[index] for index in sorted(births))


def _all(events: Sequence[Mapping[str, Any]]) -> Iterator[ToldBirth]:
    began = next((event for event in events if event["event"] == "run"), {})
    if "members" in began:
        for founder in JournalFields(began, "the run event").each("members", "a founder of the run event"):
            yield _birth(founder, born=0, reason="founder")
    for event in latest_generations(events):
        report = GenerationReport.from_json(event)
        for member in report.members:
            names = ("index", "parent", "born", "slot", "hyperparameters", "changes", "reason", "back_to")
            yield ToldBirth(**{name: getattr(member, name) for name in names})
        plan = event.get("plan")
        if isinstance(plan, Mapping) and "children" in plan:
            where = f"a child of the plan of generation {report.generation}"
            for child in JournalFields(plan, where).each("children", where):
                changes = child.changes("changes")
                told = {"reason": child.text("reason"), "back_to": child.whole_or_none("back_to")}
                yield _birth(child, born=report.generation, changes=changes, **told)


def _birth(fields: JournalFields, **others: Any) -> ToldBirth:
    return ToldBirth(
        index=fields.whole("index"),
        parent=fields.whole_or_none("parent"),
        slot=fields.whole("slot"),
        hyperparameters=fields.hyperparameters("hyperparameters"),
        **others,
    )


_FEW = 2
"""As many members in a row are shown one by one before they are collapsed."""


@dataclass(frozen=True, kw_only=True)
class LineageTree:
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


def read_lineage(events: Sequence[Mapping[str, Any]]) -> LineageTree:
    """Read a run's lineage out of its journal.

    Args:
        events: What `read_journal` returned; untrusted input.

    Raises:
        ValueError: If a value is not what it must be.
    """
    summary, births = summarise(events), read_births(events)
    for birth in births:
        if birth.parent is not None and birth.parent >= birth.index:
            raise ValueError(f"a parent is born before its child, got {birth.parent} of {birth.index}: {REMEDY}")
    lives: dict[int, list[MemberReport]] = {}
    for generation in summary.generations:
        for member in generation.members:
            lives.setdefault(member.index, []).append(member)
    best = winner(summary)
    line = () if best is None else lineage_of(summary.generations, best)
    return LineageTree(
        births=births,
        lives={index: tuple(own) for index, own in lives.items()},
        winner=best,
        path=tuple(dict.fromkeys(report.index for report in line)),
    )


def tree_lines(tree: LineageTree, *, every: bool = False) -> tuple[TreeLine, ...]:
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

    tree: LineageTree
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
