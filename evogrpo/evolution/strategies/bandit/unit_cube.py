"""Hyperparameters as points of a unit cube, on the scale that each has: what a Gaussian process sees of them."""

import math

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters, is_categorical
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.founders import at
from evogrpo.evolution.mutation import place
from evogrpo.evolution.strategies.bandit.gaussian_process import Array


def point_of(hyperparameters: Hyperparameters, space: HyperparameterConfig) -> Array:
    """Return a point `[d]`: a coordinate for every number that evolves, and one for each name that another may be.

    Values outside a range lie on its bound. Any two names of one hyperparameter are one apart. What does not count
    lies in the middle.
    """
    values = hyperparameters.to_json()
    coordinates: list[float] = []
    for name, parameter in space.items():
        if not space.counts(name, values):
            coordinates += [0.0] * len(parameter.names) or [0.5]
        elif is_categorical(name):
            chosen = values[name]
            coordinates += [math.sqrt(0.5) * (chosen == each) for each in parameter.names]
        else:
            coordinates.append(place(parameter, hyperparameters.number(name)))
    return np.array(coordinates)


def placed(fractions: Array, space: HyperparameterConfig, base: Hyperparameters) -> Array:
    """Return the points `[n, d]` of what `evogrpo.evolution.founders.at` makes of fractions `[n, k]`, one per name."""
    if any(parameter.condition for parameter in space.values()):
        made = (at(space, base, dict(zip(space, map(float, row), strict=True))) for row in fractions)
        return np.stack([point_of(each, space) for each in made])
    columns: list[Array] = []
    for parameter, part in zip(space.values(), fractions.T, strict=True):
        if parameter.choices is None:
            columns.append(part)
            continue
        count = len(parameter.choices)
        chosen = np.minimum((part * count).astype(int), count - 1)
        if parameter.names:
            columns += [math.sqrt(0.5) * (chosen == number) for number in range(count)]
        else:
            columns.append(chosen / (count - 1))
    return np.stack(columns, axis=1)


def fractions_of(hyperparameters: Hyperparameters, space: HyperparameterConfig) -> Array:
    """Return fractions `[k]` of which `evogrpo.evolution.founders.at` makes these values, or the nearest there are."""
    found: list[float] = []
    for name, parameter in space.items():
        count = len(parameter.choices or ())
        if is_categorical(name):
            value = getattr(hyperparameters, name)
            found.append((parameter.names.index(value) + 0.5) / count if value in parameter.names else 0.0)
        else:
            within = place(parameter, hyperparameters.number(name))
            found.append((within * (count - 1) + 0.5) / count if count else within)
    return np.array(found)
