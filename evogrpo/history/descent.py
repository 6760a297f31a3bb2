"""Who won a run, and the states that led to a member: its line of descent, generation by generation."""

from collections.abc import Sequence

from evogrpo.evolution.fitness import GREEDY, SAMPLED
from evogrpo.history.estimates import Estimate
from evogrpo.history.records import GenerationReport, MemberReport


def winner_of(generations: Sequence[GenerationReport]) -> MemberReport | None:
    """Return the best member ever, as it was when it became that; None before any member was evaluated.

    Args:
        generations: Those that count, in order, as `evogrpo.persistence.journal.latest_generations` returns them.
    """
    named = generations[-1].best_ever if generations else None
    members = (member for generation in generations for member in generation.members)
    return next((member for member in members if (member.index, member.generation) == named), None)


def standing_of(member: MemberReport) -> Estimate | None:
    """Return what a member is judged by beside others of its run: held-out questions, where it was asked any."""
    for measure in (GREEDY, SAMPLED):
        if measure in member.measured:
            return member.measured[measure]
    if member.fitness is None or member.standard_error is None:
        return None
    return Estimate(mean=member.fitness, standard_error=member.standard_error)


def line_of(generations: Sequence[GenerationReport], member: MemberReport) -> tuple[MemberReport, ...]:
    """Follow the state of a member back to its founder.

    Args:
        generations: Those that count, in order.
        member: The member as it was at the end of one of them.

    Returns:
        One report for every generation in which this state was trained, the founder's first, `member` last. What an
        ancestor learnt after its child was born is not among them.
    """
    lives: dict[int, list[MemberReport]] = {}
    for generation in generations:
        for each in generation.members:
            lives.setdefault(each.index, []).append(each)
    line: list[MemberReport] = []
    current: MemberReport | None = member
    while current is not None:
        lived = [each for each in lives[current.index] if each.generation <= current.generation]
        line = [*lived, *line]
        first = lived[0]
        before = lives.get(first.parent, []) if first.parent is not None else []
        current = origin_of(first, before)
    return tuple(line)


def origin_of(first: MemberReport, parents: Sequence[MemberReport]) -> MemberReport | None:
    """Return the result of the state that a member began with.

    Args:
        first: The member's first report.
        parents: All of its parent, in order.

    Returns:
        The parent's last one before the member's birth, or that of the earlier state that the member went back to; None
        if there is none. Whatever the journal says it is of an earlier generation, so that following origins ends.
    """
    latest = first.generation - 1 if first.back_to is None else min(first.back_to, first.generation - 1)
    return next((each for each in reversed(parents) if each.generation <= latest), None)
