"""Search space of evolution: which hyperparameters evolve, and over which values."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from evogrpo.config.hyperparameters import (
    DEFAULT_CLIP,
    DEFAULT_TARGET_KL,
    HYPERPARAMETER_NAMES,
    Hyperparameters,
    Value,
    check_name,
    is_categorical,
)
from evogrpo.config.task_settings import TaskSettings, is_task_setting, without_groups
from evogrpo.text import shown
from evogrpo.validation import (
    FLOAT32_LIMIT,
    REAL,
    Flag,
    Number,
    Text,
    is_text,
    plain,
    settings,
    whole_between,
    without_none,
)

__all__ = [
    "DEFAULT_SEARCHED",
    "LANGUAGE_RANGES",
    "MAX_MEMBERS",
    "MAX_SAMPLES",
    "NETWORK_RANGES",
    "HyperparameterConfig",
    "RLParameter",
    "Scale",
    "check_group_size",
    "feasible_group_sizes",
]

Scale = Literal["linear", "log"]
"""Scale on which steps in a range are measured."""


def _of_one_kind(choices: Any) -> Any:
    """Return choices; raise ValueError if some of a list are texts and others are not."""
    if isinstance(choices, list | tuple):
        texts = [isinstance(choice, str) for choice in choices]
        if any(texts) and not all(texts):
            raise ValueError(
                f"must be all numbers or all texts, got {shown(list(choices))}. Put texts such as"
                " yes and 12 in quotes in YAML."
            )
    return choices


@settings
class RLParameter:
    """Values of one hyperparameter: a range (`min` and `max`), a list of numbers or of names.

    Attributes:
        min: Smallest value of the range.
        max: Largest value of the range.
        scale: Scale of steps. A step on a "log" scale multiplies or divides the value; on a
            "linear" scale it adds or subtracts.
        choices: At least two distinct values, instead of a range. Numbers are ordered, and mutation
            moves by one or a few of them. Names have no order, and mutation takes any other one.
        factor: Fixed step size, greater than 1. A log step multiplies or divides by `factor`; a
            linear step is (`factor` - 1) times the range. None = adaptive steps of about a fifth of
            the range on its scale, and some draws from the whole range; see `Mutation`.
        founders: Part of the range, (low, high), over which the members of a first population are
            spread; by default all of it. Mutation may leave it.
        proposed: The choices are texts to start with, at least one; a mutation is a new text, which
            the proposer of the run writes. Only for task settings `task.NAME`.

    Raises:
        ValueError: If the fields do not describe a range or choices.
    """

    min: Number | None = None
    max: Number | None = None
    scale: Scale = "linear"
    choices: Annotated[Sequence[Number] | Sequence[Text] | None, BeforeValidator(_of_one_kind)] = (
        None
    )
    factor: Annotated[float, Field(gt=1, le=FLOAT32_LIMIT), REAL] | None = None
    founders: tuple[Number, Number] | None = None
    proposed: Flag = False

    def __post_init__(self) -> None:
        if self.proposed and not self.names:
            raise ValueError("proposed requires choices that are texts. Give at least one text.")
        # 1. Choices: distinct values and nothing else, numbers in ascending order.
        if self.choices is not None:
            range_fields = (self.min, self.max, self.scale, self.factor, self.founders)
            if range_fields != (None, None, "linear", None, None):
                raise ValueError(
                    "min, max, scale, factor and founders describe a range. Remove them, or"
                    " choices."
                )
            if self.names:
                distinct = tuple(dict.fromkeys(self.choices))
            else:
                distinct = tuple(sorted(set(self.numbers)))
            if len(distinct) != len(self.choices):
                raise ValueError(
                    f"choices must be distinct, got {list(self.choices)}. Remove repeated ones."
                )
            if len(distinct) < 2 and not self.proposed:
                raise ValueError(
                    f"choices must be at least two values, got {list(self.choices)}. To fix a"
                    " value, remove it from the search space."
                )
            # The record is frozen; this is still its construction.
            object.__setattr__(self, "choices", distinct)
            return
        # 2. A range: two bounds in order, and perhaps a part of it for founders.
        if self.min is None or self.max is None:
            raise ValueError(
                f"min and max must be given, or choices, got min={self.min}, max={self.max},"
                " choices=None."
            )
        if not self.min < self.max:
            raise ValueError(
                f"min must be below max, got {self.min} and {self.max}. To fix a value, remove it"
                " from the search space."
            )
        if self.scale == "log" and self.min <= 0:
            raise ValueError(
                f'min must be above 0 with scale="log", got {self.min}. Use choices to include 0.'
            )
        if (
            self.founders is not None
            and not self.min <= self.founders[0] < self.founders[1] <= self.max
        ):
            raise ValueError(
                f"founders must be ascending in [{self.min}, {self.max}], got"
                f" {list(self.founders)}."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names to choose from; empty for numbers."""
        return tuple(value for value in self.choices or () if isinstance(value, str))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers to choose from, ascending; empty for a range and for names."""
        return tuple(value for value in self.choices or () if not isinstance(value, str))

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest number; raises ValueError for names, which have no order."""
        if self.names:
            raise ValueError(f"names have no bounds, got choices {list(self.names)}.")
        if self.numbers:
            return self.numbers[0], self.numbers[-1]
        assert self.min is not None and self.max is not None
        return self.min, self.max

    @property
    def extent(self) -> str:
        """Description of the values, for messages."""
        if self.choices is not None:
            return f"choices {list(self.choices)}"
        low, high = self.bounds
        return f"range [{low:g}, {high:g}]"

    @property
    def first(self) -> float | str:
        """Value of a first member without a value of its own: the first choice, or the middle."""
        if self.choices is not None:
            return self.choices[0]
        low, high = self.bounds
        if self.scale == "log":
            return math.sqrt(low * high)
        return (low + high) / 2

    def closest(self, value: float | str) -> float | str | None:
        """Return the closest possible value; None if names are possible, and not this one."""
        if isinstance(value, str) and self.proposed:
            return value
        if isinstance(value, str) or self.names:
            return value if value in self.names else None
        low, high = self.bounds
        if self.numbers:
            return min(self.numbers, key=lambda number: abs(number - value))
        return min(max(value, low), high)

    def contains(self, value: float | str) -> bool:
        """Return True if a value is possible."""
        return self.closest(value) == value

    def to_json(self) -> dict[str, Any]:
        """Return the fields that describe this range or these choices."""
        fields = without_none(plain(self))
        if self.choices is not None:
            del fields["scale"]
        if not self.proposed:
            del fields["proposed"]
        return fields


DEFAULT_SEARCHED = ("target_kl", "group_size", "update_epochs")
"""Hyperparameters that evolve by default.

They have the largest effect, and no value that is good for all tasks.

`lr` and `clip_coef` evolve in place of `target_kl` if members do not use that; a clip range that
is not set follows `target_kl`.
"""

_COMMON = {
    # RL Zoo: 0.1 to 0.4; PPO's paper 0.1 to 0.3
    "clip_coef": RLParameter(min=0.1, max=0.4, scale="log"),
    "clip_low": RLParameter(min=0.1, max=0.4, scale="log"),
    "clip_high": RLParameter(min=0.1, max=0.6, scale="log"),  # DAPO: 0.28 beside 0.2
    # TRL: 8; DeepSeekMath: 64. Only divisors of samples_per_step
    "group_size": RLParameter(min=4, max=32),
    # TRL: 0; AgileRL: 0.001; DeepSeekMath: 0.04
    "beta": RLParameter(choices=[0.0, 0.001, 0.004, 0.01, 0.04]),
    "temperature": RLParameter(min=0.6, max=1.4, scale="log"),  # TRL: 1; DeepSeek-R1: 0.6 to 1
    "advantage_clip": RLParameter(min=1.0, max=10.0, scale="log"),  # ROLL: 2 to 10
    # KL grows with the square of the learning rate, so this is half to twice the learning rate
    # found by calibration.
    "target_kl": RLParameter(min=DEFAULT_TARGET_KL / 4, max=DEFAULT_TARGET_KL * 4, scale="log"),
}

LANGUAGE_RANGES: Mapping[str, RLParameter] = {
    **_COMMON,
    # TRL: 1e-6 for full fine-tuning. Adapters need about ten times that (Schulman et al., LoRA
    # Without Regret, 2025), so the range extends from 1e-6 to a hundred times the value for
    # adapters.
    "lr": RLParameter(min=1e-6, max=1e-3, scale="log"),
    # TRL: 1; each epoch costs a learning step's time
    "update_epochs": RLParameter(min=1, max=4, scale="log"),
    "max_grad_norm": RLParameter(min=0.1, max=2.0, scale="log"),  # AgileRL: 0.1; TRL: 1
    "batch_size": RLParameter(min=8, max=256, scale="log"),
    "entropy_coef": RLParameter(choices=[0.0, 0.0003, 0.001, 0.003]),  # verl: 0.001
    "gamma": RLParameter(min=0.95, max=1.0),
    "loss_type": RLParameter(choices=["grpo", "dapo", "dr_grpo", "cispo"]),  # losses per action
    "advantage": RLParameter(choices=["outcome", "mean_only", "rloo"]),
}
"""Default ranges of language models."""

NETWORK_RANGES: Mapping[str, RLParameter] = {
    **_COMMON,
    # RL Zoo: 1e-5 to 1; its tuned values: 1e-4 to 1e-2
    "lr": RLParameter(min=1e-4, max=1e-1, scale="log"),
    "update_epochs": RLParameter(min=1, max=8, scale="log"),  # PPO: 3 to 10; RL Zoo: 1 to 20
    "max_grad_norm": RLParameter(min=0.3, max=5.0, scale="log"),  # RL Zoo: the same
    # transitions; RL Zoo: 8 to 512 of 8 to 2,048
    "batch_size": RLParameter(min=64, max=4096, scale="log"),
    "entropy_coef": RLParameter(choices=[0.0, 0.001, 0.003, 0.01, 0.03]),  # RL Zoo: up to 0.1
    "gamma": RLParameter(min=0.9, max=1.0),  # RL Zoo: 0.9 to 0.9999
    "loss_type": RLParameter(choices=["dapo", "cispo"]),  # losses per transition
    "advantage": RLParameter(choices=["return_to_go_timestep", "return_to_go_group"]),
}
"""Default ranges of small networks.

Source: RL Zoo is the search space of PPO in rl-baselines3-zoo, `hyperparams_opt.py`.
"""


MAX_MEMBERS = 100_000
"""Maximum number of members of a population."""
MAX_SAMPLES = 10_000_000
"""Maximum number of samples of a learning step."""


def _parameter(name: str, value: Any) -> RLParameter:
    """Return the parameter that a value of `HyperparameterConfig` describes."""
    if isinstance(value, RLParameter):
        return value
    if isinstance(value, Mapping):
        return RLParameter(**value)
    if isinstance(value, list):
        return RLParameter(choices=value)
    if isinstance(value, tuple) and len(value) == 2:
        # A pair has the scale of the default range.
        default = NETWORK_RANGES.get(name, RLParameter(min=0, max=1))
        return RLParameter(min=value[0], max=value[1], scale=default.scale)
    raise ValueError(
        "expected a list of choices, a range {min: ..., max: ...} or a pair (min, max), got"
        f" {shown(value)}."
    )


def _first_setting(name: str, parameter: RLParameter) -> float | str:
    """Return the default of a task setting."""
    if name.startswith("task."):
        return parameter.first
    # Weights are 1, or the closest number to it.
    closest = parameter.closest(1.0)
    assert closest is not None
    return closest


def _check_values(name: str, parameter: RLParameter) -> None:
    """Raise ValueError if a hyperparameter cannot have the values of a parameter."""
    if parameter.choices is None and is_categorical(name):
        raise ValueError(f"{name} must have choices, got {parameter.extent}. Names have no order.")
    if parameter.proposed and not name.startswith("task."):
        raise ValueError(f"{name} cannot be proposed: only texts of task settings task.NAME can.")
    if name == "group_size" and parameter.founders is not None:
        raise ValueError(
            f"group_size must not set founders, got {parameter.founders}. Lower max instead."
        )
    # Legal values are an interval, so the bounds of a range decide.
    for value in parameter.choices or parameter.bounds:
        if is_task_setting(name):
            TaskSettings({name: value})
        else:
            Hyperparameters().with_values({name: value})


class HyperparameterConfig(Mapping[str, RLParameter]):
    """Search space: hyperparameters and task settings that evolve, with their values.

    All others stay fixed. An immutable mapping from name to `RLParameter`, always in the order of
    the fields of `Hyperparameters`; task settings follow, sorted by name.

    Args:
        values: For each evolving hyperparameter an `RLParameter`, a mapping of its fields, a list
            of choices, or a pair of numbers. A pair is a range on the scale of `NETWORK_RANGES`,
            such as log for lr. Task settings are given in the same forms, by full name or by
            group: `reward_weights={"digits": [0, 1]}` is `**{"reward_weights.digits": [0, 1]}`;
            see `TaskSettings`. A value that the caller sets for the first member must be in the
            space; a default is moved into it (see `first`).

    Raises:
        ValueError: If a name is unknown, or a bound or a choice is illegal for its hyperparameter.
    """

    def __init__(self, **values: Any) -> None:
        given = without_groups(values)
        for name in given:
            check_name(name)
        self._parameters: dict[str, RLParameter] = {}
        # In a fixed order, so that equal spaces are mutated alike.
        for name in (*HYPERPARAMETER_NAMES, *sorted(filter(is_task_setting, given))):
            if name in given:
                try:
                    parameter = _parameter(name, given[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
                _check_values(name, parameter)
                self._parameters[name] = parameter

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Read the fields of every parameter by name; one with None does not evolve."""

        def read(
            value: Any, parameters: Callable[[Any], Mapping[str, RLParameter | None]]
        ) -> HyperparameterConfig:
            """Return the search space of a mapping; `parameters` reads its hyperparameters."""
            if isinstance(value, HyperparameterConfig):
                return value
            settings = {}
            if isinstance(value, Mapping):
                value = without_groups(value)
                for name in value:
                    check_name(name)
                # The constructor reads them. Their paths are nested in a file, so the messages of
                # pydantic would have other keys.
                settings = {name: value[name] for name in value if is_task_setting(name)}
                value = {name: each for name, each in value.items() if name not in settings}
            found = {**parameters(value), **settings}
            return cls(**without_none(found))

        return core_schema.no_info_wrap_validator_function(
            read,
            handler.generate_schema(dict[str, RLParameter | None]),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.to_json),
        )

    def __getitem__(self, name: str) -> RLParameter:
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __repr__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self.items()]
        return f"HyperparameterConfig({', '.join(parts)})"

    @property
    def task_settings(self) -> dict[str, RLParameter]:
        """The task settings that evolve, by full name."""
        return {name: self[name] for name in self if is_task_setting(name)}

    def first(self, defaults: Mapping[str, Any], chosen: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of a first member.

        Defaults outside the space are moved to the closest value.

        `target_kl` gets its default if it evolves, if `lr` is "auto", or if neither of them is set.
        The learning rate is then calibrated. Of task settings that evolve, weights of rewards and
        data have 1 as default, and others their first choice or the middle of their range.

        Args:
            defaults: Defaults by name; those of `Hyperparameters` for the rest.
            chosen: Values that the caller has set, by name.

        Raises:
            ValueError: If a value is invalid, or a chosen value lies outside the space.
        """
        # 1. An automatic learning rate is calibrated: it is no value, but needs target_kl.
        if is_text(chosen.get("lr"), "auto"):
            if "lr" in self:
                raise ValueError(
                    "lr must not evolve if it is auto. Let target_kl evolve, or give lr a number."
                )
            if chosen.get("target_kl", DEFAULT_TARGET_KL) is None:
                raise ValueError(
                    'lr="auto" needs target_kl, got None. Leave target_kl out, or give lr a number.'
                )
            chosen = {name: value for name, value in chosen.items() if name != "lr"}
        # 2. Choose the defaults. The learning rate is calibrated if target_kl evolves, or if lr is
        #    neither given nor evolves.
        has_lr = "lr" in chosen or "lr" in self
        if "target_kl" not in chosen and ("target_kl" in self or not has_lr):
            defaults = {**defaults, "target_kl": DEFAULT_TARGET_KL}
        if "clip_coef" in self:  # evolves from a number, not from None
            defaults = {"clip_coef": DEFAULT_CLIP, **defaults}
        record = Hyperparameters(**{**defaults, **chosen})
        # Task settings that the caller has not chosen get a default.
        chosen_settings = record.task_settings
        for name, parameter in self.task_settings.items():
            if name not in chosen_settings:
                record = record.with_values({name: _first_setting(name, parameter)})
        chosen = {**chosen, **chosen_settings}
        # 3. Move defaults into the space. Values that the caller has chosen are not moved.
        moved: dict[str, Any] = {}
        for name, parameter in self.items():
            value: Value = record[name]
            # Names have no closest value, so a default outside the choices stays.
            if value is None or (is_categorical(name) and name not in chosen):
                continue
            closest = parameter.closest(value)
            if closest != value and name in chosen:
                raise ValueError(
                    f"{name} must start in its {parameter.extent}, got {shown(value)}."
                )
            moved[name] = closest
        return record.with_values(moved)

    def for_samples_per_step(self, samples_per_step: int) -> "HyperparameterConfig":
        """Return this space with group sizes that divide `samples_per_step`, if they evolve.

        Raises:
            ValueError: If a choice of group_size is not a divisor, or its range has fewer than two
                divisors.
        """
        divisors = feasible_group_sizes(samples_per_step)
        parameter = self.get("group_size")
        if parameter is None:
            return self
        valid = ", ".join(map(str, divisors))
        # 1. Choices must be divisors.
        if parameter.choices is not None:
            wrong = [value for value in parameter.numbers if value not in divisors]
            if wrong:
                raise ValueError(
                    f"group_size must divide samples_per_step={samples_per_step}, got {wrong}. Use"
                    f" {valid}."
                )
            return self
        # 2. A range becomes the choice among its divisors.
        low, high = parameter.bounds
        usable = [value for value in divisors if low <= value <= high]
        if len(usable) < 2:
            raise ValueError(
                "The range of group_size must contain two divisors of"
                f" samples_per_step={samples_per_step}, got {usable} in [{low}, {high}]. Include"
                f" two of {valid}."
            )
        return HyperparameterConfig(**{**self, "group_size": RLParameter(choices=usable)})

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the fields of every parameter by name."""
        return {name: parameter.to_json() for name, parameter in self.items()}


def feasible_group_sizes(samples_per_step: int) -> tuple[int, ...]:
    """Return the possible group sizes: divisors of `samples_per_step` of at least 2, ascending.

    Raises:
        ValueError: If `samples_per_step` is not an integer from 2 to `MAX_SAMPLES`.
    """
    samples = whole_between("samples_per_step", samples_per_step, 2, MAX_SAMPLES)
    # Divisors are pairs d and n / d, of which the smaller one is at most the square root.
    largest = math.isqrt(samples)
    small = [size for size in range(1, largest + 1) if samples % size == 0]
    large = [samples // size for size in small]
    return tuple(sorted({*small, *large} - {1}))


def check_group_size(group_size: int, samples_per_step: int, *, owner: str = "") -> None:
    """Check that a learning step consists of whole groups.

    Args:
        group_size: Samples of one group.
        samples_per_step: Samples of a learning step.
        owner: Member that has it, for the message.

    Raises:
        ValueError: If `group_size` does not divide `samples_per_step`.
    """
    if samples_per_step % group_size:
        valid = ", ".join(map(str, feasible_group_sizes(samples_per_step)))
        of_owner = owner and f" ({owner})"
        raise ValueError(
            f"group_size must divide samples_per_step={samples_per_step}, got"
            f" {group_size}{of_owner}. Use {valid}."
        )
