"""Lineage of a run: best member, ancestors, hyperparameter schedule, and the tree of births."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.history import NETWORK, MemberRecord
from evogrpo.evolution.strategies import ScheduleStage
from evogrpo.reporting.records import Estimate, GenerationReport, MemberReport
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.text import number_text, origin_text, score_text


def best_member(generations: Sequence[GenerationReport]) -> MemberReport | None:
    """Return the report with which the run's best member became the best.

    None before the first evaluation.

    Args:
        generations: In order, as `evogrpo.storage.journal.latest_generations` returns them.
    """
    if generations:
        best_ever = generations[-1].best_ever
    else:
        best_ever = None
    members = (member for generation in generations for member in generation.members)
    return next(
        (member for member in members if (member.index, member.generation) == best_ever), None
    )


def fitness_estimate(member: MemberReport) -> Estimate | None:
    """Return the fitness of a member with its standard error; None if it failed."""
    if member.fitness is None or member.standard_error is None:
        return None
    return Estimate(mean=member.fitness, standard_error=member.standard_error)


def reports_by_member(generations: Sequence[GenerationReport]) -> dict[int, list[MemberReport]]:
    """Return the reports of every member in order, by its index."""
    reports: dict[int, list[MemberReport]] = {}
    for generation in generations:
        for member in generation.members:
            reports.setdefault(member.index, []).append(member)
    return reports


def lineage_of(
    generations: Sequence[GenerationReport], member: MemberReport
) -> tuple[MemberReport, ...]:
    """Return the reports of every generation in which a member's state was trained.

    Args:
        generations: In order.
        member: The member's report of one of them.

    Returns:
        In order, from the founder's first report to `member`. Training of an ancestor after its
        child's birth is left out.
    """
    by_member = reports_by_member(generations)
    line: list[MemberReport] = []
    current: MemberReport | None = member
    while current is not None:
        reports = [
            report for report in by_member[current.index] if report.generation <= current.generation
        ]
        line = [*reports, *line]
        parent = reports[0].parent
        current = origin_of(reports[0], by_member.get(parent, []) if parent is not None else [])
    return tuple(line)


def origin_of(first: MemberReport, parents: Sequence[MemberReport]) -> MemberReport | None:
    """Return the parent's report of the state that a member began with.

    Args:
        first: The member's first report.
        parents: All reports of its parent, in order.

    Returns:
        The parent's last report before the member's first; None if there is none. Its generation is
        always earlier, even in a damaged journal, so a loop over origins ends.
    """
    return next(
        (report for report in reversed(parents) if report.generation < first.generation), None
    )


def calibrated_rates(
    summary: RunSummary, line: Sequence[MemberReport]
) -> tuple[float, float] | None:
    """Return the first and the last calibrated learning rate of a lineage; None if it has none.

    Args:
        summary: The run.
        line: Result of `lineage_of`.
    """
    trained = {
        (report.index, report.generation)
        for report in line
        if report.hyperparameters.target_kl is not None
    }
    first = last = None
    for step in summary.steps:
        for member in step.members:
            if (member.index, step.generation) not in trained:
                continue
            if first is None:
                first = last = member.metrics.get("calibrated_lr")
            else:
                last = member.metrics.get("learning_rate") or last
    if first is None or last is None:
        return None
    return (first, last)


@dataclass(frozen=True, kw_only=True)
class BestSchedule:
    """Hyperparameter schedule of a run's best member.

    Attributes:
        stages: From its founder's first learning step to the evaluation that made it the best. They
            count the learning steps of its lineage. Where the learning rate was calibrated, `lr` is
            the first calibrated one: a replay searches from there.
        calibrated: First and last calibrated learning rate of its lineage; None if it has none.
        member: The best member's report of that evaluation.
        networks: Architecture changes in its lineage, as text; the schedule does not include them.
    """

    stages: tuple[ScheduleStage, ...]
    member: MemberReport
    calibrated: tuple[float, float] | None = None
    networks: tuple[str, ...] = ()


def best_schedule(summary: RunSummary) -> BestSchedule:
    """Return the hyperparameter schedule of a run's best member.

    Raises:
        ValueError: If no member was evaluated, or a generation is missing.
    """
    # 1. Check that the journal is complete, and find the best member.
    generations = summary.generations
    numbers = [generation.generation for generation in generations]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(
            f"A schedule needs all generations from 1 on, but the journal has {numbers}. Restore"
            " the journal from a copy."
        )
    member = best_member(generations)
    if member is None:
        raise ValueError(
            "The run has no evaluated member, so there is no best one. If its directory has a"
            " folder `best`, load that with evogrpo.GRPO.load."
        )
    # 2. Build one stage per sequence of generations with equal settings.
    # learning steps after each generation
    ends = [
        0,
        *(generation.step for generation in generations),
    ]
    line = lineage_of(generations, member)
    calibrated = calibrated_rates(summary, line)
    stages: list[ScheduleStage] = []
    for report in line:
        hyperparameters = report.hyperparameters
        if calibrated is not None and hyperparameters.target_kl is not None:
            hyperparameters = replace(hyperparameters, lr=calibrated[0])
        number = report.generation
        stage = ScheduleStage(
            hyperparameters=hyperparameters,
            generations=(ends[number] - ends[number - 1],),
            samples_per_step=generations[number - 1].samples_per_step or 0,
        )
        last = stages[-1] if stages else None
        if last and (last.hyperparameters, last.samples_per_step) == (
            stage.hyperparameters,
            stage.samples_per_step,
        ):
            stages[-1] = ScheduleStage(
                **{**vars(last), "generations": (*last.generations, *stage.generations)}
            )
        else:
            stages.append(stage)
    # 3. List architecture changes. Every report of a member repeats the changes of its birth.
    born = {report.index: report.changes[NETWORK] for report in line if NETWORK in report.changes}
    networks = tuple(f"{old} -> {new}" for old, new in born.values())
    return BestSchedule(
        stages=tuple(stages), member=member, calibrated=calibrated, networks=networks
    )


def best_hyperparameters(run_dir: str | Path) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a run's best members, for `GRPO.population(founders=)`.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        Those of the best member, then those of the newest generation's members in order of fitness,
        without duplicates and failed members. Where the learning rate was calibrated, `lr` is the
        last calibrated one.

    Raises:
        ValueError: If there is no run, no member was evaluated, or a journal value is invalid.
    """
    summary = read_summary(run_dir)
    generations = summary.generations
    best = best_member(generations)
    if best is None:
        raise ValueError(
            f"{run_dir} has no evaluated member yet. Wait for its first generation, or give another"
            " run."
        )
    healthy = [member for member in generations[-1].members if member.fitness is not None]
    ranked = sorted(healthy, key=lambda member: (-(member.fitness or 0.0), member.slot))
    # Members with equal hyperparameters may have calibrated to different rates: the best of them
    # counts.
    distinct: dict[Hyperparameters, MemberReport] = {}
    for member in (best, *ranked):
        distinct.setdefault(member.hyperparameters, member)
    found = []
    for hyperparameters, member in distinct.items():
        calibrated = None
        if hyperparameters.target_kl is not None:
            calibrated = calibrated_rates(summary, lineage_of(generations, member))
        found.append(
            hyperparameters if calibrated is None else replace(hyperparameters, lr=calibrated[1])
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class MemberHistory:
    """Results of one member in all its generations.

    Attributes:
        index: The member.
        origin: Its parent's report of the state that it began with; None for a founder.
        results: Its reports, one per generation, in order.
    """

    index: int
    origin: MemberReport | None
    results: tuple[MemberReport, ...]


def member_histories(summary: RunSummary) -> tuple[MemberHistory, ...]:
    """Return the history of every member that finished a generation.

    Parents come before their children.
    """
    reports = reports_by_member(summary.generations)
    histories: dict[int, MemberHistory] = {}
    for index in sorted(reports, key=lambda index: (reports[index][0].generation, index)):
        first = reports[index][0]
        if first.parent is not None:
            parent = histories.get(first.parent)
        else:
            parent = None
        histories[index] = MemberHistory(
            index=index,
            origin=origin_of(first, parent.results) if parent else None,
            results=tuple(reports[index]),
        )
    return tuple(histories.values())


def ancestors(summary: RunSummary, member: MemberReport | None) -> tuple[MemberReport, ...]:
    """Return the last report of each ancestor of a member: the one that its child started from.

    Args:
        summary: The run.
        member: The member's report of one generation, which is the last result; None returns ().
    """
    line = () if member is None else lineage_of(summary.generations, member)
    return tuple({report.index: report for report in line}.values())


def selection_score(member: MemberReport, summary: RunSummary) -> str:
    """Return the fitness that selection used of a member, such as `training fitness 41.2 ± 3.0`."""
    if summary.split == "training":
        label = "training fitness "
    else:
        label = ""
    return label + score_text(member.fitness, member.standard_error)


def birth_text(member: MemberRecord | MemberReport, evolvable: Iterable[str]) -> str:
    """Describe the origin of a member, a founder with its hyperparameters, as one line."""
    if member.parent is not None:
        return origin_text(member.parent, member.changes)
    if member.hyperparameters.target_kl is None:
        step_size = "lr"
    else:
        step_size = "target_kl"
    names = list(evolvable) or [step_size, "clip_coef", "group_size"]
    return (
        "founder with"
        f" {', '.join(f'{name} {number_text(getattr(member.hyperparameters, name))}' for name in names)}"
    )


def tree_lines(
    births: Sequence[MemberRecord], path: Collection[int]
) -> list[tuple[int, MemberRecord]]:
    """Return the lines of a printed lineage: the indentation and the member of each.

    One child of a member, its heir, continues its line without indentation; other children are
    indented below it. The heir is the child on the best member's path, or the child with most
    descendants. Indentation therefore grows with the logarithm of the number of members.

    Args:
        births: All births in order of index; a parent comes before its children.
        path: Indices of the best member's ancestors and itself.

    Raises:
        ValueError: If a child is older than its parent.
    """
    # 1. List the children of each member, and count its descendants and itself.
    indices = {birth.index for birth in births}
    children: dict[int | None, list[MemberRecord]] = {}
    # a parent that is missing from the journal makes its children roots of the tree
    for birth in births:
        if birth.parent is not None and birth.parent >= birth.index:
            raise ValueError(
                f"A parent must be older than its child, got #{birth.parent} of #{birth.index}."
            )
        children.setdefault(birth.parent if birth.parent in indices else None, []).append(birth)
    sizes: dict[int, int] = {}
    for birth in reversed(births):  # children before their parents
        sizes[birth.index] = 1 + sum(sizes[child.index] for child in children.get(birth.index, ()))
    # 2. Add the lines of each founder. The recursion is as deep as the indentation.
    lines: list[tuple[int, MemberRecord]] = []

    def add_line(first: MemberRecord, indent: int) -> None:
        """Add a line for a member, its heir, the heir's heir and so on.

        Other children are indented by one.
        """
        member: MemberRecord | None = first
        while member is not None:
            lines.append((indent, member))
            below = children.get(member.index, [])
            heir = max(
                below, key=lambda child: (child.index in path, sizes[child.index]), default=None
            )
            for child in below:
                if child is not heir:
                    add_line(child, indent + 1)
            member = heir

    for founder in children.get(None, []):
        add_line(founder, 0)
    return lines
