"""No two living members with the same parent and the same hyperparameters: the rule that every birth goes through."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from evogrpo.evolution.mutation import quantile
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, RLParameter, Value, is_integer

Draw = Callable[[np.random.Generator], Hyperparameters]
"""Proposes the hyperparameters of one birth; asked again, with another generator, where they are taken."""

MOST_DRAWS = 16
"""After so many proposals that were all taken, the space is searched for a free point instead."""


class Occupied:
    """What the members of a generation differ in: their parents and their hyperparameters.

    Equal hyperparameters under different parents are two learners, with weights of their own; under one parent they
    are one learner twice.

    Args:
        space: What evolves, with the group sizes that the next generation may have. Where nothing does, nothing can
            differ, and nothing is taken.
    """

    def __init__(self, space: HyperparameterConfig) -> None:
        self._space = space
        self._points: set[tuple[int | None, Hyperparameters]] = set()

    def add(self, parent: int | None, hyperparameters: Hyperparameters) -> None:
        """Take a point: that of a member with this parent, by index, or None for a founder."""
        self._points.add((parent, hyperparameters))

    def draw(
        self, parent: int | None, draw: Draw, stream: Callable[[int], np.random.Generator]
    ) -> tuple[Hyperparameters, bool]:
        """Take a free point for one birth.

        Args:
            parent: Of whom, by index; None for a founder.
            draw: Proposes hyperparameters.
            stream: The generator of each attempt, by its number.

        Returns:
            The first of at most `MOST_DRAWS` proposals that is free, or else any free point of the space; and whether
            there was one. If not, the first proposal.
        """
        first = proposal = draw(stream(0))
        for attempt in range(1, MOST_DRAWS):
            if self.free(parent, proposal):
                break
            proposal = draw(stream(attempt))
        else:
            free = (
                point
                for point in points(self._space, first, len(self._points) + 1, stream(MOST_DRAWS))
                if self.free(parent, point)
            )
            proposal = next(free, first)
        found = self.free(parent, proposal)
        self.add(parent, proposal)
        return proposal, found

    def free(self, parent: int | None, hyperparameters: Hyperparameters) -> bool:
        """Say whether nobody with this parent has these hyperparameters."""
        return not self._space or (parent, hyperparameters) not in self._points


def points(
    space: HyperparameterConfig, base: Hyperparameters, count: int, rng: np.random.Generator
) -> Iterator[Hyperparameters]:
    """Go through points of a space in random order, each once: all of a small one, at least `count` of a large one.

    Args:
        space: What evolves; group sizes as a ladder.
        base: Has the values of all that does not.
        count: How many values of a range are tried at most.
        rng: The generator of the order, and of values in ranges.
    """
    axes = {name: _values(parameter, name, count, rng) for name, parameter in space.items()}
    yield from _combined(base, list(axes.items()))


def _combined(base: Hyperparameters, axes: list[tuple[str, list[Any]]]) -> Iterator[Hyperparameters]:
    if not axes:
        yield base
        return
    (name, values), rest = axes[0], axes[1:]
    for value in values:
        yield from _combined(dataclasses.replace(base, **{name: value}), rest)


def _values(parameter: RLParameter, name: str, count: int, rng: np.random.Generator) -> list[Value]:
    """Return values of one hyperparameter in random order: all, or `count` of a range that has more."""
    if parameter.choices is not None:
        return [parameter.choices[place] for place in rng.permutation(len(parameter.choices))]
    if is_integer(name):
        low, high = (int(bound) for bound in parameter.bounds)
        whole = high - low + 1
        return [low + int(place) for place in rng.choice(whole, size=min(count, whole), replace=False)]
    return [quantile(parameter, float(fraction), integer=False) for fraction in rng.random(count)]
