"""From a population's state to plain numbers: member reports and metrics."""

import math
from collections.abc import Mapping

from evogrpo.agents.population import Population
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import Generation, Seat
from evogrpo.history.records import Estimate, MemberReport
from evogrpo.records import LearnReport
from evogrpo.training.progress import Progress


def generation_of(population: Population, progress: Progress) -> Generation:
    """Return what strategies see of the generation that has just been evaluated."""
    return Generation(
        number=progress.generation,
        samples_per_step=progress.samples_per_step,
        steps_per_generation=progress.steps_per_generation,
        seats=tuple(
            Seat()
            if agent.retired
            else Seat(
                member=agent.record(),
                fitness=agent.fitness,
                tokens=progress.member_tokens[agent.slot],
                seconds=progress.member_seconds[agent.slot],
            )
            for agent in population.agents
        ),
    )


def member_reports(population: Population, progress: Progress) -> tuple[MemberReport, ...]:
    """Describe every member at the end of a generation, in slot order; retired ones are left out."""
    births = {birth.index: birth for birth in population.lineage.births}
    return tuple(
        MemberReport(
            generation=progress.generation,
            slot=agent.slot,
            index=agent.index,
            parent=agent.parent,
            born=agent.born,
            hyperparameters=agent.hyperparameters,
            fitness=None if agent.fitness is None else agent.fitness.mean,
            standard_error=None if agent.fitness is None else agent.fitness.standard_error,
            failed=agent.failed,
            tokens=progress.member_tokens[agent.slot],
            seconds=progress.member_seconds[agent.slot],
            changes=births[agent.index].changes,
            reason=births[agent.index].reason,
            metrics=progress.mean_metrics(agent.slot),
        )
        for agent in population.agents
        if not agent.retired
    )


def estimate(fitness: Fitness) -> Estimate:
    """Return a fitness without its single scores."""
    return Estimate(mean=fitness.mean, standard_error=fitness.standard_error)


def finite_metrics(report: LearnReport) -> dict[str, float | None]:
    """Return a learning report's numbers; those that are infinite are None, as JSON has neither infinity nor NaN."""
    values = {**report.metrics, "optimizer_steps": report.optimizer_steps, "tokens": report.tokens}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def step_costs(progress: Progress, seconds: float, tokens: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return what a learning step that has been counted cost each member, by slot: see `learning.metrics.NAMES`."""
    total = max(1, sum(tokens.values()))
    return {
        slot: {"num_tokens": progress.slot_tokens[slot], "step_time": seconds * amount / total}
        for slot, amount in tokens.items()
    }
