"""What a run will do, computed before it starts: the arithmetic of a dry run that all kinds of runs share."""

from dataclasses import dataclass

from evogrpo.envs.protocol import SPLITS, GroupEnvironment
from evogrpo.evolution.shared_experience import SharedExperience, max_sources
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.sections import AnyConfig


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often what happens, whoever learns.

    Attributes:
        groups: Starts per learning step and member, by each group size that a member can come to have.
        learning_steps: In all; None when something else than a number of generations ends it.
        evaluated: Completions, or episodes, from held-out starts in the run; None likewise.
        validation: Held-out starts of one evaluation of a member.
    """

    groups: dict[int, int]
    learning_steps: int | None
    evaluated: int | None
    validation: int

    @classmethod
    def of(cls, config: AnyConfig, env: GroupEnvironment) -> "Rounds":
        """Count them."""
        schedule, size = config.schedule, config.population.size
        validation = limited(env.size("validation"), schedule.validation_questions)
        test = limited(env.size("test"), schedule.test_questions)
        generations = schedule.generations
        return cls(
            groups={group: schedule.samples_per_step // group for group in possible(config, "group_size")},
            learning_steps=None if generations is None else generations * schedule.steps_per_generation,
            evaluated=None if generations is None else validation * (1 + size * generations) + 2 * test,
            validation=validation,
        )

    def groups_row(self) -> str:
        """Say what groups a step may consist of."""
        groups = ", ".join(f"{pluralize(count, 'group')} of {group}" for group, count in self.groups.items())
        return f"{groups} per member and learning step"

    def steps_row(self, config: AnyConfig, held_out: str) -> str:
        """Say how many learning steps there are, and how much is evaluated, of what."""
        if self.learning_steps is None or self.evaluated is None:
            return "until what the schedule allows is spent"
        schedule = config.schedule
        generations = pluralize(schedule.generations or 0, "generation")
        return (
            f"{self.learning_steps} = {generations} × {schedule.steps_per_generation}, and "
            f"{count_text(self.evaluated)} {held_out}"
        )


def samples_row(config: AnyConfig, samples: str) -> str:
    """Say how many completions, or episodes, a learning step takes."""
    size, each, most = config.population.size, config.schedule.samples_per_step, config.agent.objective.dynamic_sampling
    times = "once" if most == 1 else f"up to {most} times"
    refills = f"; groups whose rewards are all equal are sampled anew {times}" if most else ""
    each_learns = "" if config.experience is None else _learnt_from(config.experience, size, each)
    return f"{each} {samples} per member and learning step, {size * each} in all{each_learns}{refills}"


def _learnt_from(experience: SharedExperience, size: int, each: int) -> str:
    """Say whose samples a member learns from, and how many these are at most."""
    whose = {"leader": "its own and the leader's", "better": "its own and those of better ones", "all": "those of all"}
    most = size * each if experience.samplers == "rank" else (1 + max_sources(experience, size)) * each
    return f"; each learns from {whose[experience.learn_from]}, {most} at most"


def sizes_text(env: GroupEnvironment) -> str:
    """Return how many starts each split has."""
    return ", ".join(f"{split} {count_text(env.size(split))}" for split in SPLITS)


def possible(config: AnyConfig, name: str) -> list[int]:
    """Return the values that an integer hyperparameter can come to have: its start, and its ladder or bounds."""
    space = config.search_space.for_samples_per_step(config.schedule.samples_per_step)
    values = {int(getattr(config.hyperparameters, name))}
    if name in space:
        values.update(int(value) for value in space[name].ladder or space[name].bounds)
    return sorted(values)


def limited(available: int, limit: int | None) -> int:
    """Return how many starts of a split are used: all of them, or the first so many."""
    return available if limit is None else min(limit, available)
