"""Who descends from whom, as lines to draw and as the list of a member's ancestors."""

from collections.abc import Mapping
from dataclasses import dataclass

from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.history.descent import origin_of, winner_of
from evogrpo.history.records import MemberReport
from evogrpo.reporting.summary import RunSummary


@dataclass(frozen=True, kw_only=True)
class LineageLine:
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


def lineage_lines(summary: RunSummary) -> tuple[LineageLine, ...]:
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
    lines: dict[int, LineageLine] = {}
    for index in sorted(results, key=lambda index: (results[index][0].generation, index)):
        first = results[index][0]
        parent = lines.get(first.parent) if first.parent is not None else None
        lines[index] = LineageLine(
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
    for line in lineage_lines(summary):
        founder = line.results[0].parent is None
        before = line.origin.fitness if line.origin is not None else baseline if founder else None
        for result in line.results:
            found[result.index, result.generation] = before
            before = result.fitness
    return found


def winner(summary: RunSummary) -> MemberReport | None:
    """Return the run's best member, as it was when it was stored as the best; None if no member was evaluated."""
    return winner_of(summary.generations)


def ancestors(summary: RunSummary, member: MemberReport | None) -> tuple[Ancestor, ...]:
    """Return the ancestors of a member as it was after one generation.

    Args:
        summary: The run.
        member: The member's report of that generation; None = no member.

    Returns:
        The founder first, the member itself last.
    """
    lines = {line.index: line for line in lineage_lines(summary)}
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
