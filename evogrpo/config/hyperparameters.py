"""Hyperparameters of one member: names, types and legal values."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from evogrpo.config.checks import float32_number, refuse_unknown, whole_number
from evogrpo.functional.loss_types import ADVANTAGES, LOSS_TYPES, AdvantageType, LossType

__all__ = [
    "CATEGORIES",
    "HYPERPARAMETER_NAMES",
    "HyperparameterOptions",
    "Hyperparameters",
    "Value",
    "is_categorical",
    "is_integer",
]

Value = int | float | str | None
"""Value of a hyperparameter: a number, a name, or None where that has a meaning."""


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters that evolution may change between generations: one frozen record per member.

    Attributes:
        lr: AdamW learning rate, greater than 0.
        clip_coef: Half-width of the clipping interval of the probability ratio, in (0, 1).
        group_size: Completions (episodes) per initial state, from 2 to 1,000,000.
        beta: Weight of the KL to the reference policy, at least 0; with 0 there is no reference pass.
        temperature: Divisor of the logits while sampling and learning, at least 1e-6. Fitness is measured greedily.
        update_epochs: Passes over each learning step's samples, from 1 to 10,000.
        max_grad_norm: Bound on the member's gradient norm, greater than 0. AdamW divides by the gradient's size, so the
            bound has almost no effect if it applies at every step.
        batch_size: Samples (transitions for small networks) per optimizer step, at least 1.
        clip_low: Half-width below a ratio of 1, in (0, 1]; None = `clip_coef`. 1 means no lower bound.
        clip_high: Half-width above a ratio of 1, greater than 0; None = `clip_coef`.
        entropy_coef: Weight of the entropy bonus, in nats, at least 0.
        advantage_clip: Bound on the size of advantages, greater than 0; None = no bound.
        gamma: Discount per action of later rewards, in [0, 1]; a completion's reward belongs to its last action.
        target_kl: KL between the policies before and after a learning step, in nats per action, that the learning rate
            is adapted to, greater than 0; see `evogrpo.algorithms.learning.step_size`. None = `lr` is used as it is.
        loss_type: One of `LossType`; None = the objective's.
        advantage: One of `AdvantageType`; None = the objective's.

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
    clip_low: float | None = None
    clip_high: float | None = None
    entropy_coef: float = 0.0
    advantage_clip: float | None = None
    gamma: float = 1.0
    target_kl: float | None = None
    loss_type: LossType | None = None
    advantage: AdvantageType | None = None

    def __post_init__(self) -> None:
        for name in HYPERPARAMETER_NAMES:
            object.__setattr__(self, name, checked_value(name, getattr(self, name)))

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Half-widths below and above a ratio of 1: `clip_low` and `clip_high`, or `clip_coef` where they are None."""
        return (
            self.clip_coef if self.clip_low is None else self.clip_low,
            self.clip_coef if self.clip_high is None else self.clip_high,
        )

    def number(self, name: str) -> float:
        """Return the value of a numeric hyperparameter, or the number that None means.

        None means `clip_coef` for `clip_low` and `clip_high`, and infinity for `advantage_clip` and `target_kl`.

        Raises:
            ValueError: If `name` is unknown or not numeric.
        """
        if is_categorical(name):
            raise ValueError(f"{name} is a name, not a number")
        value = getattr(self, name)
        if value is not None:
            return float(value) if isinstance(value, float) else int(value)
        return math.inf if name in ("advantage_clip", "target_kl") else self.clip_coef

    def to_json(self) -> dict[str, Value]:
        """Return the values by name, as plain JSON values."""
        return {name: getattr(self, name) for name in HYPERPARAMETER_NAMES}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from values by name, defaults for the rest; raises ValueError for an unknown name or refused value."""
        refuse_unknown("hyperparameter", values, HYPERPARAMETER_NAMES)
        return cls(**values)


HYPERPARAMETER_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Hyperparameters))
"""Names of all hyperparameters, in the order of their fields."""
CATEGORIES: Mapping[str, tuple[str, ...]] = {"loss_type": tuple(LOSS_TYPES), "advantage": tuple(ADVANTAGES)}
"""Values of the hyperparameters that are names."""
_INTEGER_NAMES = frozenset(field.name for field in dataclasses.fields(Hyperparameters) if field.type is int)
_OPTIONAL_NAMES = frozenset(field.name for field in dataclasses.fields(Hyperparameters) if field.default is None)


class HyperparameterOptions(TypedDict, total=False):
    """Keyword arguments of agents that set hyperparameters; `Hyperparameters` describes them."""

    lr: float
    clip_coef: float
    group_size: int
    beta: float
    temperature: float
    update_epochs: int
    max_grad_norm: float
    batch_size: int
    clip_low: float | None
    clip_high: float | None
    entropy_coef: float
    advantage_clip: float | None
    gamma: float
    target_kl: float | None
    loss_type: LossType | None
    advantage: AdvantageType | None


class HyperparameterAttributes:
    """Hyperparameters as attributes of an agent. Setting one validates it and replaces the frozen record."""

    __slots__ = ()

    lr: float
    clip_coef: float
    group_size: int
    beta: float
    temperature: float
    update_epochs: int
    max_grad_norm: float
    batch_size: int
    clip_low: float | None
    clip_high: float | None
    entropy_coef: float
    advantage_clip: float | None
    gamma: float
    target_kl: float | None
    loss_type: LossType | None
    advantage: AdvantageType | None


def _attribute(name: str) -> property:
    def read(agent: Any) -> Any:
        return getattr(agent.hyperparameters, name)

    def replace(agent: Any, value: object) -> None:
        changes: dict[str, Any] = {name: value}
        agent.hyperparameters = dataclasses.replace(agent.hyperparameters, **changes)

    return property(read, replace, doc=f"Hyperparameter `{name}`; see `Hyperparameters`.")


for _name in HYPERPARAMETER_NAMES:
    setattr(HyperparameterAttributes, _name, _attribute(_name))


def is_integer(name: str) -> bool:
    """Return True if a hyperparameter takes integers only; raise ValueError if there is none of this name."""
    refuse_unknown("hyperparameter", [name], HYPERPARAMETER_NAMES)
    return name in _INTEGER_NAMES


def is_categorical(name: str) -> bool:
    """Return True if a hyperparameter takes names; raise ValueError if there is none of this name."""
    refuse_unknown("hyperparameter", [name], HYPERPARAMETER_NAMES)
    return name in CATEGORIES


def checked_value(name: str, value: object) -> Any:
    """Return `value` in the type of hyperparameter `name` if it is legal there: a number, a name or None.

    Raises:
        ValueError: If the name is unknown, or the value is of the wrong type, not finite or out of range.
    """
    if value is None and name in _OPTIONAL_NAMES:
        return None
    if is_categorical(name):
        if not isinstance(value, str) or value not in CATEGORIES[name]:
            raise ValueError(f"{name} must be one of {', '.join(CATEGORIES[name])}, got {value!r}")
        return value
    number: float = whole_number(name, value) if is_integer(name) else float32_number(name, value)
    rule, legal = _rule(name, number)
    if not legal:
        reason = ": a single completion cannot be compared with its group" if name == "group_size" else ""
        raise ValueError(f"{name} must {rule}, got {number}{reason}")
    if number > _MAXIMA.get(name, math.inf):
        raise ValueError(f"{name} must be at most {_MAXIMA[name]:,}, got {number:,}")
    return number


_MAXIMA: Mapping[str, int] = {"group_size": 1_000_000, "update_epochs": 10_000, "batch_size": 10**9}
"""Bounds of numbers that are looped over; larger ones are typing errors and would look like a hang."""
MIN_TEMPERATURE = 1e-6  # below it, logits / temperature overflow float32


def _rule(name: str, number: float) -> tuple[str, bool]:
    """Return the rule for a number in words, and True if the number follows it."""
    match name:
        case "clip_coef":
            return "lie in (0, 1)", 0 < number < 1
        case "clip_low":
            return "lie in (0, 1]", 0 < number <= 1
        case "gamma":
            return "lie in [0, 1]", 0 <= number <= 1
        case "temperature":
            return f"be at least {MIN_TEMPERATURE:g}", number >= MIN_TEMPERATURE
        case "group_size":
            return "be at least 2", number >= 2
        case "beta" | "entropy_coef":
            return "be at least 0", number >= 0
        case "update_epochs" | "batch_size":
            return "be at least 1", number >= 1
        case _:
            return "be greater than 0", number > 0
