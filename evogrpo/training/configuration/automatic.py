"""RunSizes that a configuration leaves open as `auto`: which can be, and the configuration once they are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evogrpo.training.configuration.sections import AnyConfig

AUTO = "auto"
OPEN = {
    "hyperparameters": ("group_size",),
    "population": ("size",),
    "schedule": ("samples_per_step", "validation_questions", "test_questions"),
}
"""The keys that may be `auto`, by section."""


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """How much a run does at a time.

    Attributes:
        members: Of the population.
        group_size: Episodes from one start.
        samples_per_step: Episodes of every member per learning step.
        validation_questions: Held-out starts that members are compared by.
        test_questions: Those of the test.
    """

    members: int
    group_size: int
    samples_per_step: int
    validation_questions: int
    test_questions: int


def without_auto(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return plain values without those that are `auto`, and the full names of these."""
    result, names = dict(values), set()
    for section, keys in OPEN.items():
        given = result.get(section)
        if isinstance(given, Mapping):
            left = {key for key in keys if given.get(key) == AUTO}
            names |= {f"{section}.{key}" for key in left}
            result[section] = {key: value for key, value in given.items() if key not in left}
    return result, frozenset(names)


def with_sizes(config: AnyConfig, sizes: RunSizes) -> AnyConfig:
    """Return a configuration with the sizes that it left open; those that it gives stay.

    Raises:
        ValueError: If these do not go with its hyperparameters.
    """
    chosen = {
        "population.size": sizes.members,
        "hyperparameters.group_size": sizes.group_size,
        "schedule.samples_per_step": sizes.samples_per_step,
        "schedule.validation_questions": sizes.validation_questions,
        "schedule.test_questions": sizes.test_questions,
    }
    sections: dict[str, dict[str, Any]] = {section: {} for section in OPEN}
    for name in config.auto:
        section, _, key = name.partition(".")
        sections[section][key] = chosen[name]
    return replace(
        config,
        hyperparameters=replace(config.hyperparameters, **sections["hyperparameters"]),
        population=replace(config.population, **sections["population"]),
        schedule=replace(config.schedule, **sections["schedule"]),
        auto=frozenset(),
    )
