"""Costs of a run, computed before it starts: the part that all task types share."""

from dataclasses import dataclass

from evogrpo.envs.protocol import SPLITS, GroupEnvironment
from evogrpo.evolution.shared_experience import SharedExperience, max_sources
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.sections import AnyConfig


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Numbers of groups, learning steps and evaluations.

    Attributes:
        groups: Groups per learning step and member, for each possible group size.
        learning_steps: Learning steps of the run; None if no number of generations is given.
        evaluated: Completions or episodes on held-out starts; None if no number of generations is given.
        validation: Validation starts per evaluation of a member.
    """

    groups: dict[int, int]
    learning_steps: int | None
    evaluated: int | None
    validation: int

    @classmethod
    def of(cls, config: AnyConfig, env: GroupEnvironment) -> "Rounds":
        """Compute the numbers of a configured run."""
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
        """Return the row on groups."""
        groups = ", ".join(f"{pluralize(count, 'group')} of {group}" for group, count in self.groups.items())
        return f"{groups} per member and learning step"

    def steps_row(self, config: AnyConfig, held_out: str) -> str:
        """Return the row on learning steps and evaluations."""
        if self.learning_steps is None or self.evaluated is None:
            return "until a limit of the schedule is reached"
        schedule = config.schedule
        generations = pluralize(schedule.generations or 0, "generation")
        return (
            f"{self.learning_steps} = {generations} × {schedule.steps_per_generation}, and "
            f"{count_text(self.evaluated)} {held_out}"
        )


def samples_row(config: AnyConfig, samples: str) -> str:
    """Return the row on completions or episodes per learning step."""
    size, each, most = config.population.size, config.schedule.samples_per_step, config.agent.objective.dynamic_sampling
    times = "once" if most == 1 else f"up to {most} times"
    refills = f"; groups whose rewards are all equal are resampled {times}" if most else ""
    each_learns = "" if config.experience is None else _learnt_from(config.experience, size, each)
    return f"{each} {samples} per member and learning step, {size * each} in all{each_learns}{refills}"


def _learnt_from(experience: SharedExperience, size: int, each: int) -> str:
    """Return a note on shared experience."""
    sources = {
        "leader": "its own and the leader's",
        "better": "its own and better members'",
        "all": "those of all",
    }
    most = size * each if experience.samplers == "rank" else (1 + max_sources(experience, size)) * each
    return f"; each learns from {sources[experience.learn_from]}, {most} at most"


def sizes_text(env: GroupEnvironment) -> str:
    """Return the sizes of all splits as text."""
    return ", ".join(f"{split} {count_text(env.size(split))}" for split in SPLITS)


def possible(config: AnyConfig, name: str) -> list[int]:
    """Return the possible values of an integer hyperparameter: its start, and its ladder or bounds."""
    space = config.search_space.for_samples_per_step(config.schedule.samples_per_step)
    values = {int(getattr(config.hyperparameters, name))}
    if name in space:
        values.update(int(value) for value in space[name].numbers or space[name].bounds)
    return sorted(values)


def limited(available: int, limit: int | None) -> int:
    """Return the number of starts of a split that are used."""
    return available if limit is None else min(limit, available)
