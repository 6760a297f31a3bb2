"""Founders: hyperparameters of members without parents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.config.hyperparameters import Hyperparameters, Value, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter, check_group_size
from evogrpo.config.task_settings import is_task_setting
from evogrpo.evolution.mutation import element_at, quantile
from evogrpo.evolution.plan import draw_distinct
from evogrpo.randomness import streams
from evogrpo.validation import whole_number

DESIGNS = 200
"""Number of draws of the founders' task settings, of which the least confounded one counts."""
MAX_DRAWN = 20_000
"""Maximum number of founders of all these draws: large populations need fewer of them."""


def spread_founders(
    defaults: Hyperparameters,
    space: HyperparameterConfig,
    size: int,
    rng: np.random.Generator,
    samples_per_step: int,
    given: Sequence[Hyperparameters] = (),
) -> tuple[Hyperparameters, ...]:
    """Choose founders: the given hyperparameters, then a Latin hypercube over the space.

    The range of each evolving hyperparameter is divided into strata of equal width on its scale,
    one per member, so that a small population covers every range; each value is (log-)uniform.
    Categories are shared evenly. Task settings are drawn `DESIGNS` times, and the draw in which
    they are least confounded counts (see `confounding`). Of two equal points, the later one is
    redrawn from the whole space until no free point is left.

    Args:
        defaults: Values of all other hyperparameters. Also the first member, even if it lies
            outside the space, unless `given` is set.
        space: Search space.
        size: Number of members.
        rng: Random generator.
        samples_per_step: Samples each member collects per learning step; group sizes divide it.
        given: Hyperparameters of the first members, such as those of `warm_start_founders`; at most
            `size` are used.

    Returns:
        One record per member.

    Raises:
        ValueError: If `size` is below 1, or group sizes do not divide `samples_per_step`.

    Source: McKay, Beckman and Conover, Technometrics 21 (1979), for the Latin hypercube.
    """
    # 1. Check the arguments, and choose the first members.
    if whole_number("size", size) < 1:
        raise ValueError(f"size must be at least 1, got {size}.")
    space = space.for_samples_per_step(samples_per_step)
    check_group_size(defaults.group_size, samples_per_step)
    first = tuple(given)[:size] or (defaults,)
    remaining = size - len(first)
    # 2. Draw the other members from a Latin hypercube, the task settings several times.
    strata = _strata(space, remaining, rng)
    settings = space.task_settings
    if settings:
        designs = [{name: strata[name] for name in settings}]
        while len(designs) < min(DESIGNS, MAX_DRAWN // size):
            designs.append(_strata(settings, remaining, rng))
        strata |= min(designs, key=partial(_confounding_of, settings, first))
    others = []
    for position in range(remaining):
        fractions = {name: float(column[position]) for name, column in strata.items()}
        others.append(point_at(space, defaults, fractions))
    # 3. Redraw duplicates last, so that the others do not change. Without a free point, a duplicate
    #    stays.
    taken: set[tuple[int | None, Hyperparameters]] = {(None, founder) for founder in first}
    duplicates = []
    stream = streams(rng)
    for number, founder in enumerate(others):
        if (None, founder) in taken and space:
            duplicates.append(number)
        taken.add((None, founder))
    for number in duplicates:
        draw = partial(random_founder, space, first[0])
        attempts = partial(stream, "founder", number)
        redrawn, is_free = draw_distinct(draw, space, None, taken, attempts)
        if is_free:
            others[number] = redrawn
    return *first, *others


def _strata(
    space: Mapping[str, RLParameter], size: int, rng: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """Return fractions `[size]` of each range: a random permutation assigns the strata."""
    strata = {}
    for name in space:
        strata[name] = (rng.permutation(size) + rng.random(size)) / max(size, 1)
    return strata


def _confounding_of(
    settings: Mapping[str, RLParameter],
    first: Sequence[Hyperparameters],
    design: Mapping[str, NDArray[np.float64]],
) -> int:
    """Return the confounding of task settings among the first members and those of a design."""
    columns = []
    for name, parameter in settings.items():
        values = [member.get(name) for member in first]
        values += [_value_at(name, parameter, float(fraction)) for fraction in design[name]]
        columns.append([level(parameter, value) for value in values])
    return confounding(columns)


def level(parameter: RLParameter, value: Value) -> Value | bool:
    """Return the level of a value in a design: a choice, or True in the upper half of a range."""
    if parameter.choices is not None or value is None:
        return value
    return float(value) >= float(parameter.first)


def confounding(columns: Sequence[Sequence[object]]) -> int:
    """Return how far the levels of settings are from a balanced design; less is better.

    In a balanced design, levels of a setting are equally frequent, and so are all pairs of levels
    of two settings. The mean effect of one then does not depend on the other. The sum of the
    squared frequencies of all pairs, over all pairs of settings, is then at its minimum.

    Args:
        columns: Level of each member, by setting.
    """
    total = 0
    for one, other in combinations_with_replacement(columns, 2):
        frequencies = Counter(zip(one, other, strict=True)).values()
        total += sum(frequency**2 for frequency in frequencies)
    return total


def changed_together(columns: Mapping[str, Sequence[object]]) -> dict[str, list[str]]:
    """Return the settings whose effects cannot be separated from that of each setting.

    Two settings always change together if members have equal values of one exactly if they have
    equal values of the other.

    Args:
        columns: Level of each member, by setting.

    Returns:
        Names of such settings, by name; a setting without any is left out.
    """
    together: dict[str, list[str]] = {}
    for one, other in permutations(columns, 2):
        pairs = len(set(zip(columns[one], columns[other], strict=True)))
        if 1 < pairs == len(set(columns[one])) == len(set(columns[other])):
            together.setdefault(one, []).append(other)
    return together


def warm_start_founders(
    earlier: Sequence[Hyperparameters],
    first: Hyperparameters,
    space: HyperparameterConfig,
    samples_per_step: int,
) -> tuple[tuple[Hyperparameters, ...], tuple[str, ...]]:
    """Return founders with hyperparameters of an earlier run, moved into the search space.

    Args:
        earlier: Hyperparameters of the earlier members, the best first.
        first: Values of hyperparameters that do not evolve.
        space: Search space.
        samples_per_step: Samples of a learning step; group sizes divide it.

    Returns:
        One record per distinct point of the space, in the same order, and a text for every value
        that was moved.
    """
    space = space.for_samples_per_step(samples_per_step)
    # Dictionaries without values: each key once, in the order of its first occurrence.
    founders: dict[Hyperparameters, None] = {}
    changes: dict[str, None] = {}
    for record in earlier:
        values: dict[str, Any] = {}
        for name, parameter in space.items():
            value = record.get(name)
            if is_task_setting(name) and value is None:  # the earlier run did not have it
                value = first[name]
            closest = value
            if value is not None:
                closest = parameter.closest(value)
                if closest is None:  # a name outside the choices: names have no closest value
                    closest = first[name]
            values[name] = closest
            if closest != value:
                moved = f"{name} {value} -> {closest}, the closest in its {parameter.extent}"
                changes[moved] = None
        founders[first.with_values(values)] = None
    for name, value in first.by_name().items():
        distinct = {record.get(name) for record in earlier}
        if len(distinct) > 1 and name not in space:
            changes[f"{name} stays {value}: it does not evolve in this run"] = None
    return tuple(founders), tuple(changes)


def random_founder(
    space: HyperparameterConfig, base: Hyperparameters, rng: np.random.Generator
) -> Hyperparameters:
    """Draw a founder from the whole space, each value (log-)uniform.

    Other values are those of `base`.
    """
    return point_at(space, base, {name: float(rng.random()) for name in space})


def point_at(
    space: HyperparameterConfig, base: Hyperparameters, fractions: Mapping[str, float]
) -> Hyperparameters:
    """Return the point of the space at quantiles, in [0, 1), of the founders' ranges by name."""
    return base.with_values({name: _value_at(name, space[name], fractions[name]) for name in space})


def _value_at(name: str, parameter: RLParameter, fraction: float) -> float | str:
    """Return the quantile `fraction` of the founders' values of a hyperparameter."""
    if parameter.names:
        return element_at(parameter.names, fraction)
    return quantile(parameter, fraction, integer=is_integer(name))
