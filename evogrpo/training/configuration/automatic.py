"""`auto` settings of a configuration: sizes chosen before the run, and hyperparameters found by evolution."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evogrpo.config.default_space import drop_single_group_size
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies.narrowing import Narrowing
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.schedule import Schedule

AUTO = "auto"
IMPLIED = "search_space"
"""Marks a configuration without a search space among the `auto` names."""
OPEN = {
    "hyperparameters": ("group_size",),
    "population": ("size",),
    "schedule": ("samples_per_step", "validation_questions", "test_questions"),
}
"""The sizes that may be `auto`, by section."""
SIZES = frozenset(f"{section}.{key}" for section, keys in OPEN.items() for key in keys)

SAMPLES_OF_A_SEARCH = 16
"""Default samples per member and learning step of a search with shared experience."""


def without_auto(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values without `auto` ones, and the full names of these.

    Any hyperparameter may be `auto`, in `hyperparameters` or in `search_space`. A missing `search_space` is `auto`.
    """
    result, names = dict(values), set()
    if result.get("search_space", AUTO) == AUTO:
        names.add(IMPLIED)
        result.pop("search_space", None)
    for section, keys in {
        **OPEN,
        "hyperparameters": HYPERPARAMETER_NAMES,
        "search_space": HYPERPARAMETER_NAMES,
    }.items():
        given = result.get(section)
        if isinstance(given, Mapping):
            left = {key for key in keys if isinstance(given.get(key), str) and given[key] == AUTO}
            names |= {f"{section}.{key}" for key in left}
            result[section] = {key: value for key, value in given.items() if key not in left}
    return result, frozenset(names)


def found_by_evolution(auto: frozenset[str], *, chooses_sizes: bool) -> frozenset[str]:
    """Return the names of the `auto` hyperparameters that evolution searches.

    Args:
        auto: As `without_auto` returns them.
        chooses_sizes: An `auto` group size is chosen before the run instead.
    """
    chosen = SIZES if chooses_sizes else frozenset()
    left = (name.partition(".") for name in auto - chosen)
    return frozenset(key for section, _, key in left if section in ("hyperparameters", "search_space") and key)


def is_search(values: Mapping[str, Any], auto: frozenset[str]) -> bool:
    """Return True if a configuration sets neither search space nor strategy, and members can share experience.

    Args:
        values: Plain values of its sections.
        auto: As `without_auto` returns them.
    """
    agent, population = (values.get(name) for name in ("agent", "population"))
    apart = isinstance(agent, Mapping) and agent.get("normalise_observations")
    alone = isinstance(population, Mapping) and population.get("size") == 1
    said = any(values.get(name) is not None for name in ("strategy", "experience", "fitness"))
    return IMPLIED in auto and "population.size" not in auto and not (said or apart or alone)


def samples_of_a_search(group_size: object) -> int:
    """Return the default samples per member and learning step of a search, in whole groups.

    Args:
        group_size: Value of the configuration; invalid values are reported elsewhere.
    """
    size = group_size if isinstance(group_size, int) and group_size > 0 else 1
    return math.ceil(SAMPLES_OF_A_SEARCH / size) * size


def searched_by(space: HyperparameterConfig, first: Hyperparameters, schedule: Schedule) -> dict[str, Any]:
    """Return strategy, experience and fitness of a search: those that did best in the study of unknown values.

    Selection uses training rewards and the best member is chosen by validation; with too few starts, both use
    validation.

    Args:
        space: What evolves.
        first: The first member's hyperparameters.
        schedule: The run's.

    Source: docs/results.md, "What evolution is worth".
    """
    fitting = space.for_samples_per_step(schedule.samples_per_step)
    largest = int(fitting["group_size"].bounds[1]) if "group_size" in fitting else first.group_size
    judged = schedule.late_starts(largest) > 1
    fitness = {"fitness": FitnessConfig(by="both", racing=True, candidates=3)} if judged else {}
    return {"strategy": Narrowing(), "experience": SharedExperience(), **fitness}


def with_sizes(config: AnyConfig, sizes: Mapping[str, int]) -> AnyConfig:
    """Return a configuration with its `auto` sizes set; sizes that it gives stay.

    Args:
        config: The configuration.
        sizes: Size by full name, such as "population.size".

    Raises:
        ValueError: If they do not fit its hyperparameters.
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in OPEN}
    for name in config.auto & SIZES:
        section, _, key = name.partition(".")
        sections[section][key] = sizes[name]
    samples, space = sections["schedule"].get("samples_per_step", config.schedule.samples_per_step), config.search_space
    return replace(
        config,
        search_space=drop_single_group_size(space, samples) if IMPLIED in config.auto else space,
        hyperparameters=replace(config.hyperparameters, **sections["hyperparameters"]),
        population=replace(config.population, **sections["population"]),
        schedule=replace(config.schedule, **sections["schedule"]),
        auto=frozenset(),
    )
