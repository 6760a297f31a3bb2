"""Checks of callers' values: names with the nearest valid one, plain finite numbers, whole numbers."""

import difflib
import math
import numbers
import re
from collections.abc import Iterable
from typing import TypeVar

from evogrpo.hyperparameters.synonyms import counterpart, given_elsewhere, remark

T = TypeVar("T")

MOST_LISTED = 60  # more names than that hide the nearest one
LARGEST = 1e38  # what float32, in which members compute, holds with room to spare
MOST_COUNTED = 10**15
"""The most of what is only counted, never looped over."""
MOST_SEED = 2**63 - 1
"""The largest seed."""
_LARGEST_WHOLE = 10**300  # a float holds it, so that it can be compared with others


def unknown_name_error(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """Build the error for a name that does not exist, with the name that it has here or the nearest one.

    Args:
        kind: What was being named, e.g. "hyperparameter".
        name: The unknown name.
        valid: The names that exist.

    Returns:
        The error, for the caller to raise.
    """
    names = list(valid)
    own, said = counterpart(str(name), names), remark(str(name))
    if own is not None:
        return ValueError(f"unknown {kind} {name!r}: it is called {own!r} here")
    if said is not None:
        return ValueError(f"unknown {kind} {name!r}: {said}")
    if (other := given_elsewhere(str(name))) is not None:
        return ValueError(f"unknown {kind} {name!r}: it is called {other!r}, and another call takes it")
    close = [each for each in names if is_one_edit(str(name), each)]
    close = close or difflib.get_close_matches(str(name), names, n=1, cutoff=0.8)
    known = f"Valid names: {', '.join(names) or '(none)'}"
    if close:
        known = f"did you mean {close[0]!r}?" + (f" {known}" if len(names) <= MOST_LISTED else "")
    return ValueError(f"unknown {kind} {name!r}: {known}")


def is_one_edit(typed: str, name: str) -> bool:
    """Return whether one letter was changed, added or left out, or two neighbouring letters were swapped."""
    start = next((place for place, (a, b) in enumerate(zip(typed, name, strict=False)) if a != b), None)
    start = min(len(typed), len(name)) if start is None else start
    rest, other = typed[start:], name[start:]
    swapped = rest[:2] == other[:2][::-1] and rest[2:] == other[2:]
    return swapped or rest[1:] == other[1:] or rest == other[1:] or rest[1:] == other


def refuse_unknown(kind: str, names: Iterable[object], valid: Iterable[str]) -> None:
    """Raise the error of `unknown_name_error` for the first of `names` that is not in `valid`."""
    known = list(valid)
    for name in names:
        if name not in known:
            raise unknown_name_error(kind, name, known)


def finite_number(what: str, value: object) -> float:
    """Return `value` as a plain int or float, or raise ValueError naming `what` if it is no finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        # YAML 1.1 reads 1e-4, without a dot, as text.
        remedy = ". In YAML write 1.0e-4, with the dot" if re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", str(value)) else ""
        raise ValueError(f"{what} must be a number, got {value!r:.80} ({type(value).__name__}){remedy}")
    if isinstance(value, numbers.Integral):
        return whole_number(what, value)
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return float(value)


def single_number(what: str, value: object) -> float:
    """Return `value` as a plain float, or raise ValueError naming `what` if it is none that float32 can hold."""
    number = float(finite_number(what, value))
    if abs(number) > LARGEST:
        raise ValueError(f"{what} must be at most {LARGEST:g} in size, got {number:g}: float32 holds no more")
    return number


def whole_number(what: str, value: object) -> int:
    """Return an integer or a whole float such as 1e4 as a plain int; raise ValueError for any other value."""
    whole = isinstance(value, numbers.Integral) or (isinstance(value, numbers.Real) and float(value).is_integer())
    if isinstance(value, bool) or not whole:
        raise ValueError(f"{what} must be an integer, got {value!r:.80} ({type(value).__name__})")
    number: int = int(value)  # type: ignore[call-overload]  # a real number
    if abs(number) > _LARGEST_WHOLE:
        raise ValueError(f"{what} must be at most 10**300 in size, got {number.bit_length()} bits")
    return number


def whole_between(what: str, value: object, least: int, most: int = MOST_COUNTED) -> int:
    """Return `value` as a plain int, or raise ValueError naming `what` if it is none or lies outside [least, most].

    Whatever is looped over or allocated has a most: a number of that size is a slip, and would look like a hang.
    """
    number = whole_number(what, value)
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{what} must be at most {most:,}, got {number:,}")
    return number


def flag(what: str, value: object) -> bool:
    """Return `value`, or raise ValueError naming `what` if it is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r:.80}")
    return value


def instance(what: str, value: object, kind: type[T], example: str) -> T:
    """Return `value`, or raise ValueError naming `what` and an example if it is no instance of `kind`."""
    if not isinstance(value, kind):
        title = getattr(kind, "__name__", str(kind))
        article = "an" if title[0] in "AEIOU" else "a"
        raise ValueError(
            f"{what} must be {article} {title}, such as {example}, got {value!r:.80} ({type(value).__name__})"
        )
    return value
