"""Checks of callers' values: names, numbers, records and keyword arguments."""

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from evogrpo.synonyms import unknown_name_error
from evogrpo.validation import MAX_COUNT

T = TypeVar("T")

MAX_STEPS = 1_000_000
"""Maximum number of generations of a run, and of learning steps of a generation."""
_MAX_WHOLE = 10**300  # fits into a float


def refuse_unknown(kind: str, names: Iterable[object], valid: Iterable[str]) -> None:
    """Raise the error of `unknown_name_error` for the first of `names` that is not in `valid`."""
    known = list(valid)
    for name in names:
        if name not in known:
            raise unknown_name_error(kind, name, known)


def finite_number(what: str, value: object) -> float:
    """Return `value` as a plain int or float, or raise ValueError if it is not a finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{what} must be a number, got {value!r:.80} ({type(value).__name__})")
    if isinstance(value, numbers.Integral):
        return whole_number(what, value)
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return float(value)


def whole_number(what: str, value: object) -> int:
    """Return an integer or a whole float such as 1e4 as a plain int; raise ValueError for any other value."""
    is_integral = isinstance(value, numbers.Integral) or (isinstance(value, numbers.Real) and float(value).is_integer())
    if isinstance(value, bool) or not is_integral:
        raise ValueError(f"{what} must be an integer, got {value!r:.80} ({type(value).__name__})")
    number: int = int(value)  # type: ignore[call-overload]  # a real number
    if abs(number) > _MAX_WHOLE:
        raise ValueError(f"{what} must be at most 10**300 in size, got {number.bit_length()} bits")
    return number


def whole_between(what: str, value: object, low: int, high: int = MAX_COUNT) -> int:
    """Return `value` as a plain int, or raise ValueError if it is not an integer in [low, high].

    The bound catches typing errors in numbers that are looped over or allocated, which would look like a hang.
    """
    number = whole_number(what, value)
    if number < low:
        raise ValueError(f"{what} must be at least {low}, got {number}")
    if number > high:
        raise ValueError(f"{what} must be at most {high:,}, got {number:,}")
    return number


def flag(what: str, value: object) -> bool:
    """Return `value`, or raise ValueError if it is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r:.80}")
    return value


def instance(what: str, value: object, kind: type[T], example: str) -> T:
    """Return `value`, or raise ValueError with an example if it is not an instance of `kind`."""
    if not isinstance(value, kind):
        title = getattr(kind, "__name__", str(kind))
        article = "an" if title[0] in "AEIOU" else "a"
        raise ValueError(
            f"{what} must be {article} {title}, such as {example}, got {value!r:.80} ({type(value).__name__})"
        )
    return value


F = TypeVar("F", bound=Callable[..., Any])


def lists_options(names: Iterable[str], *records: type) -> Callable[[F], F]:
    """Return a decorator that lists options by name, in place of `**options`, in a function's signature.

    `help` and the documentation then show each option with its default.

    Args:
        names: Names of the options.
        records: Dataclasses whose fields give the defaults; the first with a field of that name counts. Without one
            the default is None.
    """
    defaults = {
        field.name: field.default
        for record in reversed(records)
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING
    }

    def decorate(function: F) -> F:
        signature, kind = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        present = {parameter.name for parameter in parameters}
        added = [inspect.Parameter(name, kind, default=defaults.get(name)) for name in names if name not in present]
        function.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
        return function

    return decorate


def names_unknown(function: F) -> F:
    """Decorate a function so that an unknown keyword raises a ValueError with a hint."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in ("self", "cls")]
    title = function.__qualname__.removesuffix(".__init__").split(".")[-1]

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        refuse_unknown(f"argument of {title}", options, known)
        return function(*args, **options)

    return checked  # type: ignore[return-value]  # the same signature
