"""Choice of the best member of a run, and of the finalists that compete for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from evogrpo.algorithms.population import Population
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import Fitness, FitnessConfig, ahead
from evogrpo.reporting.records import EvaluationCost, Finalist, FinalistsReport
from evogrpo.training.loop.evaluation import Measured
from evogrpo.training.loop.run_logger import estimate
from evogrpo.training.loop.run_state import Best, RunState


def second_set(env: GroupEnvironment, config: FitnessConfig) -> tuple[int, ...]:
    """Return the indices of the second set: the last questions of the validation split."""
    size = env.size("validation")
    return tuple(range(size - config.second_set, size))


def winner(finalists: Sequence[Best], second: Sequence[Fitness], *, pooled: bool) -> int:
    """Return the position of the best finalist.

    Args:
        finalists: Finalists with the fitness by which they were chosen.
        second: Their fitness on the second set.
        pooled: Weight both by their numbers of questions; False uses the second set alone.
    """

    def worth(place: int) -> float:
        first, again = finalists[place].fitness, second[place]
        if not pooled:
            return again.mean
        answers = len(first.scores), len(again.scores)
        return math.fsum((first.mean * answers[0], again.mean * answers[1])) / sum(answers)

    return max(range(len(finalists)), key=lambda place: (worth(place), -place))


def update_best(
    population: Population, run_state: RunState, config: FitnessConfig, measured: Mapping[int, Measured]
) -> int:
    """Compare the best of a generation with the best so far, make it a finalist, and return its slot.

    Args:
        population: The members.
        run_state: State of the run; its best member and finalists are updated.
        config: Measure of fitness. The best is chosen on validation questions if there are any.
        measured: Fitness of the members, by slot.
    """
    by = config.validation_measure if config.uses_validation else config.selection_measure
    fitness = {slot: each.by[by] for slot, each in measured.items() if by in each.by}
    slot = min(fitness, key=lambda slot: (-fitness[slot].mean, slot))
    best = Best(
        member=population.agents[slot].record(),
        generation=run_state.generation,
        fitness=fitness[slot],
        state=population.members.banks.snapshot([slot])[slot],
    )
    if run_state.best is None or ahead(best.fitness, run_state.best.fitness):
        run_state.best = best
    if config.second_set:
        finalists = run_state.finalists
        finalists.append(best)
        if len(finalists) > config.finalists:
            finalists.remove(min(finalists, key=lambda each: (each.fitness.mean, -each.generation)))
    return slot


def choose_finalist(
    run_state: RunState, config: FitnessConfig, second: Sequence[Fitness], cost: EvaluationCost
) -> FinalistsReport:
    """Make the best finalist the best member.

    Args:
        run_state: State of the run; its best member is updated.
        config: Measure of fitness.
        second: Fitness of the finalists on the second set.
        cost: Cost of that evaluation.
    """
    finalists = run_state.finalists
    place = winner(finalists, second, pooled=config.uses_validation)
    run_state.best = best = replace(finalists[place], second=second[place])
    run_state.finalists_generation = run_state.generation
    return FinalistsReport(
        questions=len(second[place].scores),
        index=best.index,
        generation=best.generation,
        finalists=tuple(
            Finalist(
                index=each.index,
                generation=each.generation,
                chosen=estimate(each.fitness),
                second=estimate(again),
            )
            for each, again in zip(finalists, second, strict=True)
        ),
        measure=config.validation_measure,
        cost=cost,
    )
