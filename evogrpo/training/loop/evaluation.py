"""Fitness of all members at the end of a generation, and warnings about rewards that teach nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.evaluation import FitnessResult
from evogrpo.config.search_space import MOST_SAMPLES
from evogrpo.data import LearnReport
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import GREEDY, ROLLOUTS, Fitness, FitnessConfig, paired_difference
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.reporting.step_records import EvaluationCost
from evogrpo.text import number_text, score_text
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn


class TooFewStartsError(ValueError):
    """A generation that was cut short says too little of a member."""


TOO_FEW = "fitness by rollouts needs rewards from at least 2 starts in the last half of a generation's steps"
REMEDY = "take more samples_per_step, smaller groups or more steps_per_generation, or fitness: validation"


def rollouts_of(run_state: RunState, slot: int) -> Fitness | None:
    """Return what a member earned in the last half of the generation under way; None with fewer than two starts.

    Of a generation that a budget has cut short, all steps count where the last half has fewer than two starts.
    """
    earned, taken = run_state.rollouts[slot], run_state.step_in_generation
    late = _averaged(earned, since=run_state.step - math.ceil(taken / 2))
    return _averaged(earned, since=run_state.step - taken) if late is None else late


def check_starts(population: Population, schedule: Schedule, experience: SharedExperience | None) -> None:
    """Refuse a run in which a member could come to have fewer than two starts to be judged by.

    Raises:
        ValueError: With what to change.
    """
    if experience is not None and experience.samplers == "rank":
        raise ValueError(
            f"{TOO_FEW}, but with samplers 'rank' some members may sample nothing: let samplers be 'equal', or measure "
            "fitness by validation"
        )
    space = population.space.for_samples_per_step(schedule.samples_per_step)
    sizes = [agent.hyperparameters.group_size for agent in population.agents if not agent.retired]
    if "group_size" in space:
        sizes.append(int(space["group_size"].bounds[1]))
    starts = schedule.late_starts(max(sizes))
    if starts < 2:
        raise ValueError(f"{TOO_FEW}, got {starts} in groups of {max(sizes)}: {REMEDY}")


def first_step(run_state: RunState) -> Fitness | None:
    """Return what all members together earned in the run's first step, start by start, before they had learnt.

    Where that is a single start, every member's score counts by itself.
    """
    found: dict[int, list[float]] = {}
    for scores in run_state.rollouts:
        for step, place, score in scores:
            if step == 0:
                found.setdefault(place, []).append(score)
    by_start = [math.fsum(scores) / len(scores) for scores in found.values()]
    every = by_start if len(by_start) > 1 else [score for scores in found.values() for score in scores]
    return Fitness.from_scores(every) if len(every) > 1 else None


def _averaged(scores: list[tuple[int, int, float]], *, since: int) -> Fitness | None:
    counted = {(step, place): score for step, place, score in scores if step >= since}
    if len(counted) < 2:
        return None
    keys = [step * MOST_SAMPLES + place for step, place in counted]  # the same for all members
    return Fitness.from_scores(list(counted.values()), keys=keys)


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
    population: Population, env: GroupEnvironment, config: FitnessConfig, run_state: RunState, *, questions: int
) -> dict[int, Measured]:
    """Measure every healthy member, by slot, and set what selection goes by as its fitness.

    Args:
        population: The members.
        env: Where they are asked.
        config: How they are measured.
        run_state: Where the run stands; what this took is counted.
        questions: The most validation questions that anybody is asked.

    Raises:
        TooFewStartsError: If selection goes by training rewards, and a member has too few of them.
    """
    earned = {agent.slot: rollouts_of(run_state, agent.slot) for agent in population.healthy}
    rollouts = {slot: fitness for slot, fitness in earned.items() if fitness is not None}
    if config.selection_measure == ROLLOUTS and len(rollouts) < len(earned):
        lacking = min(earned.keys() - rollouts.keys())
        raise TooFewStartsError(f"{TOO_FEW}, which member {population.agents[lacking].index} does not have: {REMEDY}")
    slots = _asked(config, rollouts, list(earned))
    began, assessed = population.executor.processes.now(), FitnessResult(fitness={}, tokens={})
    if slots:
        rival = None if run_state.best is None else run_state.best.fitness
        assessed = population.measure_fitness(
            env, "validation", slots=slots, questions=questions, config=config, rival=rival
        )
    costs = shared_out(assessed.tokens, population.executor.processes.now() - began)
    measured = {}
    for slot in earned:
        answers = {config.validation_measure: assessed.fitness[slot]} if slot in slots else {}
        trained = {ROLLOUTS: rollouts[slot]} if slot in rollouts else {}
        measured[slot] = Measured(
            by={**answers, **trained},
            questions=len(assessed.fitness[slot].scores) if slot in slots else 0,
            cost=costs.get(slot, EvaluationCost()),
        )
    for cost in costs.values():
        run_state.add_evaluation(cost)
    for agent in population.agents:  # only now: an evaluation that is abandoned has changed nothing
        agent.fitness = measured[agent.slot].by[config.selection_measure] if agent.slot in measured else None
    return measured


def shared_out(tokens: Mapping[int, int], seconds: float) -> dict[int, EvaluationCost]:
    """Return what each slot's evaluation took: its tokens, and its share of the time by these."""
    total = max(1, sum(tokens.values()))
    return {slot: EvaluationCost(tokens=own, seconds=seconds * own / total) for slot, own in tokens.items()}


def _asked(config: FitnessConfig, rollouts: Mapping[int, Fitness], healthy: Sequence[int]) -> list[int]:
    """Return the slots that are asked validation questions."""
    if config.by == "validation":
        return list(healthy)
    return candidates(rollouts, config.z, config.candidates) if config.uses_validation else []


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


Z = 4.0
"""Standard errors that both means must lie apart: it is looked after every generation."""


class GreedyGapCheck:
    """Watches how much members earn greedily and in training, and warns once if play must be random to be good."""

    def __init__(self) -> None:
        self._said = False

    def look_at(self, measured: Mapping[int, Measured]) -> None:
        """Take a generation in, by slot; warn if its best in training earns clearly less with greedy answers."""
        both = [each.by for each in measured.values() if GREEDY in each.by and ROLLOUTS in each.by]
        if self._said or not both:
            return
        best = max(both, key=lambda by: by[ROLLOUTS].mean)
        if clearly_less(best[GREEDY], best[ROLLOUTS]):
            self._said = True
            greedy, trained = (score_text(each.mean, each.standard_error) for each in (best[GREEDY], best[ROLLOUTS]))
            warn(
                f"the best member in training earns {trained} there, but {greedy} with greedy answers to validation "
                "questions: where good play is random, greedy fitness is blind to what members learn. Set fitness to "
                "{sampled: true}, which samples held-out answers as training does"
            )


def clearly_less(one: Fitness, other: Fitness) -> bool:
    """Tell whether one mean is clearly below another, on other questions."""
    return other.mean - one.mean > Z * math.hypot(one.standard_error, other.standard_error)


STEPS = 3
"""Learning steps that are looked at."""


class LearningSignalCheck:
    """Watches a run's first learning steps, and warns if nobody could learn from any of them.

    Args:
        steps: Learning steps of the whole run, where that is known: a shorter run is looked at as a whole.
        taken: Learning steps taken already: a run that goes on is past its first ones, and is not looked at.
    """

    def __init__(self, steps: int | None, *, taken: int = 0) -> None:
        self._all = min(STEPS, steps or STEPS)
        self._left = 0 if taken else self._all
        self._rewards: set[float] = set()

    def look_at(self, learned: Mapping[int, LearnReport]) -> None:
        """Take a learning step in, by slot; warn after the last that is looked at if no advantage was above 0."""
        if self._left == 0 or not learned:
            return
        reports = learned.values()
        if any(advantage and not math.isnan(advantage) for report in reports for advantage in report.advantages):
            self._left = 0  # something can be learnt
            return
        self._rewards |= {report.metrics["reward"] for report in reports if "reward" in report.metrics}
        self._left -= 1
        if self._left == 0:
            warn(self._words())

    def _words(self) -> str:
        steps = "learning step" if self._all == 1 else f"{self._all} learning steps"
        began = f"nothing could be learnt from the first {steps}"
        if not self._rewards:
            return f"{began}: no reward applied to any sample; let a reward function return numbers instead of None"
        every = "the rewards of a group were always equal"
        if len(self._rewards) == 1:
            every = f"every sample earned {number_text(next(iter(self._rewards)))}"
        return (
            f"{began}: {every}, and members learn from differences within groups. Give partial credit, begin with "
            "something easier (or harder, if all of it is solved), or raise temperature, group_size or samples_per_step"
        )
