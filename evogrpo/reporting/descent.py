"""Descent of the best member: its ancestors and their hyperparameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.fitness import GREEDY, SAMPLED
from evogrpo.evolution.lineage import NETWORK
from evogrpo.evolution.strategies import ScheduleStage
from evogrpo.reporting.records import GenerationReport, MemberReport
from evogrpo.reporting.step_records import Estimate, JournalFields
from evogrpo.storage.journal import latest_generations, read_journal


def best_member(generations: Sequence[GenerationReport]) -> MemberReport | None:
    """Return the best member ever, as it was when it became that; None before any member was evaluated.

    Args:
        generations: Those that count, in order, as `evogrpo.storage.journal.latest_generations` returns them.
    """
    named = generations[-1].best_ever if generations else None
    members = (member for generation in generations for member in generation.members)
    return next((member for member in members if (member.index, member.generation) == named), None)


def fitness_estimate(member: MemberReport) -> Estimate | None:
    """Return what a member is judged by beside others of its run: held-out questions, where it was asked any."""
    for measure in (GREEDY, SAMPLED):
        if measure in member.measured:
            return member.measured[measure]
    if member.fitness is None or member.standard_error is None:
        return None
    return Estimate(mean=member.fitness, standard_error=member.standard_error)


def lineage_of(generations: Sequence[GenerationReport], member: MemberReport) -> tuple[MemberReport, ...]:
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


@dataclass(frozen=True, kw_only=True)
class BestSchedule:
    """What evolution has found: the schedule of a run's best member.

    Attributes:
        stages: From its founder's first learning step to the evaluation that it won by. They count the steps that its
            state has taken, whatever the run did meanwhile with others.
        member: The best member, as it was then.
        networks: How its line's network changed, in words, if it did: a schedule does not hold that.
    """

    stages: tuple[ScheduleStage, ...]
    member: MemberReport
    networks: tuple[str, ...] = ()


def best_schedule(events: Sequence[Mapping[str, Any]]) -> BestSchedule:
    """Read the schedule of a run's best member out of its journal.

    Args:
        events: What `read_journal` returned; untrusted input.

    Raises:
        ValueError: If no member was evaluated, a generation is missing, or a value is not what it must be.
    """
    latest = latest_generations(events)
    generations = [GenerationReport.from_json(event) for event in latest]
    numbers = [generation.generation for generation in generations]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"a schedule needs every generation from 1 on, but the journal has {numbers}: restore it")
    member = best_member(generations)
    if member is None:
        raise ValueError(
            "the journal holds no evaluated member: the run has not finished a generation, or its journal was lost. A "
            "best member that was stored still loads: evogrpo.GRPO.load('RUN_DIR/best')"
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
    networks = tuple(f"{old} -> {new}" for each in born for old, new in [each.changes.get(NETWORK, ("", ""))] if new)
    return BestSchedule(stages=tuple(stages), member=member, networks=networks)


def _lengths(generations: Sequence[GenerationReport]) -> dict[int, int]:
    """Return the learning steps of every generation, by its number."""
    ends = [0, *(generation.step for generation in generations)]
    return {number: after - before for number, (before, after) in enumerate(pairwise(ends), start=1)}


def _samples(events: Sequence[Mapping[str, Any]], latest: Sequence[Mapping[str, Any]]) -> Callable[[int, int], int]:
    """Return how many samples a slot's member collected in a learning step of a generation: plans may change that."""
    began = next((event for event in events if event["event"] == "run"), {})
    now, own = JournalFields(began, "the run event").whole("samples_per_step"), None
    told: dict[int, tuple[int, tuple[float, ...] | None]] = {}
    for event in latest:
        number = int(event["generation"])
        told[number] = now, own
        if isinstance(event.get("plan"), Mapping):
            plan = JournalFields(event["plan"], f"the plan of generation {number}")
            changed = plan.whole_or_none("samples_per_step")
            now, own = now if changed is None else changed, plan.numbers_or_none("samples")

    def of(generation: int, slot: int) -> int:
        common, each = told[generation]
        if each is None:
            return common
        # A member that collects nothing learns from what others collect, as many as if each collected its own.
        return int(each[slot]) if 0 <= slot < len(each) and each[slot] else common

    return of


def best_hyperparameters(run_dir: str | Path) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a run's best members, for `GRPO.population(founders=)`; its weights play no part.

    Args:
        run_dir: The run's folder; it may be under way.

    Returns:
        Those of the best member as it won, then those of the members of the newest generation, the fittest first; none
        twice, and none of members that failed.

    Raises:
        ValueError: If there is no run, no member was evaluated, or a value in its journal is not what it must be.
    """
    events = read_journal(Path(run_dir) / "journal.jsonl")
    generations = [GenerationReport.from_json(event) for event in latest_generations(events)]
    winner = best_member(generations)
    if winner is None:
        raise ValueError(f"no member of {run_dir} was evaluated yet, so there are no best ones: name another run")
    alive = [member for member in generations[-1].members if member.fitness is not None]
    ranked = sorted(alive, key=lambda member: (-(member.fitness or 0.0), member.slot))
    return tuple(dict.fromkeys(member.hyperparameters for member in (winner, *ranked)))
