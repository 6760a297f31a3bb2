"""Lineage of a run: best member, ancestors, hyperparameter schedule, and the tree of births."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.evolution.fitness import GREEDY, SAMPLED
from evogrpo.evolution.history import NETWORK, MemberRecord
from evogrpo.evolution.strategies import ScheduleStage
from evogrpo.reporting.records import GenerationReport, MemberReport
from evogrpo.reporting.step_records import REMEDY, Estimate, JournalFields
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.storage.journal import latest_generations, read_journal


def best_member(generations: Sequence[GenerationReport]) -> MemberReport | None:
    """Return the report with which the run's best member became the best; None before the first evaluation.

    Args:
        generations: In order, as `evogrpo.storage.journal.latest_generations` returns them.
    """
    named = generations[-1].best_ever if generations else None
    members = (member for generation in generations for member in generation.members)
    return next((member for member in members if (member.index, member.generation) == named), None)


def fitness_estimate(member: MemberReport) -> Estimate | None:
    """Return the estimate that members are compared by: validation questions where evaluated, else training rewards."""
    for measure in (GREEDY, SAMPLED):
        if measure in member.measured:
            return member.measured[measure]
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


def lineage_of(generations: Sequence[GenerationReport], member: MemberReport) -> tuple[MemberReport, ...]:
    """Return the reports of every generation in which a member's state was trained.

    Args:
        generations: In order.
        member: The member's report of one of them.

    Returns:
        The founder's first report first, `member` last. Training of an ancestor after its child's birth is left out.
    """
    by_member = reports_by_member(generations)
    line: list[MemberReport] = []
    current: MemberReport | None = member
    while current is not None:
        reports = [report for report in by_member[current.index] if report.generation <= current.generation]
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
        The parent's last report before the member's first; None if there is none. It is of an earlier generation even
        if the journal is corrupt, so following origins terminates.
    """
    return next((report for report in reversed(parents) if report.generation < first.generation), None)


@dataclass(frozen=True, kw_only=True)
class BestSchedule:
    """Hyperparameter schedule of a run's best member.

    Attributes:
        stages: From its founder's first learning step to the evaluation that made it the best. They count the learning
            steps of its lineage.
        member: The best member's report of that evaluation.
        networks: Architecture changes in its lineage, as text; the schedule does not include them.
    """

    stages: tuple[ScheduleStage, ...]
    member: MemberReport
    networks: tuple[str, ...] = ()


def best_schedule(events: Sequence[Mapping[str, Any]]) -> BestSchedule:
    """Return the hyperparameter schedule of a run's best member.

    Args:
        events: Result of `read_journal`; untrusted input.

    Raises:
        ValueError: If no member was evaluated, a generation is missing, or a value is invalid.
    """
    latest = latest_generations(events)
    generations = [GenerationReport.from_json(event) for event in latest]
    numbers = [generation.generation for generation in generations]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"a schedule needs all generations from 1 on, but the journal has {numbers}: restore it.")
    member = best_member(generations)
    if member is None:
        raise ValueError(
            "The journal has no evaluated member. If RUN_DIR/best exists, evogrpo.GRPO.load('RUN_DIR/best') loads the "
            "best member."
        )
    lengths = _lengths(generations)
    samples = _samples(events, latest)
    line = lineage_of(generations, member)
    stages: list[ScheduleStage] = []
    for report in line:
        number = report.generation
        stage = ScheduleStage(
            hyperparameters=report.hyperparameters,
            generations=(lengths[number],),
            samples_per_step=samples(number, report.slot),
        )
        last = stages[-1] if stages else None
        if last and (last.hyperparameters, last.samples_per_step) == (stage.hyperparameters, stage.samples_per_step):
            stages[-1] = ScheduleStage(**{**vars(last), "generations": (*last.generations, lengths[number])})
        else:
            stages.append(stage)
    born = [line[0], *(after for before, after in pairwise(line) if before.index != after.index)]
    networks = tuple(
        f"{old} -> {new}" for report in born for old, new in [report.changes.get(NETWORK, ("", ""))] if new
    )
    return BestSchedule(stages=tuple(stages), member=member, networks=networks)


def _lengths(generations: Sequence[GenerationReport]) -> dict[int, int]:
    """Return the number of learning steps of every generation, by generation."""
    ends = [0, *(generation.step for generation in generations)]
    return {number: after - before for number, (before, after) in enumerate(pairwise(ends), start=1)}


def _samples(events: Sequence[Mapping[str, Any]], latest: Sequence[Mapping[str, Any]]) -> Callable[[int, int], int]:
    """Return a function (generation, slot) -> samples per learning step, which plans may change."""
    run_event = next((event for event in events if event["event"] == "run"), {})
    common_samples, slot_samples = JournalFields(run_event, "the run event").whole("samples_per_step"), None
    samples_of: dict[int, tuple[int, tuple[float, ...] | None]] = {}
    for event in latest:
        number = int(event["generation"])
        samples_of[number] = common_samples, slot_samples
        if isinstance(event.get("plan"), Mapping):
            plan = JournalFields(event["plan"], f"the plan of generation {number}")
            changed = plan.whole_or_none("samples_per_step")
            common_samples, slot_samples = (
                common_samples if changed is None else changed,
                plan.numbers_or_none("samples"),
            )

    def of(generation: int, slot: int) -> int:
        common, of_slots = samples_of[generation]
        if of_slots is None:
            return common
        # A member that samples nothing learns from as many samples of other members.
        return int(of_slots[slot]) if 0 <= slot < len(of_slots) and of_slots[slot] else common

    return of


def best_hyperparameters(run_dir: str | Path) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a run's best members, for `GRPO.population(founders=)`.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        Those of the best member, then those of the newest generation's members in order of fitness, without duplicates
        and failed members.

    Raises:
        ValueError: If there is no run, no member was evaluated, or a journal value is invalid.
    """
    events = read_journal(Path(run_dir) / "journal.jsonl")
    generations = [GenerationReport.from_json(event) for event in latest_generations(events)]
    best = best_member(generations)
    if best is None:
        raise ValueError(f"{run_dir} has no evaluated member yet: name another run.")
    healthy = [member for member in generations[-1].members if member.fitness is not None]
    ranked = sorted(healthy, key=lambda member: (-(member.fitness or 0.0), member.slot))
    return tuple(dict.fromkeys(member.hyperparameters for member in (best, *ranked)))


@dataclass(frozen=True, kw_only=True)
class MemberHistory:
    """Results of one member in all its generations.

    Attributes:
        index: The member.
        founder: Index of its first ancestor.
        origin: Its parent's report of the state that it began with; None for a founder.
        results: Its reports, one per generation, in order.
    """

    index: int
    founder: int
    origin: MemberReport | None
    results: tuple[MemberReport, ...]


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """One member on the path from a founder to a member.

    Attributes:
        index: The ancestor.
        parent: Its parent's index, or None for a founder.
        generations: First and last generation in which the state was this ancestor's.
        hyperparameters: Its hyperparameters.
        changes: (old, new) of every hyperparameter that changed at its birth, by name.
        reason: Reason of its birth.
        result: Its last report on the path: the one that its child started from.
    """

    index: int
    parent: int | None
    generations: tuple[int, int]
    hyperparameters: Hyperparameters
    changes: Mapping[str, tuple[Value, Value]]
    reason: str
    result: MemberReport


def member_histories(summary: RunSummary) -> tuple[MemberHistory, ...]:
    """Return the history of every member that finished a generation; parents come before their children."""
    reports = reports_by_member(summary.generations)
    histories: dict[int, MemberHistory] = {}
    for index in sorted(reports, key=lambda index: (reports[index][0].generation, index)):
        first = reports[index][0]
        parent = histories.get(first.parent) if first.parent is not None else None
        histories[index] = MemberHistory(
            index=index,
            founder=parent.founder if parent else index,
            origin=origin_of(first, parent.results) if parent else None,
            results=tuple(reports[index]),
        )
    return tuple(histories.values())


def fitness_before(summary: RunSummary) -> dict[tuple[int, int], float | None]:
    """Return the fitness of the state with which every member began each of its generations.

    Returns:
        By index and generation: its own of the previous generation; in its first one, its parent's before its birth, or
        the untrained baseline's for a founder; None where unknown.
    """
    baseline = None if summary.start is None else summary.start.mean
    fitness: dict[tuple[int, int], float | None] = {}
    for history in member_histories(summary):
        founder = history.results[0].parent is None
        before = history.origin.fitness if history.origin is not None else baseline if founder else None
        for result in history.results:
            fitness[result.index, result.generation] = before
            before = result.fitness
    return fitness


def ancestors(summary: RunSummary, member: MemberReport | None) -> tuple[Ancestor, ...]:
    """Return the ancestors of a member, founder first and the member itself last.

    Args:
        summary: The run.
        member: The member's report of one generation; None returns ().
    """
    line = () if member is None else lineage_of(summary.generations, member)
    chain: list[Ancestor] = []
    for index in dict.fromkeys(report.index for report in line):
        reports = [report for report in line if report.index == index]
        first = reports[0]
        chain.append(
            Ancestor(
                index=index,
                parent=first.parent,
                generations=(first.generation, reports[-1].generation),
                hyperparameters=first.hyperparameters,
                changes=first.changes,
                reason=first.reason,
                result=reports[-1],
            )
        )
    return tuple(chain)


def read_births(events: Sequence[Mapping[str, Any]]) -> tuple[MemberRecord, ...]:
    """Return every birth by index, without those of generations that were discarded on resume.

    Raises:
        ValueError: If a value is invalid.
    """
    births: dict[int, MemberRecord] = {}
    for birth in _births(events):
        births.setdefault(birth.index, birth)
    return tuple(births[index] for index in sorted(births))


def _births(events: Sequence[Mapping[str, Any]]) -> Iterator[MemberRecord]:
    """Yield births of the run event, of generations and of plans; a birth can occur several times."""
    run = next((event for event in events if event["event"] == "run"), {})
    if "members" in run:
        for founder in JournalFields(run, "the run event").objects("members", "a founder of the run event"):
            yield _birth(founder, born=0, reason="founder")
    for event in latest_generations(events):
        report = GenerationReport.from_json(event)
        for member in report.members:
            names = ("index", "parent", "born", "slot", "hyperparameters", "changes", "reason")
            yield MemberRecord(**{name: getattr(member, name) for name in names})
        plan = event.get("plan")
        if isinstance(plan, Mapping) and "children" in plan:
            where = f"a child of the plan of generation {report.generation}"
            for child in JournalFields(plan, where).objects("children", where):
                reason, changes = child.text("reason"), child.changes("changes")
                yield _birth(child, born=report.generation, changes=changes, reason=reason)


def _birth(fields: JournalFields, **others: Any) -> MemberRecord:
    return MemberRecord(
        index=fields.whole("index"),
        parent=fields.whole_or_none("parent"),
        slot=fields.whole("slot"),
        hyperparameters=fields.hyperparameters("hyperparameters"),
        **others,
    )


_MAX_UNCOLLAPSED = 2  # longer rows of members are collapsed into one line


@dataclass(frozen=True, kw_only=True)
class LineageTree:
    """Lineage of a run.

    Attributes:
        births: Every birth by index; a parent comes before its children.
        results: Reports of each evaluated member in order, by its index.
        winner: The best member; None before the first evaluation.
        path: Indices of the best member's ancestors and itself, its founder first.
    """

    births: tuple[MemberRecord, ...]
    results: Mapping[int, Sequence[MemberReport]]
    winner: MemberReport | None
    path: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("generation", "fitness", "standard_error", "failed")
        members = [
            {
                **{name: value for name, value in vars(birth).items() if name != "architecture"},
                "hyperparameters": birth.hyperparameters.to_json(),
                "changes": {name: list(change) for name, change in birth.changes.items()},
                "results": [
                    {name: getattr(report, name) for name in names} for report in self.results.get(birth.index, ())
                ],
            }
            for birth in self.births
        ]
        winner = None if self.winner is None else self.winner.index
        return {"winner": winner, "path": list(self.path), "members": members}


@dataclass(frozen=True, kw_only=True)
class TreeLine:
    """One line of a printed lineage tree.

    Attributes:
        indent: Depth.
        members: One member, or several that are collapsed.
        wins: True for the best member and its ancestors.
        skips: True if `members` are consecutive descendants; False if they are siblings without children.
    """

    indent: int
    members: tuple[MemberRecord, ...]
    wins: bool
    skips: bool = False


def read_lineage(events: Sequence[Mapping[str, Any]]) -> LineageTree:
    """Return the lineage of a run.

    Args:
        events: Result of `read_journal`; untrusted input.

    Raises:
        ValueError: If a value is invalid.
    """
    summary, births = summarise(events), read_births(events)
    for birth in births:
        if birth.parent is not None and birth.parent >= birth.index:
            raise ValueError(f"parent index {birth.parent} must be smaller than its child's, {birth.index}: {REMEDY}")
    best = best_member(summary.generations)
    line = () if best is None else lineage_of(summary.generations, best)
    return LineageTree(
        births=births,
        results=reports_by_member(summary.generations),
        winner=best,
        path=tuple(dict.fromkeys(report.index for report in line)),
    )


def tree_lines(tree: LineageTree, *, all_members: bool = False) -> tuple[TreeLine, ...]:
    """Return the lines of a printed lineage: the main line of descent continues below a member, others are indented.

    Args:
        tree: The lineage.
        all_members: Print one line per member. By default, more than two siblings without children share one line,
            as does the middle of a line of descent without branches, except on the best member's path.
    """
    return tuple(_Layout(tree, all_members).lines())


@dataclass
class _Layout:
    """Orders the tree: the main line follows the best member's path, else the child with most descendants.

    A side line therefore has at most half as many members as its parent line, which bounds the indentation.
    """

    tree: LineageTree
    all_members: bool
    children: dict[int | None, list[MemberRecord]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def lines(self) -> Iterator[TreeLine]:
        indices = {birth.index for birth in self.tree.births}
        for birth in self.tree.births:
            # A parent that is missing from the journal makes its children roots of the tree.
            self.children.setdefault(birth.parent if birth.parent in indices else None, []).append(birth)
        for birth in reversed(self.tree.births):
            self.sizes[birth.index] = 1 + sum(self.sizes[child.index] for child in self.children.get(birth.index, ()))
        for group in self._grouped(self.children.get(None, [])):
            yield from self._line(group, 0)

    def _line(self, group: tuple[MemberRecord, ...], indent: int) -> Iterator[TreeLine]:
        """Yield collapsed siblings, or one member and its main line of descent."""
        if len(group) > 1:
            yield TreeLine(indent=indent, members=group, wins=False)
            return
        unbranched: list[MemberRecord] = []  # members of the main line since its last branch
        member: MemberRecord | None = group[0]
        while member is not None:
            children = self.children.get(member.index, [])
            heir = max(children, key=lambda child: (self._wins(child), self.sizes[child.index]), default=None)
            siblings = [child for child in children if child is not heir]
            unbranched.append(member)
            if siblings or heir is None or self._wins(member):
                yield from self._unbranched_lines(unbranched, indent)
                unbranched = []
            for siblings_group in self._grouped(siblings):
                yield from self._line(siblings_group, indent + 1)
            member = heir

    def _unbranched_lines(self, line: Sequence[MemberRecord], indent: int) -> Iterator[TreeLine]:
        """Yield members of one line of descent without branches before the last; collapse a long middle."""
        middle = line[1:-1]
        collapse = len(middle) > _MAX_UNCOLLAPSED and not self.all_members
        for member in line[:1] if collapse else line[:-1]:
            yield self._single(member, indent)
        if collapse:
            yield TreeLine(indent=indent, members=tuple(middle), wins=False, skips=True)
        yield self._single(line[-1], indent)

    def _single(self, member: MemberRecord, indent: int) -> TreeLine:
        return TreeLine(indent=indent, members=(member,), wins=self._wins(member))

    def _grouped(self, siblings: Sequence[MemberRecord]) -> Iterator[tuple[MemberRecord, ...]]:
        """Yield siblings one by one, but many childless ones outside the best path as one group."""
        childless = [birth for birth in siblings if not self.children.get(birth.index) and not self._wins(birth)]
        collapse = len(childless) > _MAX_UNCOLLAPSED and not self.all_members
        yield from ((birth,) for birth in siblings if not (collapse and birth in childless))
        if collapse:
            yield tuple(childless)

    def _wins(self, member: MemberRecord) -> bool:
        return member.index in self.tree.path
