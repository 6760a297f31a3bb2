"""The hyperparameters of one member and the space that evolution searches."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

Scale = Literal["linear", "log"]
DEFAULT_FACTOR = 1.2


def unknown_name_error(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """Build the error for a name that does not exist, with the nearest name that does.

    Args:
        kind: What was being named, e.g. "hyperparameter".
        name: The unknown name.
        valid: The names that exist.

    Returns:
        The error, for the caller to raise.
    """
    names = list(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ValueError(f"unknown {kind} {name!r}: {hint}Valid names: {', '.join(names) or '(none)'}")


def refuse_unknown(kind: str, names: Iterable[object], valid: Iterable[str]) -> None:
    """Raise the error of `unknown_name_error` for the first of `names` that is not in `valid`."""
    known = list(valid)
    for name in names:
        if name not in known:
            raise unknown_name_error(kind, name, known)


def finite_number(what: str, value: object) -> float:
    """Return `value` as a plain int or float, or raise ValueError naming `what` if it is no finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        # YAML 1.1 reads 1e-4, without a dot, as text: the commonest way to get here.
        remedy = ": in YAML write 1.0e-4, with the dot and no quotes" if isinstance(value, str) else ""
        raise ValueError(f"{what} must be a number, got {value!r} ({type(value).__name__}){remedy}")
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def whole_number(what: str, value: object) -> int:
    """Return `value` as a plain int, or raise ValueError naming `what` if it is none (4.0 and True are none)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{what} must be an integer, got {value!r} ({type(value).__name__})")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What evolution may change between generations: one frozen record per member.

    Attributes:
        lr: AdamW step size, greater than 0.
        clip_coef: Half-width of the trust region on the probability ratio, in (0, 1).
        group_size: Completions (episodes) per initial state, at least 2.
        beta: Weight of the KL to the reference, at least 0; 0 costs no reference pass.
        temperature: Divides the logits while sampling and learning, greater than 0.
        update_epochs: Passes over each learning step's samples, at least 1.
        max_grad_norm: Bound on the member's gradient norm, greater than 0.
        batch_size: Samples (transitions for small networks) per optimizer step, at least 1.

    Raises:
        ValueError: If a value is of the wrong type, not finite, or outside the range above.
    """

    lr: float = 1e-4
    clip_coef: float = 0.2
    group_size: int = 8
    beta: float = 0.0
    temperature: float = 1.0
    update_epochs: int = 1
    max_grad_norm: float = 0.5
    batch_size: int = 64

    def __post_init__(self) -> None:
        for name in HYPERPARAMETER_NAMES:
            object.__setattr__(self, name, checked_value(name, getattr(self, name)))

    def to_json(self) -> dict[str, int | float]:
        """Return the values by name, as plain JSON values."""
        return {name: getattr(self, name) for name in HYPERPARAMETER_NAMES}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from values by name, defaults for the rest; raises ValueError for an unknown name or refused value."""
        refuse_unknown("hyperparameter", values, HYPERPARAMETER_NAMES)
        return cls(**values)


HYPERPARAMETER_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Hyperparameters))
_INTEGER_NAMES = frozenset(field.name for field in dataclasses.fields(Hyperparameters) if field.type is int)


def is_integer(name: str) -> bool:
    """Say whether the hyperparameter `name` takes whole numbers only; raises ValueError if there is none."""
    refuse_unknown("hyperparameter", [name], HYPERPARAMETER_NAMES)
    return name in _INTEGER_NAMES


def checked_value(name: str, value: object) -> int | float:
    """Return `value` in the type of hyperparameter `name` if it is legal there.

    Raises:
        ValueError: If the name is unknown, or the value is of the wrong type, not finite or out of range.
    """
    number: int | float = whole_number(name, value) if is_integer(name) else float(finite_number(name, value))
    match name:
        case "clip_coef":
            legal, rule = 0 < number < 1, "lie in (0, 1)"
        case "group_size":
            legal, rule = number >= 2, "be at least 2"
        case "beta":
            legal, rule = number >= 0, "be at least 0"
        case "update_epochs" | "batch_size":
            legal, rule = number >= 1, "be at least 1"
        case _:
            legal, rule = number > 0, "be greater than 0"
    if not legal:
        reason = ": a lone completion has no group to be compared with" if name == "group_size" else ""
        raise ValueError(f"{name} must {rule}, got {number}{reason}")
    return number


@dataclass(frozen=True, kw_only=True)
class RLParameter:
    """The values one hyperparameter may take: a range (`min` and `max`) or a ladder (`choices`), not both.

    Attributes:
        min: Smallest value of the range.
        max: Largest value of the range.
        scale: "log" multiplies or divides by `factor`; "linear" adds or subtracts (`factor` - 1) times the range.
        choices: The ladder, at least two distinct values; stored in ascending order. Mutation moves one rung.
        factor: Size of one mutation on a range, greater than 1: with 1.2 a log step is x1.2 or /1.2 and a linear
            step is a fifth of the range.

    Raises:
        ValueError: If the fields do not describe a range or a ladder as above.
    """

    min: float | None = None
    max: float | None = None
    scale: Scale = "linear"
    choices: Sequence[float] | None = None
    factor: float = DEFAULT_FACTOR

    def __post_init__(self) -> None:
        refuse_unknown("scale", [self.scale], get_args(Scale))
        if finite_number("factor", self.factor) <= 1:
            raise ValueError(f"factor must be greater than 1, got {self.factor}: a step of factor 1 would not move")
        if self.choices is None:
            self._check_range()
        else:
            self._check_ladder(self.choices)

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

    def _check_ladder(self, choices: Sequence[float]) -> None:
        if (self.min, self.max, self.scale, self.factor) != (None, None, "linear", DEFAULT_FACTOR):
            raise ValueError(
                "an RLParameter with choices takes no min, max, scale or factor, got "
                f"min={self.min}, max={self.max}, scale={self.scale!r}, factor={self.factor}: a mutation moves one rung"
            )
        if isinstance(choices, str) or not isinstance(choices, Iterable):
            raise ValueError(f"choices must be a list of numbers, got {choices!r}")
        ladder = tuple(sorted({finite_number("each of choices", value) for value in choices}))
        if len(ladder) < 2 or len(ladder) != len(choices):
            raise ValueError(f"choices must be at least two distinct values, got {list(choices)}")
        object.__setattr__(self, "choices", ladder)

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        if self.choices is not None:
            return self.choices[0], self.choices[-1]
        assert self.min is not None and self.max is not None
        return self.min, self.max

    def to_json(self) -> dict[str, Any]:
        """Return the fields that describe this range or ladder."""
        if self.choices is not None:
            return {"choices": list(self.choices)}
        return {"min": self.min, "max": self.max, "scale": self.scale, "factor": self.factor}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from fields by name; raises ValueError if a field is unknown or refused."""
        refuse_unknown("field of RLParameter", values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)


class HyperparameterConfig(Mapping[str, RLParameter]):
    """The hyperparameters that evolve and the values each may take; what is left out stays fixed.

    An immutable mapping from name to `RLParameter`, always in the order of the fields of `Hyperparameters`.

    Args:
        parameters: One `RLParameter` per evolving hyperparameter, by name; none at all is allowed.

    Raises:
        ValueError: If a name is unknown, or a bound or a choice is illegal for its hyperparameter.
    """

    def __init__(self, **parameters: RLParameter) -> None:
        refuse_unknown("hyperparameter", parameters, HYPERPARAMETER_NAMES)
        for name, parameter in parameters.items():
            if not isinstance(parameter, RLParameter):
                raise ValueError(f"{name} must be an RLParameter, got {parameter!r}")
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
            wrong = [value for value in parameter.choices if value not in ladder]
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
        ValueError: If `samples_per_step` is not an integer of at least 2.
    """
    if whole_number("samples_per_step", samples_per_step) < 2:
        raise ValueError(f"samples_per_step must be at least 2, got {samples_per_step}: a group needs two samples")
    return tuple(size for size in range(2, samples_per_step + 1) if samples_per_step % size == 0)
