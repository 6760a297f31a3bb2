"""What a configuration leaves open as `auto`: sizes, chosen before the run, and hyperparameters, found by evolution."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evogrpo.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.objective.searching import fitting_groups
from evogrpo.training.configuration.sections import AnyConfig

AUTO = "auto"
IMPLIED = "evolve"
"""Stands among what is open where a configuration does not say what evolves."""
OPEN = {
    "hyperparameters": ("group_size",),
    "population": ("size",),
    "schedule": ("samples_per_step", "validation_questions", "test_questions"),
}
"""The sizes that may be `auto`, by section."""
SIZES = frozenset(f"{section}.{key}" for section, keys in OPEN.items() for key in keys)


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
    """Return plain values without those that are `auto`, and the full names of these.

    Any hyperparameter may be `auto`, where it starts or where it says how it evolves; and so may all of `evolve`, which
    is what leaving it out means.
    """
    result, names = dict(values), set()
    if result.get("evolve", AUTO) == AUTO:
        names.add(IMPLIED)
        result.pop("evolve", None)
    for section, keys in {**OPEN, "hyperparameters": HYPERPARAMETER_NAMES, "evolve": HYPERPARAMETER_NAMES}.items():
        given = result.get(section)
        if isinstance(given, Mapping):
            left = {key for key in keys if isinstance(given.get(key), str) and given[key] == AUTO}
            names |= {f"{section}.{key}" for key in left}
            result[section] = {key: value for key, value in given.items() if key not in left}
    return result, frozenset(names)


def found_by_evolution(auto: frozenset[str], *, chooses_sizes: bool) -> frozenset[str]:
    """Return the hyperparameters that a configuration asks evolution to find, by name, of those that are `auto`.

    Args:
        auto: As `without_auto` returns them.
        chooses_sizes: Whether a group size left open is one of the sizes that are chosen before the run.
    """
    chosen = SIZES if chooses_sizes else frozenset()
    left = (name.partition(".") for name in auto - chosen)
    return frozenset(key for section, _, key in left if section in ("hyperparameters", "evolve") and key)


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
    for name in config.auto & SIZES:
        section, _, key = name.partition(".")
        sections[section][key] = chosen[name]
    samples = sections["schedule"].get("samples_per_step", config.schedule.samples_per_step)
    return replace(
        config,
        evolve=fitting_groups(config.evolve, samples) if IMPLIED in config.auto else config.evolve,
        hyperparameters=replace(config.hyperparameters, **sections["hyperparameters"]),
        population=replace(config.population, **sections["population"]),
        schedule=replace(config.schedule, **sections["schedule"]),
        auto=frozenset(),
    )
