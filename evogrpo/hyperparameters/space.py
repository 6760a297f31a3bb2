"""The space that evolution searches: which hyperparameters evolve, and where each counts."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

from evogrpo.hyperparameters.checks import refuse_unknown, whole_between
from evogrpo.hyperparameters.parameter import RLParameter, Scale
from evogrpo.hyperparameters.ranges import NETWORK_RANGES
from evogrpo.hyperparameters.values import HYPERPARAMETER_NAMES, Hyperparameters, Value, checked_value, is_categorical

MOST_MEMBERS = 100_000
"""The most members of a population: each has weights, an optimiser's state and a record of its own."""
MOST_SAMPLES = 10_000_000
"""The most samples of a learning step: each has random numbers, a reward and an advantage of its own."""


def _parameter(value: Any, usual: Scale) -> RLParameter:
    """Return the parameter that a value of `HyperparameterConfig` describes; pairs have the usual scale."""
    if isinstance(value, RLParameter):
        return value
    if isinstance(value, list) or hasattr(value, "choices"):  # Optuna's CategoricalDistribution
        return RLParameter(choices=value if isinstance(value, list) else list(value.choices))
    if isinstance(value, tuple) and len(value) == 2:
        return RLParameter(min=value[0], max=value[1], scale=usual)
    if hasattr(value, "low") and hasattr(value, "high"):  # Optuna's FloatDistribution, IntDistribution
        return RLParameter(min=value.low, max=value.high, scale="log" if getattr(value, "log", False) else "linear")
    raise ValueError(f"must be an RLParameter, a pair (min, max) or a list of choices, got {value!r:.80}")


class HyperparameterConfig(Mapping[str, RLParameter]):
    """The hyperparameters that evolve and the values each may take; what is left out stays fixed.

    An immutable mapping from name to `RLParameter`, always in the order of the fields of `Hyperparameters`.

    Args:
        values: By name, the values of each evolving hyperparameter: an `RLParameter`, a pair of numbers for a range
            (on the scale that is usual for it, such as log for lr), a list of choices, or an Optuna distribution. The
            first member's own value must be among them; without one it is the nearest to the default (see `first`).

    Raises:
        ValueError: If a name is unknown, a bound or a choice is illegal for its hyperparameter, or one counts only in
            a circle or where another has a value that it never takes.
    """

    def __init__(self, **values: Any) -> None:
        refuse_unknown("hyperparameter", values, HYPERPARAMETER_NAMES)
        parameters = {}
        for name, value in values.items():
            try:
                parameters[name] = _parameter(value, NETWORK_RANGES.get(name, RLParameter(min=0, max=1)).scale)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        for name, parameter in parameters.items():
            if parameter.choices is None and is_categorical(name):
                raise ValueError(f"{name} must have choices, got a range: names have no order")
            if name == "group_size" and parameter.founders is not None:
                raise ValueError(
                    "group_size takes no founders, got some: it moves on a ladder of divisors, not a range"
                )
            for value in parameter.bounds if parameter.choices is None else parameter.choices:
                checked_value(name, value)
        self._parameters = {name: parameters[name] for name in HYPERPARAMETER_NAMES if name in parameters}
        self._conditions = {name: each.condition for name, each in self._parameters.items() if each.condition}
        self._check_conditions()
        self._ordered = tuple(sorted(self._parameters, key=lambda name: (self._depth(name), name)))

    def __getitem__(self, name: str) -> RLParameter:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __repr__(self) -> str:
        return f"HyperparameterConfig({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def _check_conditions(self) -> None:
        for name, parameter in self.items():
            waiting = [name]
            for other in waiting:  # grows while it is gone through
                waiting += [each for each in self._condition(other) if each not in waiting]
                if name in self._condition(other):
                    raise ValueError(
                        f"no hyperparameter can wait for itself, but {name} counts only when {other} has some value"
                        f"{f', and {other} only when {name} has' if other != name else ''}: drop one `when`"
                    )
            for other, values in parameter.condition.items():
                controlling = self.get(other)
                if controlling is not None and not any(
                    value is None or controlling.closest(value) == value for value in values
                ):
                    raise ValueError(
                        f"{name} would never count: it needs {other} in {list(values)}, which has "
                        f"{controlling.extent}: name values from there"
                    )

    def _condition(self, name: str) -> Mapping[str, tuple[Value, ...]]:
        return self._conditions.get(name, {})

    def _depth(self, name: str) -> int:
        return 1 + max((self._depth(other) for other in self._condition(name)), default=0)

    @property
    def ordered(self) -> tuple[str, ...]:
        """The names such that each comes after those that it needs some value of."""
        return self._ordered

    def counts(self, name: str, values: Mapping[str, Value]) -> bool:
        """Say whether a hyperparameter changes anything in a member with these values: see `RLParameter.when`.

        What another needs counts itself, or the other does not either.
        """
        condition = self._conditions.get(name)
        if condition is None:
            return True
        return all(values[other] in needed and self.counts(other, values) for other, needed in condition.items())

    def point(self, hyperparameters: Hyperparameters) -> tuple[Value, ...]:
        """Return what makes a member differ from others here: all its values, None for those that do not count."""
        values = hyperparameters.to_json()
        return tuple(value if self.counts(name, values) else None for name, value in values.items())

    def first(self, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of a first member; where a default cannot evolve, it starts at the nearest value.

        Args:
            defaults: By name; those of `Hyperparameters` for the rest.
            given: What the caller has chosen, by name.

        Raises:
            ValueError: If a value is refused; if one that is given lies outside what evolution could make of it, but
                None starts anywhere; or if something evolves that never counts, as what it needs is fixed otherwise.
        """
        record = Hyperparameters.from_json({**defaults, **given})
        for name, parameter in self.items():
            for other, needed in parameter.condition.items():
                if other not in self and getattr(record, other) not in needed:
                    raise ValueError(
                        f"{name} would never count: it needs {other} in {list(needed)}, which stays "
                        f"{getattr(record, other)!r}: set {other}, let it evolve, or leave {name} out"
                    )
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
        return HyperparameterConfig(**{**self, "group_size": RLParameter(choices=inside, when=parameter.when)})

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
