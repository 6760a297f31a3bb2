"""Options of prompt environments; names and data weights of their task settings."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from evogrpo.config.task_settings import SettingValue, undeclared_setting_error
from evogrpo.envs.protocol import shuffled_starts
from evogrpo.envs.text.datasets import AnyTable
from evogrpo.envs.text.reward_functions import (
    AGILERL_ARGUMENTS,
    ENVIRONMENTS,
    REPLACED_COLUMNS,
    TRAINER_ARGUMENTS,
    OnRewardError,
    RewardFn,
    RewardFunc,
    Weights,
)
from evogrpo.envs.text.templates import TEMPLATE_OPTIONS, Options
from evogrpo.randomness import generator
from evogrpo.text import shown
from evogrpo.validation import refuse_unknown

RESERVED_SETTINGS = {
    *AGILERL_ARGUMENTS, *REPLACED_COLUMNS, *TRAINER_ARGUMENTS, ENVIRONMENTS, TEMPLATE_OPTIONS,
    "environment", "seed",
}  # fmt: skip
"""Names that a task setting cannot have: columns and arguments with a meaning of their own."""


class PromptOptions(TypedDict, total=False):
    """Optional arguments of all environments with a prompt dataset.

    Attributes:
        validation_dataset: Questions for fitness; by default they are drawn from the training
            dataset.
        validation_size: Number of questions to draw; by default `VALIDATION_SIZE`, or a fifth of
            the training questions if fewer.
        test_size: Number of questions to draw; by default `TEST_SIZE`, or a fifth of the training
            questions if fewer.
        system_prompt: System message before each prompt, which is a question or messages. Fields
            {NAME} of `settings` are replaced by their values; all other braces stay.
        settings: Values of task settings by name. Each acts as a column of every row: a field of
            templates, and an argument of reward functions and of the reset of environments. A
            column of the dataset with its name comes first, and a member's `task.NAME` before both.
        metric: One or several functions in the form of the rewards, by which held-out questions are
            scored; None = the rewards with their configured weights.
        metric_weights: One factor per function of `metric`, or factors by name; 1 if not given.
        data_column: Column with the values that `data_weights.VALUE` of a member is about.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template, such as
            {"enable_thinking": False}. A column of this name overrides them for its row.
        skip_special_tokens: False = completions that reward functions and tables get contain
            special tokens, such as <|im_end|>; True by default.
        max_prompt_length: Maximum number of prompt tokens: the model's context minus the longest
            completion. Longer prompts, with the configured values of `settings`, are left out and
            counted in `filtered`; by default there is no limit.
        on_reward_error: "raise" (default) stops with a `RewardError`; "exclude" gives the
            completion or conversation a NaN reward and warns.
        reward_timeout: Time limit of one call of a reward function, in seconds; None (default) = no
            limit.
        reward_workers: Worker processes for reward functions that are slow or may crash, except
            async ones; 0 = run in this process. None (default) = 0, or one per core up to 8 if a
            timeout is set.
        seed: Seed of the training order and of drawn splits; 0 by default.
    """

    validation_dataset: AnyTable | None
    validation_size: int | None
    test_size: int | None
    system_prompt: str | None
    settings: Mapping[str, SettingValue] | None
    metric: RewardFn | RewardFunc | Sequence[RewardFn] | Sequence[RewardFunc] | None
    metric_weights: Weights | None
    data_column: str | None
    chat_template_kwargs: Options | None
    skip_special_tokens: bool
    max_prompt_length: int | None
    on_reward_error: OnRewardError
    reward_timeout: float | None
    reward_workers: int | None
    seed: int


def check_names(settings: Iterable[str]) -> None:
    """Raise ValueError if a name of a setting is reserved or no identifier."""
    for name in settings:
        if name in RESERVED_SETTINGS:
            raise ValueError(f"task.{name} cannot be a setting: {name} has another use. Rename it.")
        if not name.isidentifier():
            raise ValueError(
                "settings must have names that fields and arguments can have, got"
                f" {shown(name)}. Rename it."
            )


def check_full_names(
    names: Iterable[str],
    functions: Sequence[str],
    starts: Mapping[str, Sequence[int]],
    column: str | None,
    settings: Collection[str],
) -> None:
    """Check the full names of task settings.

    Args:
        names: The names, such as `reward_weights.NAME`.
        functions: Names of the reward functions.
        starts: Training starts by value of the column.
        column: Name of the column that data weights are about; None = not configured.
        settings: Names of the configured settings.

    Raises:
        ValueError: If the environment does not have one.
    """
    for full_name in names:
        group, _, name = full_name.partition(".")
        if group == "reward_weights":
            refuse_unknown("reward function in reward_weights:", [name], functions)
        elif group == "data_weights":
            check_data_weights({name: (1.0,)}, starts, column)
        elif name not in settings:
            raise undeclared_setting_error(name, settings)


def starts_by_value(rows: Sequence[Any], column: str) -> dict[str, list[int]]:
    """Return the positions of rows by the text of their value in a column, sorted by it."""
    starts: dict[str, list[int]] = {}
    for start, row in enumerate(rows):
        starts.setdefault(str(row[column]), []).append(start)
    return dict(sorted(starts.items()))


def select_by_weights(
    seed: int,
    starts: Mapping[str, Sequence[int]],
    weights: Mapping[str, float],
    positions: range,
) -> tuple[int, ...]:
    """Return the training starts at positions of an endless order with these shares of values.

    The value at a position follows from a random number that all members share, and the start from
    the value's own endless order (see `shuffled_starts`). Members with equal weights therefore get
    equal starts, and others the same start wherever they get the same value.

    Args:
        seed: Seed of the order.
        starts: Starts of each value of a column.
        weights: Share of each value, relative to the others; 1 for values without a weight. At
            least one share is above 0.
        positions: Positions in the order.
    """
    values = list(starts)
    shares = np.array([weights.get(value, 1.0) for value in values])
    ends = shares.cumsum()
    # Rounding must not select a value behind the last one with a share.
    last = np.flatnonzero(shares)[-1]
    selected = []
    for position in positions:
        point = generator(seed, "data weights", position).random() * ends[-1]
        value = values[min(last, np.searchsorted(ends, point, side="right"))]
        starts_of_value = starts[value]
        (number,) = shuffled_starts(seed, len(starts_of_value), position, 1, 1)
        selected.append(starts_of_value[number])
    return tuple(selected)


def check_data_weights(
    values: Mapping[str, Sequence[SettingValue]],
    starts: Mapping[str, Sequence[int]],
    column: str | None,
) -> None:
    """Check data weights against the values of their column.

    Args:
        values: Weights that members may have, by value of the column.
        starts: Training starts by value of the column.
        column: Name of the column; None = not configured.

    Raises:
        ValueError: If there is no column, a value is not in it, or all weights may be 0.
    """
    if not values:
        return
    if column is None:
        raise ValueError(
            f"data_weights.{min(values)} needs data_column, the column that has these values."
        )
    refuse_unknown(f"value in column {column} for data_weights:", values, starts)
    # The smallest weight that each value may get; 1 without a data weight.
    smallest = [min(map(float, values.get(value, [1.0]))) for value in starts]
    if not any(smallest):
        raise ValueError(
            f"The search space lets the data_weights of all values of {column} be 0 at once. Leave"
            " one value out, or give it weights above 0."
        )
