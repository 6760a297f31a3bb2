"""The hyperparameter schedule of a member: what the state that it has learnt was trained with, from its founder on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from evogrpo.evolution.lineage import NETWORK
from evogrpo.evolution.strategies import ScheduleStage
from evogrpo.history.checked_fields import JournalFields
from evogrpo.history.descent import line_of, winner_of
from evogrpo.history.records import GenerationReport, MemberReport
from evogrpo.persistence.journal import latest_generations


@dataclass(frozen=True, kw_only=True)
class FoundSchedule:
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


def found_schedule(events: Sequence[Mapping[str, Any]]) -> FoundSchedule:
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
    member = winner_of(generations)
    if member is None:
        raise ValueError("no member was evaluated yet, so there is no best one: let the run finish a generation")
    lengths = _lengths(generations)
    samples = _samples(events, latest)
    line = line_of(generations, member)
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
    return FoundSchedule(stages=tuple(stages), member=member, networks=networks)


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
