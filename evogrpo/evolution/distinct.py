"""No two living members with the same parent and the same hyperparameters: the rule that every birth goes through."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters, Value, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.mutation import neighbour, quantile

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
        self._points: set[tuple[int | None, tuple[Value, ...]]] = set()

    def add(self, parent: int | None, hyperparameters: Hyperparameters) -> None:
        """Take a point: that of a member with this parent, by index, or None for a founder."""
        self._points.add((parent, self._space.point(hyperparameters)))

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
        return not self._space or (parent, self._space.point(hyperparameters)) not in self._points


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
    axes = {name: _values(space[name], name, base, count, rng) for name in space.ordered}
    for values in _combined(space, base.to_json(), axes, space.ordered):
        yield Hyperparameters.from_json(values)


def _combined(
    space: HyperparameterConfig,
    values: dict[str, Value],
    axes: Mapping[str, Sequence[Value]],
    names: Sequence[str],
) -> Iterator[dict[str, Value]]:
    if not names:
        yield values
        return
    # What does not count makes no other point.
    for value in axes[names[0]] if space.counts(names[0], values) else [values[names[0]]]:
        yield from _combined(space, {**values, names[0]: value}, axes, names[1:])


def _values(
    parameter: RLParameter, name: str, base: Hyperparameters, count: int, rng: np.random.Generator
) -> list[Value]:
    """Return values of one hyperparameter in random order: all, or `count` of a range that has more.

    Where steps have a size of their own, the values are so many steps away from that of `base`, the nearest first.
    """
    if parameter.choices is not None:
        return [parameter.choices[rung] for rung in rng.permutation(len(parameter.choices))]
    if parameter.factor is not None:
        return _lattice(parameter, base.number(name), count, integer=is_integer(name))
    if is_integer(name):
        low, high = (int(bound) for bound in parameter.bounds)
        whole = high - low + 1
        return [low + int(rank) for rank in rng.choice(whole, size=min(count, whole), replace=False)]
    return [quantile(parameter, float(fraction), integer=False) for fraction in rng.random(count)]


def _lattice(parameter: RLParameter, value: float, count: int, *, integer: bool) -> list[Value]:
    values: list[Value] = [value]
    above = below = value
    for _ in range(count):
        higher = neighbour(parameter, above, upward=True, integer=integer)
        lower = neighbour(parameter, below, upward=False, integer=integer)
        if higher > above:  # otherwise it turned at the end
            above = higher
            values.append(above)
        if lower < below:
            below = lower
            values.append(below)
    return values
