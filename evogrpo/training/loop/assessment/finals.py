"""The best members of a run once more, on questions that selection never saw: who was lucky does not stay the best."""

import math
from collections.abc import Sequence

from evogrpo.envs.groups import GroupEnvironment
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.fitness_config import FitnessConfig
from evogrpo.evolution.kept import Kept
from evogrpo.training.loop.progress import Progress


def check_second_set(env: GroupEnvironment, config: FitnessConfig) -> None:
    """Refuse a second set that leaves too few validation questions for selection.

    Raises:
        ValueError: With how many there are.
    """
    size = env.size("validation")
    if config.second_set and size - config.second_set < 2:
        raise ValueError(
            f"second_set must leave at least 2 of the {size} validation questions to selection, got "
            f"{config.second_set}: take fewer, or hold out more (validation_size)"
        )


def second_set(env: GroupEnvironment, config: FitnessConfig) -> tuple[int, ...]:
    """Return the positions of the second set: the last questions of the validation split."""
    size = env.size("validation")
    return tuple(range(size - config.second_set, size))


def enlist(progress: Progress, kept: Kept, state: object, most: int) -> None:
    """Keep a generation's best among the finalists, and forget the worst of them if there are too many now."""
    finalists = progress.finalists
    finalists.keep(kept, state)  # type: ignore[arg-type]
    if len(finalists) > most:
        worst = min(finalists.seen, key=lambda each: (each.fitness.mean, -each.generation))
        finalists.drop([worst.key])


def winner(finalists: Sequence[Kept], second: Sequence[Fitness], *, pooled: bool) -> int:
    """Return the place of the best finalist: by all its answers, or by those on the second set alone.

    Args:
        finalists: With what they earned when they were chosen.
        second: What they earned on the second set.
        pooled: Whether both were measured alike, so that they count together, question by question.
    """

    def worth(place: int) -> float:
        first, again = finalists[place].fitness, second[place]
        if not pooled:
            return again.mean
        answers = len(first.scores), len(again.scores)
        return math.fsum((first.mean * answers[0], again.mean * answers[1])) / sum(answers)

    return max(range(len(finalists)), key=lambda place: (worth(place), -place))
