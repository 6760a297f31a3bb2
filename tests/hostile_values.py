"""Values that misbehave when they are shown, compared, measured or converted."""

from collections.abc import Callable
from typing import Any

import numpy as np


def _fail(*args: Any, **options: Any) -> Any:
    raise RuntimeError("hostile \x1b[31m" * 1000)


_METHODS = (
    "__repr__",
    "__str__",
    "__format__",
    "__float__",
    "__int__",
    "__index__",
    "__len__",
    "__bool__",
    "__iter__",
    "__eq__",
    "__ne__",
    "__hash__",
    "__abs__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__getitem__",
    "__contains__",
    "tolist",
    "item",
    "keys",
    "__fspath__",
)
RaisesAlways = type("RaisesAlways", (), dict.fromkeys(_METHODS, _fail))
LongName = type("N" * 10_000 + "\x1b[31m", (), {})


class Shows:
    """Shows itself as another text."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text  # type: ignore[no-any-return]  # any text, or none

    __str__ = __repr__


class Lies:
    """Claims to be of another class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return self._kind


class NegativeLength:
    def __len__(self) -> int:
        return -1  # noqa: PLE0303


class FailsAsText(str):
    """Text that cannot be shown."""

    __repr__ = __str__ = _fail  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    """Return lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[], Any]] = {
    "raises": RaisesAlways,
    "long class name": LongName,
    "long repr": lambda: Shows("\x1b[31mx\n\t\u202e" * 10**4),
    "repr that is no text": lambda: Shows(3),
    "claims to be an integer": lambda: Lies(int),
    "claims to be a float": lambda: Lies(float),
    "claims to be text": lambda: Lies(str),
    "claims to be a mapping": lambda: Lies(dict),
    "claims to be a list": lambda: Lies(list),
    "negative length": NegativeLength,
    "text that cannot be shown": lambda: FailsAsText("x"),
    "nested": lambda: nested(900),
    "nested too deeply": lambda: nested(5_000),
    "long text": lambda: "\x1b[31m\u202e\n" * 10**4,
    "surrogates": lambda: "\ud800" * 1000,
    "bytes": lambda: b"\xff\x1b" * 1000,
    "array": lambda: np.zeros((3, 4)),
    "text array": lambda: np.array(["\x1b[31m" * 1000, "b"]),
    "large integer": lambda: 10**5000,
    "list of it": lambda: [RaisesAlways()],
    "mapping of it": lambda: {"\x1b[31m" * 1000: RaisesAlways()},
    "mapping with such a key": lambda: {LongName(): 1},
}
"""Functions that make the values, by name."""
