"""Hyperparameters of one member, and the AdamW settings that all members share."""

import dataclasses
import math
from collections.abc import Container, Mapping
from math import cos, pi, sqrt
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from evogrpo.functional.loss_types import ADVANTAGES, LOSS_TYPES, AdvantageType, LossType
from evogrpo.validation import (
    FLOAT32_LIMIT,
    REAL,
    WHOLE,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveShare,
    Share,
    refuse_unknown,
    settings,
)

__all__ = [
    "CATEGORIES",
    "DEFAULT_TARGET_KL",
    "HYPERPARAMETER_NAMES",
    "HyperparameterOptions",
    "Hyperparameters",
    "LrSchedule",
    "Optimizer",
    "Value",
    "check_calibration",
    "is_categorical",
    "is_integer",
]

Value = int | float | str | None
"""Value of a hyperparameter: a number, a name, or None where that has a meaning."""
DEFAULT_TARGET_KL = 0.01
"""KL of a learning step, in nats per action, of agents without a learning rate."""


@settings
class Hyperparameters:
    """Hyperparameters that evolution may change between generations: one frozen record per member.

    Attributes:
        lr: AdamW learning rate, greater than 0; with `target_kl` the first guess.
        clip_coef: Half-width of the clipping interval of the probability ratio, in (0, 1).
        group_size: Completions (episodes) per initial state, from 2 to 1,000,000.
        beta: Weight of the KL to the reference policy, at least 0; with 0 there is no reference
            pass.
        temperature: Divisor of the logits while sampling and learning, at least 1e-6. Fitness is
            measured greedily.
        update_epochs: Passes over each learning step's samples, from 1 to 10,000.
        max_grad_norm: Bound on the member's gradient norm, greater than 0. AdamW divides by the
            gradient's size, so the bound has almost no effect if it applies at every step.
        batch_size: Samples (transitions for small networks) per optimizer step, at least 1.
        clip_low: Half-width below a ratio of 1, in (0, 1]; None = `clip_coef`. 1 means no lower
            bound.
        clip_high: Half-width above a ratio of 1, greater than 0; None = `clip_coef`.
        entropy_coef: Weight of the entropy bonus, in nats, at least 0.
        advantage_clip: Bound on the size of advantages, greater than 0; None = no bound.
        gamma: Discount per action of later rewards, in [0, 1]; a completion's reward belongs to its
            last action.
        target_kl: KL between the policies before and after a learning step, in nats per action,
            that the learning rate is adapted to, greater than 0; see
            `evogrpo.algorithms.learning.step_size`. None = `lr` is used as it is.
        loss_type: One of `LossType`; None = the objective's.
        advantage: One of `AdvantageType`; None = the objective's.

    Raises:
        ValueError: If a value is of the wrong type, not finite, or outside the range above.
    """

    # Numbers of repetitions have a maximum, because a typing error would otherwise look like a
    # hang.
    lr: PositiveFloat = 1e-4
    clip_coef: Annotated[float, Field(gt=0, lt=1), REAL] = 0.2
    group_size: Annotated[int, Field(ge=2, le=1_000_000), WHOLE] = 8
    beta: NonNegativeFloat = 0.0
    # Below this temperature, logits / temperature overflow float32.
    temperature: Annotated[float, Field(ge=1e-6, le=FLOAT32_LIMIT), REAL] = 1.0
    update_epochs: Annotated[int, Field(ge=1, le=10_000), WHOLE] = 1
    max_grad_norm: PositiveFloat = 0.5
    batch_size: Annotated[int, Field(ge=1, le=10**9), WHOLE] = 64
    clip_low: PositiveShare | None = None
    clip_high: PositiveFloat | None = None
    entropy_coef: NonNegativeFloat = 0.0
    advantage_clip: PositiveFloat | None = None
    gamma: Share = 1.0
    target_kl: PositiveFloat | None = None
    loss_type: LossType | None = None
    advantage: AdvantageType | None = None

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Half-widths of the clipping interval below and above a ratio of 1."""
        return (
            self.clip_coef if self.clip_low is None else self.clip_low,
            self.clip_coef if self.clip_high is None else self.clip_high,
        )

    def number(self, name: str) -> float:
        """Return the value of a numeric hyperparameter, or the number that None means.

        None means `clip_coef` for `clip_low` and `clip_high`, and infinity for `advantage_clip` and
        `target_kl`.

        Raises:
            ValueError: If `name` is unknown or not numeric.
        """
        if is_categorical(name):
            raise ValueError(f"{name} is a name, not a number.")
        value = getattr(self, name)
        if value is not None:
            if isinstance(value, float):
                return float(value)
            return int(value)
        if name in ("advantage_clip", "target_kl"):
            return math.inf
        return self.clip_coef

    def to_json(self) -> dict[str, Value]:
        """Return the values by name, as plain JSON values."""
        return {name: getattr(self, name) for name in HYPERPARAMETER_NAMES}


HYPERPARAMETER_NAMES: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(Hyperparameters)
)
"""Names of all hyperparameters, in the order of their fields."""
CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "loss_type": tuple(LOSS_TYPES),
    "advantage": tuple(ADVANTAGES),
}
"""Values of categorical hyperparameters, by hyperparameter."""
_INTEGER_NAMES = frozenset(
    field.name for field in dataclasses.fields(Hyperparameters) if isinstance(field.default, int)
)


class HyperparameterOptions(TypedDict, total=False):
    """Keyword arguments of agents that set hyperparameters; `Hyperparameters` describes them.

    `lr="auto"`, the default, calibrates the learning rate: `target_kl` is then 0.01 unless it is
    given.
    """

    lr: float | Literal["auto"]
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
    """Hyperparameters as attributes of an agent.

    Setting one validates it and replaces the frozen record.
    """

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
    """Return a property of agents that reads and sets one hyperparameter."""

    def read(agent: Any) -> Any:
        return getattr(agent.hyperparameters, name)

    def replace(agent: Any, value: object) -> None:
        changes: dict[str, Any] = {name: value}
        agent.hyperparameters = dataclasses.replace(agent.hyperparameters, **changes)

    return property(read, replace, doc=f"Hyperparameter `{name}`; see `Hyperparameters`.")


for _name in HYPERPARAMETER_NAMES:
    setattr(HyperparameterAttributes, _name, _attribute(_name))


def is_integer(name: str) -> bool:
    """Return True if the values of a hyperparameter are integers.

    Raise ValueError for an unknown name.
    """
    refuse_unknown("hyperparameter", [name], HYPERPARAMETER_NAMES)
    return name in _INTEGER_NAMES


def is_categorical(name: str) -> bool:
    """Return True if the values of a hyperparameter are names.

    Raise ValueError for an unknown name.
    """
    refuse_unknown("hyperparameter", [name], HYPERPARAMETER_NAMES)
    return name in CATEGORIES


LrSchedule = Literal["constant", "linear", "cosine"]
"""Shape of the learning rate after warm-up."""
_Fraction = Annotated[float, Field(ge=0, lt=1), REAL]


@settings
class Optimizer:
    """AdamW settings that all members share; the learning rate itself is a hyperparameter.

    Attributes:
        betas: Decay rates of the first and second moment, each in [0, 1).
        eps: Added to the square root of the second moment, above 0.
        weight_decay: Decoupled decay, at least 0.
        warmup_steps: Optimizer steps of linear warm-up from 0, as in transformers: the first
            changes nothing. Steps are counted per member, and children inherit the count together
            with the weights. Must be 0 with `target_kl`.
        schedule: Shape after the warm-up.
        total_steps: Optimizer step at which a "linear" or "cosine" schedule ends.
        cycles: Number of cosine waves of a "cosine" schedule, above 0; 0.5 ends at the first
            minimum.
        floor: Minimum of a "linear" or "cosine" schedule, as a fraction of the learning rate, in
            [0, 1).

    Raises:
        ValueError: If a value is of the wrong type, out of range, or without effect beside the
            schedule.
    """

    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    schedule: LrSchedule = "constant"
    total_steps: NonNegativeInt | None = None
    cycles: PositiveFloat = 0.5
    floor: _Fraction = 0.0

    def __post_init__(self) -> None:
        # Refuse missing settings of the schedule, and settings that it does not use.
        for name, default, readers in (
            ("floor", 0.0, ("linear", "cosine")),
            ("cycles", 0.5, ("cosine",)),
        ):
            if getattr(self, name) != default and self.schedule not in readers:
                raise ValueError(
                    f"{name} has no effect with schedule={self.schedule!r}. Choose"
                    f" {' or '.join(readers)}."
                )
        if self.schedule == "constant":
            if self.total_steps is not None:
                raise ValueError(
                    f"total_steps={self.total_steps} has no effect with schedule='constant'."
                    " Remove it."
                )
        elif self.total_steps is None or self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps must be above warmup_steps ({self.warmup_steps}), got"
                f" {self.total_steps}."
            )

    def factor(self, step: int) -> float:
        """Return the fraction of the learning rate at optimizer step `step`, counted from 0.

        Source: transformers, `get_scheduler`: linear, cosine, cosine_with_min_lr and polynomial of
        power 1.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.total_steps is None:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        if self.schedule == "linear":
            decay = 1.0 - progress
        else:
            decay = 0.5 * (1.0 + cos(2.0 * pi * self.cycles * progress))
        return self.floor + (1.0 - self.floor) * decay

    def momentum_warmup(self, step: int) -> float:
        """Return the fraction of a calibrated learning rate at optimizer step `step`, from 0.

        The first step of AdamW moves each weight by the whole learning rate. Later steps move it
        less, because momentum averages gradients of changing signs. A learning rate that was
        measured in the first step would therefore be too small later. With this factor, all steps
        are equally large: of independent gradients with variance 1, the average after t steps has
        the variance (1 - b) (1 + b^t) / ((1 + b) (1 - b^t)), where b = `betas[0]`.
        """
        decay = self.betas[0] ** (step + 1)
        return sqrt((1.0 - decay) / (1.0 + decay))


def check_calibration(
    optimizer: Optimizer, target_kl: float | None, evolving: Container[str]
) -> None:
    """Refuse to calibrate a learning rate in a warm-up, whose first step changes nothing.

    Args:
        optimizer: AdamW settings.
        target_kl: Hyperparameter of the member.
        evolving: Names of the hyperparameters that evolve.

    Raises:
        ValueError: If there is a warm-up and `target_kl` is set or evolves.
    """
    warmup = optimizer.warmup_steps
    if warmup > 0 and (target_kl is not None or "target_kl" in evolving):
        raise ValueError(
            f"warmup_steps must be 0 with a calibrated learning rate (target_kl), got {warmup}."
            " Give lr a number without target_kl, or remove warmup_steps."
        )
