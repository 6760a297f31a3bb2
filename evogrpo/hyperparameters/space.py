"""The space that evolution searches: the values each evolving hyperparameter may take."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from evogrpo.hyperparameters.checks import finite_number, refuse_unknown, single_number, whole_between
from evogrpo.hyperparameters.named import answering
from evogrpo.hyperparameters.values import HYPERPARAMETER_NAMES, Hyperparameters, checked_value, is_categorical

Scale = Literal["linear", "log"]
DEFAULT_FACTOR = 1.2
MOST_MEMBERS = 100_000
"""The most members of a population: each has weights, an optimiser's state and a record of its own."""
MOST_SAMPLES = 10_000_000
"""The most samples of a learning step: each has random numbers, a reward and an advantage of its own."""


@answering
@dataclass(frozen=True, kw_only=True)
class RLParameter:
    """The values one hyperparameter may take: a range (`min` and `max`), a ladder of numbers or a set of names.

    Attributes:
        min: Smallest value of the range.
        max: Largest value of the range.
        scale: "log" multiplies or divides by `factor`; "linear" adds or subtracts (`factor` - 1) times the range.
        choices: At least two distinct values, instead of a range. Numbers are a ladder, stored in ascending order:
            mutation moves one rung. Names have no order: mutation takes any other one.
        factor: Size of one mutation on a range, greater than 1: with 1.2 a log step is x1.2 or /1.2 and a linear
            step is a fifth of the range.
        founders: Part of the range, (low, high), that the members of a first population are spread over; all of it by
            default. Mutation may leave it.

    Raises:
        ValueError: If the fields do not describe a range, a ladder or a set as above.
    """

    min: float | None = None
    max: float | None = None
    scale: Scale = "linear"
    choices: Sequence[float] | Sequence[str] | None = None
    factor: float = DEFAULT_FACTOR
    founders: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        refuse_unknown("scale", [self.scale], get_args(Scale))
        object.__setattr__(self, "factor", single_number("factor", self.factor))
        if self.factor <= 1:
            raise ValueError(f"factor must be greater than 1, got {self.factor}: a step of factor 1 would not move")
        if self.choices is None:
            self._check_range()
        else:
            self._check_choices(self.choices)

    def _check_range(self) -> None:
        if self.min is None or self.max is None:
            raise ValueError(
                f"an RLParameter needs both min and max, or choices, got min={self.min}, max={self.max}, choices=None"
            )
        low, high = finite_number("min", self.min), finite_number("max", self.max)
        object.__setattr__(self, "min", low)
        object.__setattr__(self, "max", high)
        if not low < high:
            raise ValueError(f"min must be below max, got min={self.min}, max={self.max}: leave out what stays fixed")
        if self.scale == "log" and low <= 0:
            raise ValueError(f'scale="log" needs min greater than 0, got {self.min}: use choices to include 0')
        if self.founders is not None:
            pair = self.founders if isinstance(self.founders, Sequence) and not isinstance(self.founders, str) else ()
            inside = tuple(finite_number("each of founders", value) for value in pair)
            if len(inside) != 2 or not low <= inside[0] < inside[1] <= high:
                raise ValueError(f"founders must be two ascending numbers in [{low}, {high}], got {self.founders!r}")
            object.__setattr__(self, "founders", inside)

    def _check_choices(self, choices: Sequence[float] | Sequence[str]) -> None:
        given = {
            "min": self.min,
            "max": self.max,
            "scale": self.scale,
            "factor": self.factor,
            "founders": self.founders,
        }
        if tuple(given.values()) != (None, None, "linear", DEFAULT_FACTOR, None):
            raise ValueError(
                "an RLParameter with choices takes no min, max, scale, factor or founders, got "
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())}: a mutation moves one rung"
            )
        if isinstance(choices, str) or not isinstance(choices, Iterable):
            raise ValueError(f"choices must be a list of numbers or of names, got {choices!r}")
        names = tuple(value for value in choices if isinstance(value, str))
        values: tuple[float | str, ...] = tuple(dict.fromkeys(names))
        if len(names) != len(choices):
            values = tuple(sorted({finite_number("each of choices", value) for value in choices}))
        if len(values) < 2 or len(values) != len(choices):
            raise ValueError(f"choices must be at least two distinct values, got {list(choices)}")
        object.__setattr__(self, "choices", values)

    @property
    def names(self) -> tuple[str, ...]:
        """The names to choose from; empty for numbers."""
        return tuple(value for value in self.choices or () if isinstance(value, str))

    @property
    def ladder(self) -> tuple[float, ...]:
        """The numbers to choose from, ascending; empty for a range and for names."""
        return tuple(value for value in self.choices or () if not isinstance(value, str))

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest number; raises ValueError for names, which have no order."""
        if self.names:
            raise ValueError(f"names have no bounds, got choices {list(self.names)}")
        if self.ladder:
            return self.ladder[0], self.ladder[-1]
        assert self.min is not None and self.max is not None
        return self.min, self.max

    @property
    def extent(self) -> str:
        """What it may be, in words."""
        if self.choices is not None:
            return f"choices {list(self.choices)}"
        low, high = self.bounds
        return f"range [{low:g}, {high:g}]"

    def closest(self, value: float | str) -> float | str | None:
        """Return the value that it may take which is closest to `value`: itself inside; None for an unknown name."""
        if isinstance(value, str):
            return value if value in self.names else None
        low, high = self.bounds
        if self.ladder:
            return min(self.ladder, key=lambda rung: abs(rung - value))
        return min(max(value, low), high)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that describe this range, ladder or set."""
        if self.choices is not None:
            return {"choices": list(self.choices)}
        fields = {"min": self.min, "max": self.max, "scale": self.scale, "factor": self.factor}
        return fields if self.founders is None else fields | {"founders": list(self.founders)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from fields by name; raises ValueError if a field is unknown or refused."""
        refuse_unknown("field of RLParameter", values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)


class HyperparameterConfig(Mapping[str, RLParameter]):
    """The hyperparameters that evolve and the values each may take; what is left out stays fixed.

    An immutable mapping from name to `RLParameter`, always in the order of the fields of `Hyperparameters`.

    Args:
        parameters: One `RLParameter` per evolving hyperparameter, by name; none at all is allowed. A first member's own
            value, where it is given, lies among them; where it is not, it is the nearest to the default (see `first`).

    Raises:
        ValueError: If a name is unknown, or a bound or a choice is illegal for its hyperparameter.
    """

    def __init__(self, **parameters: RLParameter) -> None:
        refuse_unknown("hyperparameter", parameters, HYPERPARAMETER_NAMES)
        for name, parameter in parameters.items():
            if not isinstance(parameter, RLParameter):
                raise ValueError(f"{name} must be an RLParameter, got {parameter!r}")
            if parameter.choices is None and is_categorical(name):
                raise ValueError(f"{name} must have choices, got a range: names have no order")
            if name == "group_size" and parameter.founders is not None:
                raise ValueError(
                    "group_size takes no founders, got some: it moves on a ladder of divisors, not a range"
                )
            for value in parameter.bounds if parameter.choices is None else parameter.choices:
                checked_value(name, value)
        self._parameters = {name: parameters[name] for name in HYPERPARAMETER_NAMES if name in parameters}

    def __getitem__(self, name: str) -> RLParameter:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __repr__(self) -> str:
        return f"HyperparameterConfig({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def first(self, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of a first member; where a default cannot evolve, it starts at the nearest value.

        Args:
            defaults: By name; those of `Hyperparameters` for the rest.
            given: What the caller has chosen, by name.

        Raises:
            ValueError: If a value is refused, or one that is given lies outside what evolution could make of it; None
                starts anywhere.
        """
        record = Hyperparameters.from_json({**defaults, **given})
        near: dict[str, Any] = {}
        for name, parameter in self.items():
            value = getattr(record, name)
            if value is None or (is_categorical(name) and name not in given):
                continue
            closest = parameter.closest(value)
            if closest == value:
                continue
            if name in given:
                raise ValueError(
                    f"{name} must start inside its own {parameter.extent}, got {value!r}: give {name} a value from "
                    "there, or widen what it may become"
                )
            near[name] = closest
        return dataclasses.replace(record, **near)

    def for_samples_per_step(self, samples_per_step: int) -> "HyperparameterConfig":
        """Return the same space with group_size, if it evolves, as a ladder of divisors of `samples_per_step`.

        Raises:
            ValueError: If a choice of group_size is no divisor, or its range holds fewer than two divisors.
        """
        ladder = feasible_group_sizes(samples_per_step)
        parameter = self.get("group_size")
        if parameter is None:
            return self
        valid = ", ".join(map(str, ladder))
        if parameter.choices is not None:
            wrong = [value for value in parameter.ladder if value not in ladder]
            if wrong:
                raise ValueError(
                    f"every choice of group_size must divide samples_per_step={samples_per_step}, got {wrong}: "
                    f"choose from {valid}, so that every member spends the same samples per learning step"
                )
            return self
        low, high = parameter.bounds
        inside = [value for value in ladder if low <= value <= high]
        if len(inside) < 2:
            raise ValueError(
                f"the range of group_size must hold at least two divisors of samples_per_step={samples_per_step}, "
                f"got {inside} in [{low}, {high}]: widen it to take in two of {valid}, or change samples_per_step"
            )
        return HyperparameterConfig(**{**self, "group_size": RLParameter(choices=inside)})

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return every parameter's fields by name."""
        return {name: parameter.to_json() for name, parameter in self.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """Build from the fields of every parameter by name; raises ValueError if one is unknown or refused."""
        return cls(**{name: RLParameter.from_json(fields) for name, fields in values.items()})


def feasible_group_sizes(samples_per_step: int) -> tuple[int, ...]:
    """Return every group size that splits a learning step into whole groups: the divisors of at least 2, ascending.

    Raises:
        ValueError: If `samples_per_step` is not an integer from 2, as a group needs two samples, to `MOST_SAMPLES`.
    """
    samples = whole_between("samples_per_step", samples_per_step, 2, MOST_SAMPLES)
    small = [size for size in range(1, math.isqrt(samples) + 1) if samples % size == 0]
    return tuple(sorted({*small, *(samples // size for size in small)} - {1}))


def check_group_size(group_size: int, samples_per_step: int, *, whose: str = "") -> None:
    """Refuse a group size that does not split a learning step into whole groups.

    Args:
        group_size: Samples from one start.
        samples_per_step: Samples of a learning step.
        whose: Who has it, for the message.

    Raises:
        ValueError: If `group_size` does not divide `samples_per_step`.
    """
    if samples_per_step % group_size:
        valid = ", ".join(map(str, feasible_group_sizes(samples_per_step)))
        raise ValueError(
            f"group_size must divide samples_per_step={samples_per_step}, so that every member spends the same; "
            f"got {group_size}{whose and f' ({whose})'}: use one of {valid}"
        )


def common_samples(group_size: int, config: HyperparameterConfig) -> int:
    """Return a number of samples (completions or episodes) that every possible group size divides.

    Raises:
        ValueError: If group_size evolves over a range.
    """
    parameter = config.get("group_size")
    if parameter is None:
        return group_size
    if parameter.choices is None:
        raise ValueError(
            "samples_per_step must be given when group_size evolves over a range, so that only its divisors are "
            "dealt; or give group_size choices"
        )
    return math.lcm(group_size, *(int(choice) for choice in parameter.choices))
