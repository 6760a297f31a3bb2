"""Children of a plan: mutated hyperparameters that differ from those of all living members."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from evogrpo.config.checks import refuse_unknown
from evogrpo.config.hyperparameters import Hyperparameters, Value, is_categorical, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.history import History
from evogrpo.evolution.lineage import MemberRecord
from evogrpo.evolution.mutation import Mutation, changes_between, neighbour, quantile, relative_position
from evogrpo.text import reference_to

Proposal = Callable[[np.random.Generator], Hyperparameters]
"""Function from a random generator to the hyperparameters of one child."""

MAX_PROPOSALS = 16
"""Proposals that are tried before the space is searched for a free point."""


class TakenPoints:
    """Points of the search space that members of a generation use, by parent.

    Two members with the same parent and equal hyperparameters would be the same learner twice.

    Args:
        space: Search space with the group sizes of the next generation. In an empty space, every point is free.
    """

    def __init__(self, space: HyperparameterConfig) -> None:
        self._space = space
        self._points: set[tuple[int | None, tuple[Value, ...]]] = set()

    def add(self, parent: int | None, hyperparameters: Hyperparameters) -> None:
        """Mark the point of a member with this parent index as taken; None for a founder."""
        self._points.add((parent, self._space.active_values(hyperparameters)))

    def draw(
        self, parent: int | None, draw: Proposal, stream: Callable[[int], np.random.Generator]
    ) -> tuple[Hyperparameters, bool]:
        """Take a free point for one birth.

        Args:
            parent: Index of the parent; None for a founder.
            draw: Proposes hyperparameters.
            stream: Random generator of each attempt, by its number.

        Returns:
            The first free one of `MAX_PROPOSALS` proposals, or else any free point of the space; and whether
            there was one. If not, the first proposal.
        """
        first = proposal = draw(stream(0))
        for attempt in range(1, MAX_PROPOSALS):
            if self.free(parent, proposal):
                break
            proposal = draw(stream(attempt))
        else:
            free = (
                point
                for point in points(self._space, first, len(self._points) + 1, stream(MAX_PROPOSALS))
                if self.free(parent, point)
            )
            proposal = next(free, first)
        is_free = self.free(parent, proposal)
        self.add(parent, proposal)
        return proposal, is_free

    def free(self, parent: int | None, hyperparameters: Hyperparameters) -> bool:
        """Return True if no member with this parent has these hyperparameters."""
        return not self._space or (parent, self._space.active_values(hyperparameters)) not in self._points


def points(
    space: HyperparameterConfig, base: Hyperparameters, count: int, rng: np.random.Generator
) -> Iterator[Hyperparameters]:
    """Iterate over distinct points of a space in random order: all of a small space, at least `count` of a large one.

    Args:
        space: Search space.
        base: Values of all other hyperparameters.
        count: Maximum number of values per range.
        rng: Random generator of the order and of values in ranges.
    """
    axes = {name: _values(space[name], name, base, count, rng) for name in space.ordered}
    for values in _combinations(space, base.to_json(), axes, space.ordered):
        yield Hyperparameters.from_json(values)


def _combinations(
    space: HyperparameterConfig,
    values: dict[str, Value],
    axes: Mapping[str, Sequence[Value]],
    names: Sequence[str],
) -> Iterator[dict[str, Value]]:
    """Yield the combinations of values, without those that differ in inactive hyperparameters only."""
    if not names:
        yield values
        return
    # An inactive hyperparameter does not make another point.
    for value in axes[names[0]] if space.is_active(names[0], values) else [values[names[0]]]:
        yield from _combinations(space, {**values, names[0]: value}, axes, names[1:])


def _values(
    parameter: RLParameter, name: str, base: Hyperparameters, count: int, rng: np.random.Generator
) -> list[Value]:
    """Return values of one hyperparameter in random order: all, or `count` of a range that has more.

    If the parameter has a `factor`, return the values that up to `count` steps reach from `base`, the nearest first.
    """
    if parameter.choices is not None:
        return [parameter.choices[position] for position in rng.permutation(len(parameter.choices))]
    if parameter.factor is not None:
        return _values_in_steps(parameter, base.number(name), count, integer=is_integer(name))
    if is_integer(name):
        low, high = (int(bound) for bound in parameter.bounds)
        count_all = high - low + 1
        return [low + int(offset) for offset in rng.choice(count_all, size=min(count, count_all), replace=False)]
    return [quantile(parameter, float(fraction), integer=False) for fraction in rng.random(count)]


def _values_in_steps(parameter: RLParameter, value: float, count: int, *, integer: bool) -> list[Value]:
    """Return a value and those that up to `count` steps up and down reach, the nearest first."""
    values: list[Value] = [value]
    above = below = value
    for _ in range(count):
        higher = neighbour(parameter, above, upward=True, integer=integer)
        lower = neighbour(parameter, below, upward=False, integer=integer)
        if higher > above:  # a step from the end of the range goes back
            above = higher
            values.append(above)
        if lower < below:
            below = lower
            values.append(below)
    return values


T = TypeVar("T")


class Perturbation(Protocol):
    """Callable that maps a parent's hyperparameters to those of a child."""

    def __call__(
        self, hyperparameters: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator, /
    ) -> Hyperparameters:
        """Propose a child's hyperparameters.

        Args:
            hyperparameters: Hyperparameters of the parent.
            space: Search space; only its hyperparameters may change, within their ranges.
            rng: Random generator. The result may depend on nothing else, so that a run can be resumed.
        """
        ...


def proposals(
    perturbation: Perturbation, history: History, parent: MemberRecord, space: HyperparameterConfig
) -> Proposal:
    """Return a function that proposes hyperparameters for a member's children, for `Plan.from_choices`.

    Args:
        perturbation: Maps the hyperparameters of a parent to those of a child.
        history: History that gives the last mutation steps of the parent.
        parent: The parent.
        space: Search space with the group sizes of the next generation.
    """
    if isinstance(perturbation, Mutation):
        steps = last_steps(history, parent)
        return lambda rng: perturbation(parent.hyperparameters, space, rng, steps)
    return lambda rng: _call_custom(perturbation, parent.hyperparameters, space, rng)


def last_steps(history: History, member: MemberRecord) -> dict[str, float]:
    """Return the steps from a member's parent to the member, as shares of the ranges, by name of the hyperparameter.

    Founders have none, and neither have unchanged hyperparameters.
    """
    records = {record.index: record for generation in history.generations for record in generation.members}
    parent = None if member.parent is None else records.get(member.parent)
    if parent is None:
        return {}
    steps = {}
    for name, parameter in history.space.items():
        if not is_categorical(name):
            old, new = (
                relative_position(parameter, record.hyperparameters.number(name)) for record in (parent, member)
            )
            if old != new:
                steps[name] = new - old
    return steps


def check_perturbation(value: object) -> None:
    """Raise ValueError unless the value is a perturbation."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            f"mutation must be Mutation(...) or a function of (hyperparameters, space, rng), got {value!r:.80}"
        )


def perturbation_to_json(perturbation: Perturbation | None) -> dict[str, Any] | None:
    """Return a perturbation as plain JSON values: its settings, and the name of a custom function or class."""
    if perturbation is None or isinstance(perturbation, Mutation):
        return None if perturbation is None else perturbation.to_json()
    settings = perturbation.to_json() if hasattr(perturbation, "to_json") else {}
    return {**settings, "name": reference_to(definition_of(perturbation))}


def perturbation_from_json(values: Any, custom: Callable[..., Any] | None = None) -> Perturbation | None:
    """Build a perturbation from the result of `perturbation_to_json`.

    Args:
        values: The settings; "name" is that of a custom function or class.
        custom: This function or class. A name is never imported here, because files are untrusted.

    Raises:
        ValueError: If a setting is invalid, or the custom function or class is missing.
    """
    if not isinstance(values, Mapping):
        other: Perturbation | None = values  # None, or an invalid value, which the strategy's constructor reports
        return other
    if "name" not in values:
        return Mutation.from_json(values)
    name, settings = values["name"], {key: value for key, value in values.items() if key != "name"}
    if custom is None:
        raise ValueError(
            f"Custom mutation {name} is not imported from a file. Pass the strategy with it: Tournament(mutation=...)."
        )
    if not isinstance(custom, type):
        refuse_unknown(f"setting of {name}", settings, ())
        function: Perturbation = custom
        return function
    built: Perturbation = build_from_settings(custom, name, settings)
    return built


def build_from_settings(make: Callable[..., T], name: object, settings: Mapping[str, Any]) -> T:
    """Call a class or function with settings as keyword arguments.

    Args:
        make: Class or function.
        name: Its name, for messages.
        settings: Keyword arguments.

    Raises:
        ValueError: If a setting is unknown, missing or invalid.
    """
    accepted = inspect.signature(make)
    refuse_unknown(f"setting of {name}", settings, accepted.parameters)
    try:
        accepted.bind(**settings)
    except TypeError as error:
        raise ValueError(f"settings of {name}: {error}") from error
    return make(**settings)


def definition_of(perturbation: Perturbation) -> Callable[..., Any]:
    """Return the function of a custom perturbation, or the class if it is an object."""
    return perturbation if hasattr(perturbation, "__qualname__") else type(perturbation)


def _call_custom(
    perturbation: Perturbation, parent: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator
) -> Hyperparameters:
    """Call a custom perturbation and validate its result."""
    name = getattr(perturbation, "__name__", type(perturbation).__name__)
    child: Any = perturbation(parent, space, rng)
    if not isinstance(child, Hyperparameters):
        raise ValueError(f"{name} must return Hyperparameters, got {child!r:.80}. Use dataclasses.replace.")
    for changed, (_, value) in changes_between(parent, child).items():
        if changed not in space:
            raise ValueError(f"{name} may only change {', '.join(space)}, got {changed}={value!r}")
        if value is None or space[changed].closest(value) != value:
            raise ValueError(f"{name}: {changed} must be in its {space[changed].extent}, got {value!r}. Clip it.")
    return child
