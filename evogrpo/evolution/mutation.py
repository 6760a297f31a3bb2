"""Proposing hyperparameter values: the mutation of a child, and places in a range."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from evogrpo.config.checks import finite_number, names_unknown, refuse_unknown
from evogrpo.config.hyperparameters import Hyperparameters, Value, is_categorical, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter

Changes = Mapping[str, tuple[Value, Value]]
"""Each hyperparameter that changed, by name: (old value, new value)."""


STEP = 0.2
"""The usual step, as a share of a range on its scale: three decades are crossed in five."""
SPREAD = 0.75
"""Standard deviation, in log units, of the sizes of steps around the usual or the inherited one."""
SMALLEST, FLOAT32_LIMIT = 0.02, 0.5
"""The smallest step that is inherited, and the largest that is taken: from anywhere it fits one way at least."""


@names_unknown
@dataclass(frozen=True, kw_only=True)
class Mutation:
    """How a child's hyperparameters differ from its parent's.

    A number takes a step up or down, with equal chance, on its scale. The size of the step is drawn log-normally around
    the one with which its parent was born: children of members that were right to move far move far as well, and
    where small steps pay steps become small. Founders' children take steps of about a fifth of the range. Now and then
    a number is drawn from anywhere in its range instead, so that no population stays where it began. Names change to
    any other. Where an `RLParameter` has a `factor`, every step is of that size, and none is drawn from anywhere.

    Attributes:
        probability: Chance, in (0, 1], that each evolving hyperparameter moves, independently of the others. Where
            none would, one drawn uniformly moves: a mutation always changes something.
        resample: Chance, in [0, 1], that one that moves is drawn from its whole range instead of taking a step.

    Raises:
        ValueError: If a setting is out of range.

    Source: Beyer and Schwefel, Natural Computing 1 (2002), for step sizes that descend with what they changed;
        Jaderberg et al. (arXiv:1711.09846) for drawing anew.
    """

    probability: float = 0.5
    resample: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "probability", finite_number("probability", self.probability))
        if not 0 < self.probability <= 1:
            raise ValueError(
                f"probability must lie in (0, 1], got {self.probability}: for no mutation use Tournament(mutation=None)"
            )
        object.__setattr__(self, "resample", share("resample", self.resample))

    def __call__(
        self,
        hyperparameters: Hyperparameters,
        space: HyperparameterConfig,
        rng: np.random.Generator,
        steps: Mapping[str, float] | None = None,
    ) -> Hyperparameters:
        """Move some hyperparameters of those that count.

        A None moves from the number it stands for (see `Hyperparameters.number`). What begins to count because another
        one changed is drawn from its whole range.

        Args:
            hyperparameters: The parent's.
            space: What evolves.
            rng: The generator of these draws; how many there are depends on the space alone.
            steps: The steps by which the parent's differ from its own parent's, as shares of the ranges, by name.

        Returns:
            The child's hyperparameters: they differ from the parent's unless nothing that counts evolves.
        """
        names = space.ordered
        draws = rng.random((4, len(names)))
        around, spare = np.exp(SPREAD * rng.standard_normal(len(names))), rng.random()
        before = hyperparameters.to_json()
        counting = [name for name in names if space.is_active(name, before)]
        moving = {name for name, chance in zip(names, draws[0], strict=True) if chance < self.probability}
        if not moving.intersection(counting) and counting:
            moving = {counting[int(spare * len(counting))]}

        def moved(column: int, name: str) -> Value:
            _, up, anew, fraction = (float(draw) for draw in draws[:, column])
            if name not in moving:
                return before[name]
            if is_categorical(name):
                return other_choice(space[name], getattr(hyperparameters, name), fraction)
            value = hyperparameters.number(name)
            if anew < self.resample and space[name].factor is None:
                drawn = uniform_value(name, space[name], fraction)
                if drawn != value:
                    return drawn
            inherited = (steps or {}).get(name)
            usual = STEP if inherited is None else max(abs(inherited), SMALLEST)
            size = min(usual * float(around[column]), FLOAT32_LIMIT)
            return neighbour(space[name], value, upward=up < 0.5, integer=is_integer(name), size=size)

        return mutate(hyperparameters, space, moved, draws[3])

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {"probability": self.probability, "resample": self.resample}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from fields by name.

        Raises:
            ValueError: If a field is unknown or refused.
        """
        refuse_unknown("field of Mutation", values, ["probability", "resample"])
        return cls(**values)


def share(what: str, value: object) -> float:
    """Return `value` as a number in [0, 1], or raise ValueError naming `what`."""
    number = finite_number(what, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{what} must lie in [0, 1], got {number}")
    return number


def changes_between(before: Hyperparameters, after: Hyperparameters) -> dict[str, tuple[Value, Value]]:
    """Return where two records differ, by name: (old value, new value)."""
    old, new = before.to_json(), after.to_json()
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def mutate(
    hyperparameters: Hyperparameters,
    space: HyperparameterConfig,
    moved: Callable[[int, str], Value],
    fractions: Sequence[float],
) -> Hyperparameters:
    """Return what becomes of hyperparameters where each that counts may move.

    Args:
        hyperparameters: The parent's.
        space: What evolves.
        moved: From a place in `space.ordered` and its name to the new value; asked for what counts in the parent, and
            still does.
        fractions: In [0, 1), one for each place: where in its range a value is drawn that has not counted before.
    """
    before = hyperparameters.to_json()
    after = dict(before)
    for column, name in enumerate(space.ordered):
        if space.is_active(name, after):
            counted = space.is_active(name, before)
            after[name] = moved(column, name) if counted else uniform_value(name, space[name], float(fractions[column]))
    return Hyperparameters.from_json(after)


def uniform_value(name: str, parameter: RLParameter, fraction: float) -> Value:
    """Return the value with `fraction` of all that a hyperparameter may be below it."""
    if is_categorical(name):
        return parameter.names[min(int(fraction * len(parameter.names)), len(parameter.names) - 1)]
    return quantile(dataclasses.replace(parameter, founders=None), fraction, integer=is_integer(name))


def other_choice(parameter: RLParameter, value: str | None, fraction: float) -> str:
    """Return one of the names other than `value`, each with equal chance for a uniform `fraction` in [0, 1)."""
    others = [name for name in parameter.names if name != value]
    return others[min(int(fraction * len(others)), len(others) - 1)]


def neighbour(parameter: RLParameter, value: float, *, upward: bool, integer: bool, size: float = STEP) -> float:
    """Return the value one step away, which always differs from `value`.

    A step is a share of the range on its scale, so that on a log scale a step up and a step down cancel; `factor`,
    where there is one, decides instead of `size`. Integers are rounded and move by at least 1; a ladder moves by its
    share of the rungs, at least one. A step that would leave the range is taken the other way, so no bound is
    absorbing; in a range too narrow for either, the value moves to the farther bound. A value outside the range,
    infinity included, moves to the nearer bound or rung.

    Args:
        parameter: The range or ladder.
        value: Where to start.
        upward: The direction to try first.
        integer: Whether only whole numbers count.
        size: Of the step, as a share of the range; greater than 0.

    Returns:
        A value of the range or ladder.
    """
    low, high = parameter.bounds
    if parameter.choices is not None:
        above = [rung for rung in parameter.numbers if rung > value]
        below = [rung for rung in reversed(parameter.numbers) if rung < value]
        way = above if above and (upward or not below) else below
        rungs = max(1, round(size * (len(parameter.numbers) - 1))) if low <= value <= high else 1
        return way[min(rungs, len(way)) - 1]
    if not low <= value <= high:
        return low if value < low else high
    for direction in (upward, not upward):
        moved = _step(parameter, value, upward=direction, integer=integer, size=size)
        for bound in (low, high):
            # 0.05 + 5 x 0.07 is a hair above 0.4: rounding must not keep a lattice from its own bound.
            if not integer and math.isclose(moved, bound, rel_tol=1e-9):
                moved = bound
        if low <= moved <= high and moved != value:
            return moved
    upper_half = value / low > high / value if parameter.scale == "log" else value - low > high - value
    return low if upper_half else high


def _step(parameter: RLParameter, value: float, *, upward: bool, integer: bool, size: float) -> float:
    low, high = parameter.bounds
    if parameter.scale == "log":
        times = math.pow(high / low, size) if parameter.factor is None else parameter.factor
        moved = value * times if upward else value / times
    else:
        by = (size if parameter.factor is None else parameter.factor - 1) * (high - low)
        moved = value + by if upward else value - by
    if not integer or not math.isfinite(moved):
        return moved
    return max(round(moved), value + 1) if upward else min(round(moved), value - 1)


def place(parameter: RLParameter, value: float) -> float:
    """Return where a value lies, from 0 at the smallest to 1 at the largest, on the range's scale or in rungs."""
    low, high = parameter.bounds
    inside = min(max(value, low), high)
    if parameter.numbers:
        return sum(rung < inside for rung in parameter.numbers) / (len(parameter.numbers) - 1)
    if parameter.scale == "log":
        return math.log(inside / low) / math.log(high / low)
    return (inside - low) / (high - low)


def quantile(parameter: RLParameter, fraction: float, *, integer: bool) -> float:
    """Return the value with `fraction`, in [0, 1], of the founders' range below it, measured on the range's scale.

    Args:
        parameter: The range or ladder.
        fraction: 0 gives the smallest value, 1 the largest.
        integer: Whether only whole numbers count.

    Returns:
        A value of the range or ladder.
    """
    if parameter.choices is not None:
        return parameter.numbers[min(int(fraction * len(parameter.numbers)), len(parameter.numbers) - 1)]
    low, high = parameter.founders or parameter.bounds
    if parameter.scale == "log":
        value = low * math.pow(high / low, fraction)
        value = round(value) if integer else value
    else:
        value = low + int(fraction * (high - low + 1)) if integer else low + fraction * (high - low)
    return min(max(value, low), high)
