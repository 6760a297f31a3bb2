"""Task settings: named values of a member's task, which may evolve beside its hyperparameters."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from evogrpo.synonyms import close_match, unknown_name_error
from evogrpo.text import printable, shown
from evogrpo.validation import FLOAT32_LIMIT, finite_number

SETTING_GROUPS = ("reward_weights", "task", "data_weights")
"""Groups of task settings. A setting is called GROUP.NAME, such as `reward_weights.digits`."""
MAX_NAME = 200
"""Maximum number of characters in the name of a task setting."""
MAX_TEXT = 20_000
"""Maximum number of characters in a text of a task setting."""

SettingValue = int | float | str
"""Value of a task setting. Those of weights are numbers."""


class TaskSettings(Mapping[str, SettingValue]):
    """Values of task settings by name: a frozen, hashable mapping, sorted by name.

    - `reward_weights.NAME`: weight of a reward function in training; 0 and negative numbers are
      allowed.
    - `task.NAME`: a value of the task, such as a text that a prompt template inserts, a column that
      reward functions read, or an option of an environment's `reset`.
    - `data_weights.VALUE`: share of training questions with this value in a column, relative to the
      others; at least 0.

    A setting that a member does not have takes the value that its environment was created with.

    Args:
        values: Values by full name, or mappings of names to values by group.

    Raises:
        ValueError: If a name has no group, or a value is of the wrong type.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        checked = {}
        for name, value in sorted(without_groups(values or {}).items()):
            check_setting(name)
            checked[name] = _checked_value(name, value)
        self._values: dict[str, SettingValue] = checked

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Read a mapping of names to values."""

        def read(value: Any, values: Any) -> TaskSettings:
            return value if isinstance(value, TaskSettings) else cls(values(value))

        return core_schema.no_info_wrap_validator_function(
            read,
            handler.generate_schema(dict[str, Any]),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )

    def __getitem__(self, name: str) -> SettingValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"TaskSettings({self._values!r})"

    def group(self, group: str) -> dict[str, SettingValue]:
        """Return the values of a group, by their names without the group."""
        prefix = f"{group}."
        return {
            name.removeprefix(prefix): value
            for name, value in self.items()
            if name.startswith(prefix)
        }

    def weights(self, group: str) -> dict[str, float]:
        """Return the weights of a group of weights, by their names without the group."""
        return {name: float(value) for name, value in self.group(group).items()}


def configured_values(settings: Mapping[str, Any] | None) -> dict[str, SettingValue]:
    """Return the argument `settings` of an environment: configured values of `task.NAME` by name.

    Raises:
        ValueError: If it is no mapping, or a value is neither number nor text.
    """
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"settings must be a mapping of names to values, got {shown(settings)}.")
    return TaskSettings({"task": settings or {}}).group("task")


def is_task_setting(name: str) -> bool:
    """Return True if a name is that of a task setting, with its group."""
    group, _, name_in_group = name.partition(".")
    return group in SETTING_GROUPS and name_in_group != ""


def without_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by full name: a mapping in the place of a group gets its name as a prefix."""
    flat = {}
    for name, value in values.items():
        if name not in SETTING_GROUPS:
            flat[name] = value
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping of names, got {shown(value)}.")
        for name_in_group, setting in value.items():
            # Names may be numbers in YAML, such as the values of a column.
            flat[f"{name}.{name_in_group}"] = setting
    return flat


def check_setting(name: object) -> None:
    """Raise ValueError unless a name is that of a task setting."""
    if not isinstance(name, str) or not is_task_setting(name):
        groups = [f"{group}.NAME" for group in SETTING_GROUPS]
        raise unknown_name_error("task setting", name, groups)
    if len(name) > MAX_NAME or printable(name) != name:
        raise ValueError(
            f"The name of a task setting must be printable text of at most {MAX_NAME} characters,"
            f" got {shown(name)}."
        )


def undeclared_setting_error(name: str, settings: Collection[str]) -> ValueError:
    """Return the error for a setting `task.NAME` that an environment does not have."""
    similar = close_match(name, settings)
    meant = ""
    if similar is not None:
        meant = f" Did you mean task.{similar}?"
    elif settings:
        meant = f" It has {', '.join(f'task.{each}' for each in settings)}."
    return ValueError(
        f"task.{name} is no setting of this environment.{meant} Give its configured value:"
        f" settings={{{name!r}: ...}}."
    )


def _checked_value(name: str, value: Any) -> SettingValue:
    """Return the value of a setting; raise ValueError if it is of the wrong type."""
    if isinstance(value, str):
        if not name.startswith("task."):
            raise ValueError(f"{name} must be a number, got {shown(value)}.")
        if len(value) > MAX_TEXT:
            raise ValueError(f"{name} must have at most {MAX_TEXT} characters, got {len(value)}.")
        return value
    number = finite_number(name, value)
    if abs(number) > FLOAT32_LIMIT:
        raise ValueError(f"{name} must be at most {FLOAT32_LIMIT:g} in size, got {number:g}.")
    if name.startswith("data_weights.") and number < 0:
        raise ValueError(f"{name} must be at least 0, got {number:g}.")
    return number


NO_SETTINGS = TaskSettings()
"""Settings of a member that has none: its environment uses its configured values."""
