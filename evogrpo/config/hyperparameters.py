"""Hyperparameters of one member, with their legal values."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from evogrpo.config.task_settings import (
    NO_SETTINGS,
    SETTING_GROUPS,
    TaskSettings,
    check_setting,
    is_task_setting,
)
from evogrpo.functional.loss_types import ADVANTAGES, LOSS_TYPES, AdvantageType, LossType
from evogrpo.synonyms import close_match, unknown_name_error
from evogrpo.text import shown
from evogrpo.validation import (
    FLOAT32_LIMIT,
    REAL,
    WHOLE,
    NonNegativeFloat,
    PositiveFloat,
    PositiveShare,
    Share,
    refuse_unknown,
    settings,
)

__all__ = [
    "CATEGORIES",
    "DEFAULT_CLIP",
    "DEFAULT_TARGET_KL",
    "HYPERPARAMETER_FIELDS",
    "HYPERPARAMETER_NAMES",
    "Hyperparameters",
    "Value",
    "check_name",
    "is_categorical",
    "is_integer",
]

Value = int | float | str | None
"""Value of a hyperparameter: a number, a name, or None where that has a meaning."""
DEFAULT_TARGET_KL = 0.01
"""KL of a learning step, in nats per action, of agents without a learning rate."""
DEFAULT_CLIP = 0.2
"""Clip coefficient of members without `target_kl` that have none of their own."""
MAX_CLIP = 0.9
"""Largest clip coefficient that follows `target_kl`."""
CLIP_DEVIATIONS = math.sqrt(2.0)
"""Clip coefficient of calibrated members, in standard deviations of a step's log-ratios.

The log-ratios of a small step of KL k are nearly normal, with variance 2 k. At this bound, 16 % of
them are clipped, and `DEFAULT_TARGET_KL` gives `DEFAULT_CLIP`.
"""


@settings
class Hyperparameters:
    """Hyperparameters that evolution may change between generations: one frozen record per member.

    Attributes:
        lr: AdamW learning rate, greater than 0; with `target_kl` the first guess.
        clip_coef: Half-width of the clipping interval of the probability ratio, in (0, 1); None =
            2 sqrt(`target_kl`), so that it follows the size of learning steps, or 0.2 without
            `target_kl`.
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
        task_settings: Values of the member's task settings, by name; see `TaskSettings`.

    Raises:
        ValueError: If a value is of the wrong type, not finite, or outside the range above.
    """

    # Numbers of repetitions have a maximum, because a typing error would otherwise look like a
    # hang.
    lr: PositiveFloat = 1e-4
    clip_coef: Annotated[float, Field(gt=0, lt=1), REAL] | None = None
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
    task_settings: TaskSettings = NO_SETTINGS

    def __getitem__(self, name: str) -> Value:
        """Return the value of a hyperparameter, or of a task setting that the member has."""
        if is_task_setting(name):
            return self.task_settings[name]
        value: Value = getattr(self, name)
        return value

    def get(self, name: str) -> Value:
        """Return a value as `hyperparameters[name]`, or None for a task setting that is not set."""
        if is_task_setting(name):
            return self.task_settings.get(name)
        return self[name]

    def with_values(self, values: Mapping[str, Any]) -> "Hyperparameters":
        """Return a record with other values of some hyperparameters and task settings, by name.

        Raises:
            ValueError: If a name is unknown or a value is invalid.
        """
        fields = dict(values)
        settings = {name: fields.pop(name) for name in values if is_task_setting(name)}
        refuse_unknown("hyperparameter", fields, HYPERPARAMETER_NAMES)
        if settings:
            fields["task_settings"] = {**self.task_settings, **settings}
        return dataclasses.replace(self, **fields)

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Half-widths of the clipping interval below and above a ratio of 1."""
        return self.number("clip_low"), self.number("clip_high")

    def number(self, name: str) -> float:
        """Return the value of a numeric hyperparameter, or the number that None means.

        None means `clip_coef` for `clip_low` and `clip_high`, and infinity for `advantage_clip` and
        `target_kl`; for `clip_coef` see there.

        Raises:
            ValueError: If `name` is unknown or not numeric.
        """
        if is_categorical(name):
            raise ValueError(f"{name} must be numeric, but its values are names.")
        value = self[name]
        if isinstance(value, str):
            raise ValueError(f"{name} must be numeric, got {shown(value)}.")
        if value is not None:
            if isinstance(value, float):
                return float(value)
            return int(value)
        if name in ("advantage_clip", "target_kl"):
            return math.inf
        if self.clip_coef is not None:
            return self.clip_coef
        if self.target_kl is None:
            return DEFAULT_CLIP
        return min(CLIP_DEVIATIONS * math.sqrt(2.0 * self.target_kl), MAX_CLIP)

    def by_name(self) -> dict[str, Value]:
        """Return the values of all hyperparameters and of the member's task settings, by name."""
        values = {name: self[name] for name in HYPERPARAMETER_NAMES}
        return {**values, **self.task_settings}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; task settings only if there are any."""
        values: dict[str, Any] = {name: self[name] for name in HYPERPARAMETER_NAMES}
        if self.task_settings:
            values["task_settings"] = dict(self.task_settings)
        return values


HYPERPARAMETER_FIELDS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(Hyperparameters)
)
"""Names of all fields of `Hyperparameters`."""
HYPERPARAMETER_NAMES: tuple[str, ...] = tuple(
    name for name in HYPERPARAMETER_FIELDS if name != "task_settings"
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


def check_name(name: object) -> None:
    """Raise ValueError unless a name is that of a hyperparameter or a task setting."""
    if name not in HYPERPARAMETER_NAMES and not is_task_setting(str(name)):
        names = [*HYPERPARAMETER_NAMES, *SETTING_GROUPS]
        error = unknown_name_error("hyperparameter", name, names)
        if close_match(str(name), names) is None:
            error = ValueError(f"{error}. A task setting is written as task: {{NAME: ...}}.")
        raise error
    if isinstance(name, str) and is_task_setting(name):
        check_setting(name)


def is_integer(name: str) -> bool:
    """Return True if all values of a hyperparameter are integers; False for task settings.

    Raise ValueError for an unknown name.
    """
    check_name(name)
    return name in _INTEGER_NAMES


def is_categorical(name: str) -> bool:
    """Return True if the values of a hyperparameter are names.

    Task settings may have names or numbers: see `RLParameter.names`.

    Raise ValueError for an unknown name.
    """
    check_name(name)
    return name in CATEGORIES
