"""The values that one hyperparameter may take, and when it counts."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from evogrpo.hyperparameters.checks import finite_number, refuse_unknown, single_number
from evogrpo.hyperparameters.named import answering
from evogrpo.hyperparameters.values import HYPERPARAMETER_NAMES, Value, checked_value

Scale = Literal["linear", "log"]
"""How steps in a range are measured."""


@answering
@dataclass(frozen=True, kw_only=True)
class RLParameter:
    """The values one hyperparameter may take: a range (`min` and `max`), a ladder of numbers or a set of names.

    Attributes:
        min: Smallest value of the range.
        max: Largest value of the range.
        scale: "log" multiplies or divides by `factor`; "linear" adds or subtracts (`factor` - 1) times the range.
        choices: At least two distinct values, instead of a range. Numbers are a ladder, stored in ascending order:
            mutation climbs it, one rung or a few. Names have no order: mutation takes any other one.
        factor: The size of every mutation on a range, greater than 1: with 1.2 a log step is x1.2 or /1.2 and a linear
            step is a fifth of the range, and nothing else. By default steps are about a fifth of the range on its
            scale, adapt, and now and then the whole range is drawn from; see `Mutation`.
        founders: Part of the range, (low, high), that the members of a first population are spread over; all of it by
            default. Mutation may leave it.
        when: The values of other hyperparameters without which this one changes nothing, by name, such as
            {"loss_type": ["grpo", "dapo"]}: where a member has others, it is neither drawn nor mutated, and no
            difference. None is a value of its own: what the objective says. By default it always counts.

    Raises:
        ValueError: If the fields do not describe a range, a ladder or a set as above.
    """

    min: float | None = None
    max: float | None = None
    scale: Scale = "linear"
    choices: Sequence[float] | Sequence[str] | None = None
    factor: float | None = None
    founders: tuple[float, float] | None = None
    when: Mapping[str, Sequence[Value] | Value] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        refuse_unknown("scale", [self.scale], get_args(Scale))
        if self.factor is not None:
            object.__setattr__(self, "factor", single_number("factor", self.factor))
            if self.factor <= 1:
                raise ValueError(f"factor must be greater than 1, got {self.factor}: a step of factor 1 would not move")
        if self.when is not None:
            object.__setattr__(self, "when", checked_condition(self.when))
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
        if tuple(given.values()) != (None, None, "linear", None, None):
            raise ValueError(
                "an RLParameter with choices takes no min, max, scale, factor or founders, got "
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())}: a mutation takes another of them"
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
    def condition(self) -> Mapping[str, tuple[Value, ...]]:
        """What other hyperparameters must be for this one to count, by name; empty where it always does."""
        return {name: values for name, values in (self.when or {}).items() if isinstance(values, tuple)}

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
        own = {
            "factor": self.factor,
            "founders": None if self.founders is None else list(self.founders),
            "when": None if self.when is None else {name: list(values) for name, values in self.condition.items()},
        }
        if self.choices is not None:
            fields: dict[str, Any] = {"choices": list(self.choices)}
        else:
            fields = {"min": self.min, "max": self.max, "scale": self.scale}
        return fields | {name: value for name, value in own.items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from fields by name; raises ValueError if a field is unknown or refused."""
        refuse_unknown("field of RLParameter", values, [each.name for each in dataclasses.fields(cls)])
        return cls(**values)


def checked_condition(when: object) -> dict[str, tuple[Value, ...]]:
    """Return a condition with its values as tuples; raises ValueError if a name or a value is none of that name."""
    if not isinstance(when, Mapping) or not when:
        raise ValueError(
            f"when must name hyperparameters and the values that they need, such as {{'loss_type': ['grpo']}}, got "
            f"{when!r:.80}"
        )
    refuse_unknown("hyperparameter", when, HYPERPARAMETER_NAMES)
    condition = {}
    for name, given in when.items():
        listed = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        if not listed:
            raise ValueError(f"when must list at least one value of {name}, got none: leave {name} out")
        condition[name] = tuple(checked_value(name, value) for value in listed)
    return condition
