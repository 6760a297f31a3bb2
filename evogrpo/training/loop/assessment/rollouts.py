"""Fitness from what members earn while they train: it costs nothing.

Every member acts from a prefix of the same block of starts in each learning step, so members are compared start by
start: one score per start and step, the mean of its group. Of a generation the last half of its steps counts, as the
first speak for what a member was: a child's for its parent.
"""

import math

from evogrpo.agents.population import Population
from evogrpo.config.search_space import MOST_SAMPLES
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.training.loop.progress import Progress
from evogrpo.training.schedule import Schedule


class TooFewStartsError(ValueError):
    """A generation that was cut short says too little of a member."""


TOO_FEW = "fitness by rollouts needs rewards from at least 2 starts in the last half of a generation's steps"
REMEDY = "take more samples_per_step, smaller groups or more steps_per_generation, or fitness: validation"


def rollouts_of(progress: Progress, slot: int) -> Fitness | None:
    """Return what a member earned in the last half of the generation under way; None with fewer than two starts.

    Of a generation that a budget has cut short, all steps count where the last half has fewer than two starts.
    """
    earned, taken = progress.rollouts[slot], progress.step_in_generation
    late = _averaged(earned, since=progress.step - math.ceil(taken / 2))
    return _averaged(earned, since=progress.step - taken) if late is None else late


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


def first_step(progress: Progress) -> Fitness | None:
    """Return what all members together earned in the run's first step, start by start, before they had learnt.

    Where that is a single start, every member's score counts by itself.
    """
    found: dict[int, list[float]] = {}
    for scores in progress.rollouts:
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
