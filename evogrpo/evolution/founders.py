"""Founders: hyperparameters of members without parents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter, check_group_size
from evogrpo.config.task_settings import is_task_setting
from evogrpo.evolution.mutation import element_at, quantile
from evogrpo.evolution.plan import draw_distinct
from evogrpo.randomness import streams
from evogrpo.validation import whole_number

DESIGNS = 200
"""Number of draws of the founders' task settings, of which the least confounded one is used."""
MAX_DRAWN = 10_000
"""Maximum number of founders in all these draws."""


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
    Categories are shared evenly. Of `DESIGNS` draws of the task settings, the least confounded one
    is used. Of two equal points, the later one is redrawn from the whole space until no free point
    is left.

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
    first = tuple(given)[:size] if given else (defaults,)
    remaining = size - len(first)
    # 2. Draw the other members from a Latin hypercube, the task settings several times.
    others = _latin_hypercube(space, defaults, remaining, rng)
    settings = space.task_settings
    if settings:
        designs = [others]
        while len(designs) < min(DESIGNS, MAX_DRAWN // size):
            drawn = _latin_hypercube(settings, defaults, remaining, rng)
            pairs = zip(others, drawn, strict=True)
            designs.append([other.with_values(new.task_settings) for other, new in pairs])

        def confounded(design: Sequence[Hyperparameters]) -> float:
            """Return how much settings change together if these are the other founders."""
            return confounding(settings, [*first, *design])

        others = min(designs, key=confounded)
    # 3. Redraw duplicates last, so that the others do not change. Without a free point, a duplicate
    #    stays. `taken` has pairs of parent and hyperparameters, as `draw_distinct` takes them;
    #    founders have no parent.
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


def _latin_hypercube(
    space: Mapping[str, RLParameter], base: Hyperparameters, size: int, rng: np.random.Generator
) -> list[Hyperparameters]:
    """Draw points: a random permutation assigns one stratum of each range to each of them."""
    strata = {}
    for name in space:
        positions = rng.permutation(size) + rng.random(size)
        strata[name] = positions / max(size, 1)
    points = []
    for position in range(size):
        fractions = {name: float(column[position]) for name, column in strata.items()}
        points.append(point_at(space, base, fractions))
    return points


def confounding(space: Mapping[str, RLParameter], members: Sequence[Hyperparameters]) -> int:
    """Return the sum of the squared frequencies of all pairs of values of two settings.

    Less is better: it is smallest in a balanced design, where values of a setting are equally
    frequent, and so are all pairs of values of two settings. The mean effect of one setting then
    does not depend on the other. The pairs of a setting with itself are included. A range counts as
    two values: its halves.
    """
    columns = []
    for name, parameter in space.items():
        levels = [member.get(name) for member in members]
        if parameter.choices is None:
            levels = [float(value or 0.0) < float(parameter.first) for value in levels]
        columns.append(levels)
    total = 0
    for one, other in combinations_with_replacement(columns, 2):
        frequencies = Counter(zip(one, other, strict=True)).values()
        total += sum(frequency**2 for frequency in frequencies)
    return total


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
        that was moved or is not taken.
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
    # Name the values that are not taken. Defaults and None were not chosen.
    defaults = Hyperparameters()
    for record in earlier:
        for name, value in record.by_name().items():
            kept = first.get(name)
            if name in space or value in (kept, None, defaults.get(name)):
                continue
            if kept is None:
                changes[f"{name} {value} is not used: it does not evolve in this run"] = None
            else:
                changes[f"{name} stays {kept}: it does not evolve in this run"] = None
    return tuple(founders), tuple(changes)


def random_founder(
    space: HyperparameterConfig, base: Hyperparameters, rng: np.random.Generator
) -> Hyperparameters:
    """Draw a founder from the whole space, each value (log-)uniform.

    Other values are those of `base`.
    """
    return point_at(space, base, {name: float(rng.random()) for name in space})


def point_at(
    space: Mapping[str, RLParameter], base: Hyperparameters, fractions: Mapping[str, float]
) -> Hyperparameters:
    """Return the point of the space at quantiles, in [0, 1), of the founders' ranges by name."""
    values: dict[str, Any] = {}
    for name, parameter in space.items():
        fraction = fractions[name]
        if parameter.names:
            values[name] = element_at(parameter.names, fraction)
        else:
            values[name] = quantile(parameter, fraction, integer=is_integer(name))
    return base.with_values(values)
