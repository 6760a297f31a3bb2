"""Proposing hyperparameter values: the mutation of a child, and places in a range."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from evogrpo.hyperparameters import (
    HyperparameterConfig,
    Hyperparameters,
    RLParameter,
    Value,
    answering,
    finite_number,
    is_categorical,
    is_integer,
    refuse_unknown,
)

Changes = Mapping[str, tuple[Value, Value]]
"""Each hyperparameter that changed, by name: (old value, new value)."""


@answering
@dataclass(frozen=True, kw_only=True)
class Mutation:
    """How a child's hyperparameters differ from its parent's.

    Attributes:
        probability: Chance, in (0, 1], that each evolving hyperparameter moves, independently of the others. Where
            none would, one drawn uniformly moves: a mutation always changes something.

    Raises:
        ValueError: If `probability` lies outside (0, 1].
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "probability", finite_number("probability", self.probability))
        if not 0 < self.probability <= 1:
            raise ValueError(
                f"probability must lie in (0, 1], got {self.probability}: for no mutation use Tournament(mutation=None)"
            )

    def __call__(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator
    ) -> tuple[Hyperparameters, Changes]:
        """Move some hyperparameters: numbers to a neighbouring value, up or down with equal chance, names to any other.

        A None moves from the number it stands for (see `Hyperparameters.number`).

        Args:
            hyperparameters: The parent's.
            space: What evolves, and the size of a step (see `neighbour`).
            rng: The generator of these draws; how many there are depends on the space alone.

        Returns:
            The child's hyperparameters, and what changed: at least one entry unless the space is empty.
        """
        names = list(space)
        if not names:
            return hyperparameters, {}
        moves = rng.random(len(names)) < self.probability
        upward = rng.random(len(names)) < 0.5
        spare = rng.integers(len(names))
        if not moves.any():
            moves[spare] = True
        # Drawn for every set of names, whether it moves or not.
        picks = {name: float(rng.random()) for name in names if is_categorical(name)}
        proposed: dict[str, Any] = {}
        for name, move, up in zip(names, moves, upward, strict=True):
            if not move:
                continue
            if name in picks:
                proposed[name] = other_name(space[name], getattr(hyperparameters, name), picks[name])
            else:
                value = hyperparameters.number(name)
                proposed[name] = neighbour(space[name], value, upward=bool(up), integer=is_integer(name))
        child = dataclasses.replace(hyperparameters, **proposed)
        return child, {name: (getattr(hyperparameters, name), getattr(child, name)) for name in proposed}

    def of(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig
    ) -> Callable[[np.random.Generator], Hyperparameters]:
        """Return what proposes children of these hyperparameters, for `Plan.from_choices`."""
        return lambda rng: self(hyperparameters, space, rng)[0]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {"probability": self.probability}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from fields by name.

        Raises:
            ValueError: If a field is unknown or refused.
        """
        refuse_unknown("field of Mutation", values, ["probability"])
        return cls(**values)


def other_name(parameter: RLParameter, value: str | None, fraction: float) -> str:
    """Return one of the names other than `value`, each with equal chance for a uniform `fraction` in [0, 1)."""
    others = [name for name in parameter.names if name != value]
    return others[min(int(fraction * len(others)), len(others) - 1)]


def neighbour(parameter: RLParameter, value: float, *, upward: bool, integer: bool) -> float:
    """Return the value one step away, which always differs from `value`.

    A log step multiplies or divides by `factor`, so that a step up and a step down cancel; a linear step adds or
    subtracts (`factor` - 1) times the range. Integers are rounded and move by at least 1; a ladder moves one rung.
    A step that would leave the range is taken the other way, so no bound is absorbing; in a range too narrow for
    either, the value moves to the farther bound. A value outside the range, infinity included, moves to the nearer
    bound or rung.

    Args:
        parameter: The range or ladder.
        value: Where to start.
        upward: The direction to try first.
        integer: Whether only whole numbers count.

    Returns:
        A value of the range or ladder.
    """
    if parameter.choices is not None:
        above = [rung for rung in parameter.ladder if rung > value]
        below = [rung for rung in parameter.ladder if rung < value]
        return above[0] if above and (upward or not below) else below[-1]
    low, high = parameter.bounds
    if not low <= value <= high:
        return low if value < low else high
    for direction in (upward, not upward):
        moved = _step(parameter, value, upward=direction, integer=integer)
        for bound in (low, high):
            # 0.05 + 5 x 0.07 is a hair above 0.4: rounding must not keep a lattice from its own bound.
            if not integer and math.isclose(moved, bound, rel_tol=1e-9):
                moved = bound
        if low <= moved <= high and moved != value:
            return moved
    upper_half = value / low > high / value if parameter.scale == "log" else value - low > high - value
    return low if upper_half else high


def _step(parameter: RLParameter, value: float, *, upward: bool, integer: bool) -> float:
    low, high = parameter.bounds
    if parameter.scale == "log":
        moved = value * parameter.factor if upward else value / parameter.factor
    else:
        size = (parameter.factor - 1) * (high - low)
        moved = value + size if upward else value - size
    if not integer:
        return moved
    return max(round(moved), value + 1) if upward else min(round(moved), value - 1)


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
        return parameter.ladder[min(int(fraction * len(parameter.ladder)), len(parameter.ladder) - 1)]
    low, high = parameter.founders or parameter.bounds
    if parameter.scale == "log":
        value = low * math.pow(high / low, fraction)
        value = round(value) if integer else value
    else:
        value = low + int(fraction * (high - low + 1)) if integer else low + fraction * (high - low)
    return min(max(value, low), high)
