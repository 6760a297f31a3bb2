"""What members are worth at the end of a generation, measured as the run's settings say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evogrpo.agents.population import Population
from evogrpo.agents.rollout.assessing import Assessed
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.evolution.fitness import ROLLOUTS, Fitness, paired_difference
from evogrpo.evolution.fitness_config import FitnessConfig
from evogrpo.history.estimates import EvaluationCost
from evogrpo.training.loop.assessment.rollouts import REMEDY, TOO_FEW, TooFewStartsError, rollouts_of
from evogrpo.training.loop.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one member is worth at the end of a generation.

    Attributes:
        by: Its fitness by how it was measured; see `evogrpo.evolution.fitness.MEASURES`.
        questions: How many validation questions it was asked.
        cost: What that took.
    """

    by: Mapping[str, Fitness] = field(default_factory=dict)
    questions: int = 0
    cost: EvaluationCost = field(default_factory=EvaluationCost)


def measure(
    population: Population, env: GroupEnvironment, config: FitnessConfig, progress: Progress, *, questions: int
) -> dict[int, Measured]:
    """Measure every healthy member, by slot, and set what selection goes by as its fitness.

    Args:
        population: The members.
        env: Where they are asked.
        config: How they are measured.
        progress: Where the run stands; what this took is counted.
        questions: The most validation questions that anybody is asked.

    Raises:
        TooFewStartsError: If selection goes by training rewards, and a member has too few of them.
    """
    earned = {agent.slot: rollouts_of(progress, agent.slot) for agent in population.healthy}
    rollouts = {slot: fitness for slot, fitness in earned.items() if fitness is not None}
    if config.selecting == ROLLOUTS and len(rollouts) < len(earned):
        lacking = min(earned.keys() - rollouts.keys())
        raise TooFewStartsError(f"{TOO_FEW}, which member {population.agents[lacking].index} does not have: {REMEDY}")
    slots = _asked(config, rollouts, list(earned))
    began, assessed = population.crew.processes.now(), Assessed(fitness={}, tokens={})
    if slots:
        rival = None if progress.best is None else progress.best.fitness
        assessed = population.assess(env, "validation", slots=slots, questions=questions, config=config, rival=rival)
    costs = shared_out(assessed.tokens, population.crew.processes.now() - began)
    measured = {}
    for slot in earned:
        answers = {config.asking: assessed.fitness[slot]} if slot in slots else {}
        trained = {ROLLOUTS: rollouts[slot]} if slot in rollouts else {}
        measured[slot] = Measured(
            by={**answers, **trained},
            questions=len(assessed.fitness[slot].scores) if slot in slots else 0,
            cost=costs.get(slot, EvaluationCost()),
        )
    for cost in costs.values():
        progress.add_evaluation(cost)
    for agent in population.agents:  # only now: an evaluation that is abandoned has changed nothing
        agent.fitness = measured[agent.slot].by[config.selecting] if agent.slot in measured else None
    return measured


def shared_out(tokens: Mapping[int, int], seconds: float) -> dict[int, EvaluationCost]:
    """Return what each slot's evaluation took: its tokens, and its share of the time by these."""
    total = max(1, sum(tokens.values()))
    return {slot: EvaluationCost(tokens=own, seconds=seconds * own / total) for slot, own in tokens.items()}


def _asked(config: FitnessConfig, rollouts: Mapping[int, Fitness], healthy: Sequence[int]) -> list[int]:
    """Return the slots that are asked validation questions."""
    if config.by == "validation":
        return list(healthy)
    return candidates(rollouts, config.z, config.candidates) if config.asks else []


def candidates(fitness: Mapping[int, Fitness], z: float, most: int) -> list[int]:
    """Return the best slots, and those within z standard errors of the best, at most so many; in slot order."""
    ranked = sorted(fitness, key=lambda slot: (-fitness[slot].mean, slot))
    near = [slot for slot in ranked if _within(fitness[ranked[0]], fitness[slot], z)]
    return sorted(near[:most])


def _within(best: Fitness, other: Fitness, z: float) -> bool:
    if len(best.by_key.keys() & other.by_key.keys()) < 2:
        return best.mean - other.mean <= z * math.hypot(best.standard_error, other.standard_error)
    difference, standard_error = paired_difference(best, other)
    return difference <= z * standard_error
