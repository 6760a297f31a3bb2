"""Records on one line: arrays by their shape, long texts and collections by their beginning or their number."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

_LONG = 60  # characters of a value that is shown whole


def outline(record: Any) -> str:
    """Return a dataclass on one short line; to be its `__repr__`, in the place of one that prints every number."""
    shown = ", ".join(
        f"{field.name}={_short(getattr(record, field.name))}"
        for field in fields(record)
        if getattr(record, field.name) is not None
    )
    return f"{type(record).__name__}({shown})"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"
    if is_dataclass(value):
        return f"{type(value).__name__}(…)"
    if isinstance(value, str):
        return repr(value if len(value) <= _LONG else f"{value[: _LONG - 1]}…")
    if isinstance(value, Mapping):
        inner = "{" + ", ".join(f"{key}: {_short(each)}" for key, each in value.items()) + "}"
        return inner if len(inner) <= _LONG else f"<{len(value)} entries>"
    if isinstance(value, Sequence):
        inner = "(" + ", ".join(map(_short, value[:_LONG])) + ")"
        return inner if len(inner) <= _LONG else f"<{len(value)} entries>"
    return repr(value)
