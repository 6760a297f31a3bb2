"""Who won a run, and the states that led to a member: its line of descent, generation by generation."""

from collections.abc import Iterable, Sequence

from evogrpo.history.records import GenerationReport, MemberReport


def winner_of(generations: Iterable[GenerationReport], tested: int | None = None) -> MemberReport | None:
    """Return the best member ever, as it was when it earned its fitness.

    Args:
        generations: Those that count, in order.
        tested: Index of the member that the run has tested: that one, whatever was measured later.

    Returns:
        Its report of that generation; of equally good ones the first, which is the one that was kept. None if nobody
        was ever evaluated.
    """
    best: MemberReport | None = None
    for generation in generations:
        for member in generation.members:
            chosen = member.index == (generation.best.index if tested is None else tested)
            if chosen and member.fitness is not None and (best is None or member.fitness > (best.fitness or 0.0)):
                best = member
    return best


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
        # Always an earlier generation, so this ends whatever the journal says.
        current = next((each for each in reversed(before) if each.generation < first.generation), None)
    return tuple(line)
