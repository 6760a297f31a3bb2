"""Mutation of hyperparameters: steps, draws from ranges and choices, and custom mutations."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Protocol, TypeVar

import numpy as np
from pydantic import PlainValidator

from evogrpo.config.hyperparameters import Hyperparameters, Value, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.history import NETWORK, History, MemberRecord, changes_between
from evogrpo.text import reference_to, shown
from evogrpo.validation import PositiveShare, Share, check_call, refuse_unknown, settings

TO_PROPOSE = "<to be proposed>"
"""Text of a setting whose new text is open; the run replaces it by a proposal before it is used."""

T = TypeVar("T")
E = TypeVar("E")

Proposal = Callable[[np.random.Generator], Hyperparameters]
"""Function from a random generator to the hyperparameters of one child."""


STEP = 0.2
"""Default step size, as a share of a range on its scale; five steps cross a range."""
SPREAD = 0.75
"""Standard deviation, in log units, of step sizes around the default or the inherited one."""
MIN_STEP = 0.02
"""Smallest step size that is inherited."""
MAX_STEP = 0.5
"""Largest step that is taken: half a range fits in at least one direction."""


@settings
class Mutation:
    """Mutation with self-adapted step sizes.

    A number takes a step up or down, with equal probability, on its scale. The step size is
    log-normal around the step with which the parent was born, so step sizes are selected together
    with the values they led to. Children of founders take steps of about a fifth of the range.
    Occasionally a number is drawn from its whole range instead, so that the population can leave
    its initial region. Categories change to any other category. If an `RLParameter` has a `factor`,
    every step has that size, and no value is drawn from the whole range.

    Attributes:
        probability: Probability, in (0, 1], that an evolving hyperparameter changes, independently
            of the others. If none would change, one is chosen uniformly, so that a mutation always
            changes something.
        resample: Probability, in [0, 1], that a changing number is drawn from its whole range.

    Raises:
        ValueError: If a setting is out of range.

    Source: Beyer and Schwefel, Natural Computing 1 (2002), for self-adaptation of step sizes;
        Jaderberg et al. (arXiv:1711.09846) for resampling.
    """

    probability: PositiveShare = 0.5
    resample: Share = 0.25

    def __call__(
        self,
        hyperparameters: Hyperparameters,
        space: HyperparameterConfig,
        rng: np.random.Generator,
        steps: Mapping[str, float] | None = None,
    ) -> Hyperparameters:
        """Return mutated hyperparameters.

        None counts as the number it stands for (see `Hyperparameters.number`).

        Args:
            hyperparameters: Hyperparameters of the parent.
            space: Search space.
            rng: Random generator; the number of draws depends on the space only.
            steps: Steps from the grandparent to the parent, as shares of the ranges, by name.

        Returns:
            Hyperparameters of the child; they differ from the parent's unless the space is empty.
        """
        # 1. Draw all random numbers at once.
        names = sorted(space)
        draws = rng.random((4, len(names)))
        step_factors = np.exp(SPREAD * rng.standard_normal(len(names)))
        fallback = rng.random()

        # 2. Choose the hyperparameters that change, at least one.
        changing = {
            name for name, chance in zip(names, draws[0], strict=True) if chance < self.probability
        }
        if not changing and names:
            changing = {names[int(fallback * len(names))]}

        # 3. Give each of them another category, a draw from the whole range, or a step.
        def new_value(column: int, name: str) -> Any:
            """Return the child's value of the hyperparameter with these random numbers."""
            # The first row of `draws` has chosen what changes. The others, in [0, 1): up or down,
            # a draw from the whole range or a step, and the position in the range.
            _, direction, resample, fraction = draws[:, column].tolist()
            if name not in changing:
                return hyperparameters[name]
            if space[name].names:
                return other_choice(space[name], hyperparameters[name], fraction)
            value = hyperparameters.number(name)
            if resample < self.resample and space[name].factor is None:
                resampled = uniform_value(name, space[name], fraction)
                if resampled != value:
                    return resampled
            # The median of step sizes is the size of the step that made the parent.
            inherited = (steps or {}).get(name)
            if inherited is None:
                median_size = STEP
            else:
                median_size = max(abs(inherited), MIN_STEP)
            size = min(median_size * float(step_factors[column]), MAX_STEP)
            return neighbour(
                space[name], value, upward=direction < 0.5, integer=is_integer(name), size=size
            )

        values: dict[str, Any] = {
            name: new_value(column, name) for column, name in enumerate(names)
        }
        return hyperparameters.with_values(values)


def element_at(values: Sequence[E], fraction: float) -> E:
    """Return an element; each is equally likely if `fraction` is uniform in [0, 1)."""
    # The product may round up to the length.
    last = len(values) - 1
    return values[min(int(fraction * len(values)), last)]


def uniform_value(name: str, parameter: RLParameter, fraction: float) -> Value:
    """Return the quantile `fraction` of all values of a hyperparameter.

    The founders' range is ignored.
    """
    if parameter.names:
        return element_at(parameter.names, fraction)
    return quantile(
        dataclasses.replace(parameter, founders=None), fraction, integer=is_integer(name)
    )


def other_choice(parameter: RLParameter, value: Value, fraction: float) -> str:
    """Return another category than `value`, chosen by `fraction` in [0, 1).

    `TO_PROPOSE` for a parameter whose texts are proposed.
    """
    if parameter.proposed:
        return TO_PROPOSE
    others = [name for name in parameter.names if name != value]
    return element_at(others, fraction)


def neighbour(
    parameter: RLParameter, value: float, *, upward: bool, integer: bool, size: float = STEP
) -> float:
    """Return the value one step away, which always differs from `value`.

    A step is a share of the range on its scale, so that a step up and a step down cancel on a log
    scale. If the parameter has a `factor`, it replaces `size`. Integers are rounded and move by at
    least 1. Choices move by their share of the list, at least one. A step that would leave the
    range goes the other way, so that no bound is absorbing. If neither direction fits, the value
    moves to the farther bound. A value outside the range, infinity included, moves to the nearer
    bound or choice.

    Args:
        parameter: Range or ordered choices.
        value: Current value.
        upward: Try a step up first.
        integer: Return a whole number.
        size: Step size as a share of the range; above 0.

    Returns:
        A value of the range or choices.
    """
    low, high = parameter.bounds
    if parameter.choices is not None:
        above = [choice for choice in parameter.numbers if choice > value]
        below = [choice for choice in reversed(parameter.numbers) if choice < value]
        # At an end of the choices, go the other way.
        if above and (upward or not below):
            candidates = above
        else:
            candidates = below
        if low <= value <= high:
            # The size of a step is a share of the range, here of the list of choices.
            steps = max(1, round(size * (len(parameter.numbers) - 1)))
        else:
            steps = 1
        return candidates[min(steps, len(candidates)) - 1]
    # A value outside the range moves to the nearer bound.
    if not low <= value <= high:
        return low if value < low else high
    for direction in (upward, not upward):
        moved = _step(parameter, value, upward=direction, integer=integer, size=size)
        for bound in (low, high):
            # In floats, 0.05 + 5 x 0.07 is slightly above 0.4. Rounding must not keep a value from
            # its bound.
            if not integer and math.isclose(moved, bound, rel_tol=1e-9):
                moved = bound
        if low <= moved <= high and moved != value:
            return moved
    if parameter.scale == "log":
        upper_half = value / low > high / value
    else:
        upper_half = value - low > high - value
    return low if upper_half else high


def _step(
    parameter: RLParameter, value: float, *, upward: bool, integer: bool, size: float
) -> float:
    """Return the value after one step, which may lie outside the range."""
    low, high = parameter.bounds
    # 1. A factor on a logarithmic scale; otherwise a part of the range.
    if parameter.scale == "log":
        factor = parameter.factor or math.pow(high / low, size)
        if upward:
            moved = value * factor
        else:
            moved = value / factor
    else:
        if parameter.factor is not None:
            size = parameter.factor - 1
        shift = size * (high - low)
        if upward:
            moved = value + shift
        else:
            moved = value - shift
    if not integer or not math.isfinite(moved):
        return moved
    # 2. Integers move by at least 1.
    if upward:
        return max(round(moved), value + 1)
    return min(round(moved), value - 1)


def relative_position(parameter: RLParameter, value: float) -> float:
    """Return the position of a value in a range or among choices, from 0 to 1, on its scale."""
    low, high = parameter.bounds
    clipped = min(max(value, low), high)
    if parameter.numbers:
        below = sum(choice < clipped for choice in parameter.numbers)
        return below / (len(parameter.numbers) - 1)
    if parameter.scale == "log":
        span = math.log(high / low)
        return math.log(clipped / low) / span
    return (clipped - low) / (high - low)


def quantile(parameter: RLParameter, fraction: float, *, integer: bool) -> float:
    """Return a quantile of the uniform distribution over the founders' range, on the range's scale.

    Args:
        parameter: Range or ordered choices.
        fraction: In [0, 1]; 0 gives the smallest value, 1 the largest.
        integer: Return a whole number.

    Returns:
        A value of the range or choices.
    """
    if parameter.choices is not None:
        return element_at(parameter.numbers, fraction)
    low, high = parameter.founders or parameter.bounds
    if parameter.scale == "log":
        value = low * math.pow(high / low, fraction)
        if integer:
            value = round(value)
    elif integer:
        value = low + int(fraction * (high - low + 1))
    else:
        value = low + fraction * (high - low)
    return min(max(value, low), high)


class Perturbation(Protocol):
    """Callable that maps a parent's hyperparameters to those of a child."""

    def __call__(
        self,
        hyperparameters: Hyperparameters,
        space: HyperparameterConfig,
        rng: np.random.Generator,
        /,
    ) -> Hyperparameters:
        """Propose a child's hyperparameters.

        Args:
            hyperparameters: Hyperparameters of the parent.
            space: Search space; only its hyperparameters may change, within their ranges.
            rng: Random generator. The result may depend on nothing else, so that a run can be
                resumed.
        """
        ...


def proposals(
    perturbation: Perturbation, history: History, parent: MemberRecord, space: HyperparameterConfig
) -> Proposal:
    """Return a function that proposes hyperparameters for a member's children.

    Args:
        perturbation: Maps the hyperparameters of a parent to those of a child.
        history: History of the run.
        parent: The parent.
        space: Search space with the group sizes of the next generation.
    """
    if isinstance(perturbation, Mutation):
        steps = last_steps(parent, history.space)
        return lambda rng: perturbation(parent.hyperparameters, space, rng, steps)
    return lambda rng: _call_custom(perturbation, parent.hyperparameters, space, rng)


def last_steps(member: MemberRecord, space: HyperparameterConfig) -> dict[str, float]:
    """Return the steps from a member's parent to the member, as shares of the ranges, by name.

    Unchanged hyperparameters are left out, so founders have no steps.
    """
    old_values = {}
    for name, (old, _) in member.changes.items():
        if name != NETWORK:
            old_values[name] = old
    after = member.hyperparameters
    before = after.with_values(old_values)
    steps = {}
    for name, parameter in space.items():
        # Names have no distance.
        if parameter.names:
            continue
        old = relative_position(parameter, before.number(name))
        new = relative_position(parameter, after.number(name))
        if old != new:
            steps[name] = new - old
    return steps


def _checked_perturbation(value: Any) -> Perturbation:
    """Return the value; raise ValueError unless it is a perturbation."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            "must be Mutation(...) or a function of (hyperparameters, space, rng), got"
            f" {shown(value)}."
        )
    check_call("must be a function of", value, "hyperparameters", "space", "rng")
    perturbation: Perturbation = value
    return perturbation


CheckedPerturbation = Annotated[Perturbation, PlainValidator(_checked_perturbation)]
"""Type of the setting `mutation` of strategies."""


def perturbation_to_json(perturbation: Perturbation | None) -> dict[str, Any] | None:
    """Return the settings of a perturbation as JSON values, with the name of a custom one.

    None for None.
    """
    if perturbation is None:
        return None
    if isinstance(perturbation, Mutation):
        return asdict(perturbation)
    settings = {"name": reference_to(definition_of(perturbation))}
    if hasattr(perturbation, "to_json"):
        settings = {**perturbation.to_json(), **settings}
    return settings


def perturbation_from_json(values: Any, custom: Callable[..., Any] | None) -> Perturbation | None:
    """Build a perturbation from the result of `perturbation_to_json`; None for None.

    Args:
        values: The settings; "name" is that of a custom function or class.
        custom: This function or class. A name is never imported here, because files are untrusted.

    Raises:
        ValueError: If a setting is invalid, or the custom function or class is missing.
    """
    if not isinstance(values, Mapping):
        # None, or an invalid value that the constructor of the strategy refuses.
        unchanged: Perturbation | None = values
        return unchanged
    if "name" not in values:
        return build_from_settings(Mutation, "Mutation", values)
    settings = dict(values)
    name = settings.pop("name")
    if custom is None:
        raise ValueError(
            f"The custom mutation {name} was saved by its name only, and names in a checkpoint are"
            " not imported. Pass the strategy again, as in Tournament(mutation=...)."
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
    """Return the function or class that a reference to a custom perturbation names."""
    if hasattr(perturbation, "__qualname__"):
        return perturbation
    return type(perturbation)


def _call_custom(
    perturbation: Perturbation,
    parent: Hyperparameters,
    space: HyperparameterConfig,
    rng: np.random.Generator,
) -> Hyperparameters:
    """Call a custom perturbation and validate its result."""
    name = getattr(perturbation, "__name__", type(perturbation).__name__)
    # Users' functions may return anything.
    child: Any = perturbation(parent, space, rng)
    if not isinstance(child, Hyperparameters):
        raise ValueError(
            f"{name} must return Hyperparameters, got {shown(child)}. Use dataclasses.replace."
        )
    for changed, (_, value) in changes_between(parent, child).items():
        if changed not in space:
            raise ValueError(f"{name} may only change {', '.join(space)}, got {changed}={value!r}.")
        if value is None or not space[changed].contains(value):
            raise ValueError(
                f"{name}: {changed} must be in its {space[changed].extent}, got {shown(value)}."
                " Clip it."
            )
    return child
