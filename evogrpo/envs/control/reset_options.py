"""Settings of an environment, which are passed as options of its reset."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import closing
from typing import Any

from evogrpo.config.task_settings import SettingValue
from evogrpo.envs.control.single_env import EndForkedChildren
from evogrpo.text import class_name, one_line, shown, user_line
from evogrpo.validation import refuse_unknown

_PLAIN: Any = dict  # the type of options, without records


class _RecordedOptions(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc, metaclass]
    """Options that record which keys are read.

    All methods that read come from `MutableMapping`, which calls those below.

    Attributes:
        read: The keys. Code that reads all options, such as a copy of them, reads each key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        _PLAIN.__init__(self, values)
        self.read: dict[Any, None] = {}

    def __getitem__(self, key: Any) -> Any:
        self.read[key] = None
        return _PLAIN.__getitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        for key in _PLAIN.__iter__(self):
            self.read[key] = None
            yield key

    __len__ = _PLAIN.__len__
    __setitem__ = _PLAIN.__setitem__
    __delitem__ = _PLAIN.__delitem__


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
