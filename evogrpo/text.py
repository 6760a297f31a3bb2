"""Text for readers: untrusted text escaped, numbers and records shortened."""

import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

# Control characters, format characters (they reorder text or hide), lone surrogates, private use, line separators.
_UNSAFE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_MISSING = "–"
_MAX_REPR = 60  # characters of a value in a `short_repr`


def relative_path(path: Path) -> str:
    """Return a path as the user would type it here: relative to the working directory if it lies inside."""
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def printable(text: str) -> str:
    r"""Spell out every character that a terminal or a browser would act on instead of showing it.

    Args:
        text: Any text, such as a completion.

    Returns:
        The text with control and invisible characters as `\x1b` or `\u202e`; newlines and tabs stay.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in _UNSAFE_CATEGORIES
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def shorten(text: str, limit: int) -> str:
    """Cut text to `limit` characters, saying how many are left out."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


def number_text(value: float | str | None) -> str:
    """Write a number with three significant digits (whole numbers in full), a name as it is, and a dash for neither."""
    if value is None:
        return _MISSING
    if isinstance(value, str):
        return printable(value)
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def count_text(count: float | None) -> str:
    """Write a large count, such as one of tokens, with thousands separated, and a dash for a missing one."""
    return _MISSING if count is None else f"{count:,.0f}"


def changes_text(changes: Mapping[str, tuple[float | str | None, float | str | None]]) -> str:
    """Write changes at a birth, such as `lr 0.0001 → 0.0002, group_size 8 → 4`; nothing where there are none."""
    return ", ".join(f"{name} {number_text(old)} → {number_text(new)}" for name, (old, new) in changes.items())


def origin_text(parent: int | None, back_to: int | None) -> str:
    """Say where a member's learner state comes from: `founder`, `clone of #3` or `back to #3 as it was in ...`."""
    if parent is None:
        return "founder"
    return f"clone of #{parent}" if back_to is None else f"back to #{parent} as it was in generation {back_to}"


def pluralize(number: int, what: str, plural: str = "s") -> str:
    """Write how many there are of something, such as `1 group` or `3 groups`."""
    return f"{count_text(number)} {what}{'' if number == 1 else plural}"


def percent_text(share: float) -> str:
    """Write a share of 1 in percent; one below 0, as estimates without bias may be, as none."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * max(0.0, share):.0f} %"


def score_text(mean: float | None, standard_error: float | None) -> str:
    """Write a fitness with its standard error, both in reward units, such as `0.412 ± 0.031` or `486.6 ± 3.7`."""
    if mean is None:
        return _MISSING
    digits = decimals(mean)
    return f"{mean:.{digits}f}" if standard_error is None else f"{mean:.{digits}f} ± {standard_error:.{digits}f}"


def decimals(value: float) -> int:
    """Return how many decimals a reward of this size is written with: three below 10, one from 100 on."""
    return 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1


def duration_text(seconds: float | None) -> str:
    """Write a duration in its two largest units, such as `1 h 05 min`."""
    if seconds is None:
        return _MISSING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def short_repr(record: Any) -> str:
    """Return a dataclass on one line, with arrays as their shape and long values shortened. Used as `__repr__`."""
    shown = ", ".join(
        f"{field.name}={_short_value(getattr(record, field.name))}"
        for field in fields(record)
        if getattr(record, field.name) is not None
    )
    return f"{type(record).__name__}({shown})"


def _short_value(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"
    if is_dataclass(value):
        return f"{type(value).__name__}(…)"
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_REPR else f"{value[: _MAX_REPR - 1]}…")
    if isinstance(value, Mapping):
        inner = "{" + ", ".join(f"{key}: {_short_value(each)}" for key, each in value.items()) + "}"
        return inner if len(inner) <= _MAX_REPR else f"<{len(value)} entries>"
    if isinstance(value, Sequence):
        inner = "(" + ", ".join(map(_short_value, value[:_MAX_REPR])) + ")"
        return inner if len(inner) <= _MAX_REPR else f"<{len(value)} entries>"
    return repr(value)
