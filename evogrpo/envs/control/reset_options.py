"""Settings of an environment, which are passed as options of its reset."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from evogrpo.config.task_settings import SettingValue, TaskSettings
from evogrpo.envs.control.single_env import EndForkedChildren
from evogrpo.text import class_name, one_line, shown, user_line
from evogrpo.validation import refuse_unknown


class _RecordedOptions(dict[str, Any]):
    """Options that record which keys are read.

    Attributes:
        read: The keys. Code that reads all options, such as a copy of them, reads each key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: dict[Any, None] = {}

    def __getitem__(self, key: Any) -> Any:
        self.read[key] = None
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.read[key] = None
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value, or the default."""
        self.read[key] = None
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a value and return it."""
        self.read[key] = None
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a value, and set it if there is none."""
        self.read[key] = None
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read_all()
        return super().__iter__()

    def keys(self) -> Any:
        """Return all keys."""
        self._read_all()
        return super().keys()

    def values(self) -> Any:
        """Return all values."""
        self._read_all()
        return super().values()

    def items(self) -> Any:
        """Return all keys and values."""
        self._read_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        """Return a copy."""
        return dict(self.items())

    def _read_all(self) -> None:
        self.read |= dict.fromkeys(super().keys())


def checked_settings(settings: Mapping[str, SettingValue] | None) -> dict[str, SettingValue]:
    """Return the argument `settings` of an environment; raise ValueError if it is invalid."""
    if not isinstance(settings, Mapping | None):
        raise ValueError(f"settings must be a mapping of names to values, got {shown(settings)}.")
    return TaskSettings({"task": settings or {}}).group("task")


def check_read(
    name: str, make: Callable[[], Any], options: Mapping[str, SettingValue], seed: int
) -> None:
    """Reset an environment once, and check that it reads all options.

    Args:
        name: Name of the environment, for messages.
        make: Creates the environment.
        options: Options of the reset.
        seed: Reset seed.

    Raises:
        ValueError: If the reset fails, or does not read an option.
    """
    if not options:
        return
    recorded = _RecordedOptions(options)
    with EndForkedChildren():
        env = make()
        with closing(env):
            try:
                env.reset(seed=seed, options=recorded)
            except Exception as error:
                raise ValueError(
                    f"{name}: reset(options={shown(dict(options))}) raised {class_name(error)}:"
                    f" {one_line(error)}{user_line(error)}"
                ) from error
    read = [key for key in recorded.read if isinstance(key, str)]
    if not read:
        raise ValueError(
            f"settings must be options that reset reads, but {name} reads none, got"
            f" {', '.join(options)}."
        )
    refuse_unknown(f"option of reset in settings of {name}", options, read)
