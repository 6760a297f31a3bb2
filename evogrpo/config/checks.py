"""Checks of callers' values: names, numbers, records and keyword arguments."""

import dataclasses
import inspect
import math
import numbers
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from evogrpo.synonyms import unknown_name_error

T = TypeVar("T")

FLOAT32_LIMIT = 1e38  # members compute in float32
MAX_COUNT = 10**15
"""Largest number that is only counted, never looped over."""
MAX_STEPS = 1_000_000
"""Maximum number of generations of a run, and of learning steps of a generation."""
MAX_SEED = 2**63 - 1
"""Largest seed."""
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
        # YAML 1.1 reads 1e-4, without a dot, as text.
        remedy = ". In YAML write 1.0e-4, with the dot" if re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", str(value)) else ""
        raise ValueError(f"{what} must be a number, got {value!r:.80} ({type(value).__name__}){remedy}")
    if isinstance(value, numbers.Integral):
        return whole_number(what, value)
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return float(value)


def float32_number(what: str, value: object) -> float:
    """Return `value` as a plain float, or raise ValueError if it does not fit into float32."""
    number = float(finite_number(what, value))
    if abs(number) > FLOAT32_LIMIT:
        raise ValueError(f"{what} must be at most {FLOAT32_LIMIT:g} in size, for float32, got {number:g}")
    return number


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
MAX_INT64, MAX_STORED_FLOAT = 2**63 - 1, 1e150  # its square is finite


def declared_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a record after checking each against its declared type.

    Args:
        kind: A dataclass with fields of numbers, text, flags, sequences and mappings of these, and other classes.
        values: Values by field; those of other classes are already instances.

    Raises:
        ValueError: If a name is unknown or missing, or a value is of another type or too large.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    refuse_unknown(f"field of {kind.__name__}", values, fields)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{kind.__name__} must have {name}")
    hints = _hints(kind)
    for name, value in values.items():
        if not fits(hints[name], value):
            type_name = getattr(hints[name], "__name__", str(hints[name])).removeprefix("evogrpo.")
            raise ValueError(f"{name} of {kind.__name__} must be {type_name}, got {value!r:.80}")
    return dict(values)


def fits(hint: Any, value: object) -> bool:
    """Return True if a value has a type; integers have at most 64 bits, floats a size of at most 1e150."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT64
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_STORED_FLOAT
    if origin in (Union, types.UnionType):
        return any(fits(alternative, value) for alternative in arguments)
    if origin is Literal:
        return value in arguments
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            fits(arguments[0], key) and fits(arguments[1], item) for key, item in value.items()
        )
    if origin is not None and issubclass(origin, Sequence):
        return _all_fit(arguments, value)
    return isinstance(value, hint)


def _all_fit(arguments: Sequence[Any], value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    if len(arguments) == 1 or arguments[1] is Ellipsis:
        return all(fits(arguments[0], item) for item in value)
    return len(value) == len(arguments) and all(map(fits, arguments, value))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


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
    """Decorate a function, or a record, so that an unknown keyword raises a ValueError with a hint."""
    if isinstance(function, type):
        function.__init__ = names_unknown(function.__init__)  # type: ignore[misc]  # of a record
        return function
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in ("self", "cls")]
    title = function.__qualname__.removesuffix(".__init__").split(".")[-1]

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        refuse_unknown(f"argument of {title}", options, known)
        return function(*args, **options)

    return checked  # type: ignore[return-value]  # the same signature
