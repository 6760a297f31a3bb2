"""Members without parents: the spread of a first population, and fresh ones from anywhere in the space."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from evogrpo.config.checks import whole_number
from evogrpo.config.hyperparameters import Hyperparameters, is_categorical, is_integer
from evogrpo.config.search_space import HyperparameterConfig, check_group_size
from evogrpo.evolution.children import TakenPoints
from evogrpo.evolution.mutation import quantile
from evogrpo.randomness import streams


def spread_founders(
    defaults: Hyperparameters,
    space: HyperparameterConfig,
    size: int,
    rng: np.random.Generator,
    samples_per_step: int,
    given: Sequence[Hyperparameters] = (),
) -> tuple[Hyperparameters, ...]:
    """Choose the hyperparameters of a first population: those given, then a Latin hypercube over the space.

    Each evolving hyperparameter's range is cut into parts of equal width on its scale and every part gets one member,
    so that even a small population covers every range; each value alone is (log-)uniform. Names share the members as
    evenly as they can. Where two come out alike, as on short ladders, the later one is drawn again from all over the
    space while anything is left there.

    Args:
        defaults: The values that stay fixed; also the first member, untouched even where it lies outside the space,
            unless others are given.
        space: What evolves.
        size: Members.
        rng: The generator of these draws.
        samples_per_step: Samples each member collects per learning step; group sizes divide it.
        given: The first members, such as `warm_start_founders` returns, if they are chosen; of too many the first ones.

    Returns:
        One record per member.

    Raises:
        ValueError: If `size` is below 1, or group sizes do not divide `samples_per_step`.

    Source: McKay, Beckman and Conover, Technometrics 21 (1979), for the Latin hypercube.
    """
    if whole_number("size", size) < 1:
        raise ValueError(f"a population needs at least one member, got size={size}")
    space = space.for_samples_per_step(samples_per_step)
    check_group_size(defaults.group_size, samples_per_step)
    first = tuple(given)[:size] or (defaults,)
    rest = size - len(first)
    parts = {name: (rng.permutation(rest) + rng.random(rest)) / max(rest, 1) for name in space}
    spread = [
        at(space, defaults, {name: float(fractions[place]) for name, fractions in parts.items()})
        for place in range(rest)
    ]
    return *first, *_distinct(first, spread, space, streams(rng))


def warm_start_founders(
    earlier: Sequence[Hyperparameters], first: Hyperparameters, space: HyperparameterConfig, samples_per_step: int
) -> tuple[tuple[Hyperparameters, ...], tuple[str, ...]]:
    """Return founders with what members of an earlier run learnt with, as far as that lies in the space.

    Args:
        earlier: Theirs, the best first.
        first: The values of what does not evolve.
        space: What evolves: everything else is as in `first`.
        samples_per_step: Samples of a learning step, which group sizes divide.

    Returns:
        One record for each different point of the space, in the same order, and in words what was moved to the nearest
        value that it may take.
    """
    space = space.for_samples_per_step(samples_per_step)
    founders: dict[Hyperparameters, None] = {}
    moved: dict[str, None] = {}
    for record in earlier:
        values: dict[str, Any] = {}
        for name, parameter in space.items():
            value = getattr(record, name)
            near = value if value is None else parameter.closest(value)
            values[name] = getattr(first, name) if near is None and value is not None else near
            if values[name] != value:
                moved[f"{name} {value} -> {values[name]}, as it has {parameter.extent}"] = None
        founders[dataclasses.replace(first, **values)] = None
    evolved = [name for name in first.to_json() if len({getattr(record, name) for record in earlier}) > 1]
    for name in (name for name in evolved if name not in space):
        moved[f"{name} stays {getattr(first, name)}, as it evolved earlier and does not now"] = None
    return tuple(founders), tuple(moved)


def _distinct(
    first: Sequence[Hyperparameters],
    others: Sequence[Hyperparameters],
    space: HyperparameterConfig,
    stream: Callable[..., np.random.Generator],
) -> list[Hyperparameters]:
    """Return the others, those drawn again that are like one of the first or an earlier one."""
    occupied = TakenPoints(space)
    for each in first:
        occupied.add(None, each)
    distinct, again = list(others), []
    for place, wanted in enumerate(others):
        if occupied.free(None, wanted):
            occupied.add(None, wanted)
        else:
            again.append(place)
    # Only then: nobody who stands alone makes room. Where nothing is left, all stay spread as evenly as they were.
    for place in again:
        drawn, found = occupied.draw(None, partial(random_founder, space, first[0]), partial(stream, "founder", place))
        distinct[place] = drawn if found else distinct[place]
    return distinct


def random_founder(space: HyperparameterConfig, base: Hyperparameters, rng: np.random.Generator) -> Hyperparameters:
    """Proposal a founder from all over the space, each value (log-)uniform; the rest is as in `base`."""
    return at(space, base, {name: float(rng.random()) for name in space})


def at(space: HyperparameterConfig, base: Hyperparameters, fractions: Mapping[str, float]) -> Hyperparameters:
    """Return the point of a space with these fractions, each in [0, 1), of the founders' ranges below it.

    What does not count there is as in `base`.
    """
    values = base.to_json()
    for name in space.ordered:
        parameter, fraction = space[name], fractions[name]
        if not space.is_active(name, values):
            continue
        if is_categorical(name):
            values[name] = parameter.names[min(int(fraction * len(parameter.names)), len(parameter.names) - 1)]
        else:
            values[name] = quantile(parameter, fraction, integer=is_integer(name))
    return Hyperparameters.from_json(values)
