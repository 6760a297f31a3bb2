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
from evogrpo.evolution.mutation import Mutation, changes_between, neighbour, place, quantile
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
        found = self.free(parent, proposal)
        self.add(parent, proposal)
        return proposal, found

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
    # An inactive hyperparameter does not make another point.
    for value in axes[names[0]] if space.is_active(names[0], values) else [values[names[0]]]:
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
    return lambda rng: _checked(perturbation, parent.hyperparameters, space, rng)


def last_steps(history: History, member: MemberRecord) -> dict[str, float]:
    """Return the steps with which a member was born, as shares of the ranges, by name; none for a founder.

    A number that its birth left as it was has none, and neither has one that did not count before.
    """
    born = {each.index: each for generation in history.generations for each in generation.members}
    born |= {kept.member.index: kept.member for kept in history.kept_states}
    parent = None if member.parent is None else born.get(member.parent)
    if parent is None:
        return {}
    steps = {}
    for name, parameter in history.space.items():
        if not is_categorical(name):
            old, new = (place(parameter, each.hyperparameters.number(name)) for each in (parent, member))
            if old != new:
                steps[name] = new - old
    return steps


def checked_perturbation(value: object) -> None:
    """Raise ValueError unless the value is a perturbation."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            f"mutation must be a Mutation, or be called with hyperparameters, space and rng, got {value!r:.80}: "
            "write Mutation(...), or give a function of your own"
        )


def perturbation_to_json(perturbation: Perturbation | None) -> dict[str, Any] | None:
    """Return a perturbation as plain JSON values: its settings, and the reference of a user's function or class."""
    if perturbation is None or isinstance(perturbation, Mutation):
        return None if perturbation is None else perturbation.to_json()
    settings = perturbation.to_json() if hasattr(perturbation, "to_json") else {}
    return {**settings, "name": reference_to(defined(perturbation))}


def perturbation_from_json(values: Any, own: Callable[..., Any] | None = None) -> Perturbation | None:
    """Build a perturbation from what `perturbation_to_json` returned.

    Args:
        values: The settings; with a "name" they are of the user's own.
        own: The function or the class that the name stands for; names are never imported here.

    Raises:
        ValueError: If a setting is refused, or the user's own is not given.
    """
    if not isinstance(values, Mapping):
        none: Perturbation | None = values  # or something else: the strategy's own check says what it must be
        return none
    if "name" not in values:
        return Mutation.from_json(values)
    name, settings = values["name"], {key: value for key, value in values.items() if key != "name"}
    if own is None:
        raise ValueError(
            f"the mutation {name} is not imported merely because a file names it: give the strategy with it, such as "
            "Tournament(mutation=...)"
        )
    if not isinstance(own, type):
        refuse_unknown(f"setting of {name}", settings, ())
        function: Perturbation = own
        return function
    made: Perturbation = with_settings(own, name, settings)
    return made


def with_settings(make: Callable[..., T], name: object, settings: Mapping[str, Any]) -> T:
    """Call what makes an object by its settings.

    Raises:
        ValueError: If a setting is unknown, missing or refused; `name` is what the message calls the object.
    """
    accepted = inspect.signature(make)
    refuse_unknown(f"setting of {name}", settings, accepted.parameters)
    try:
        accepted.bind(**settings)
    except TypeError as error:
        raise ValueError(f"the settings of {name} are not complete: {error}") from error
    return make(**settings)


def defined(perturbation: Perturbation) -> Callable[..., Any]:
    """Return the function of a user's perturbation, or the class of the object."""
    return perturbation if hasattr(perturbation, "__qualname__") else type(perturbation)


def _checked(
    perturbation: Perturbation, before: Hyperparameters, space: HyperparameterConfig, rng: np.random.Generator
) -> Hyperparameters:
    """Call a user's perturbation and validate its result."""
    name = getattr(perturbation, "__name__", type(perturbation).__name__)
    after: Any = perturbation(before, space, rng)
    if not isinstance(after, Hyperparameters):
        raise ValueError(f"{name} must return Hyperparameters, got {after!r:.80}: use dataclasses.replace on the given")
    for what, (_, value) in changes_between(before, after).items():
        if what not in space:
            raise ValueError(f"{name} must change only what evolves, which is {', '.join(space)}, got {what}={value!r}")
        if value is None or space[what].closest(value) != value:
            raise ValueError(f"{name} must stay in the {space[what].extent} of {what}, got {value!r}: clip it")
    return after
