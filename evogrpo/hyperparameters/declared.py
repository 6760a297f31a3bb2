"""Records from plain values that anybody may have written: each field is of the type that it is declared with."""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from evogrpo.hyperparameters.checks import refuse_unknown

F = TypeVar("F", bound=Callable[..., Any])
MOST_WHOLE, LARGEST = 2**63 - 1, 1e150  # what its square can still be computed of


def declared_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a record, if each is what the record declares.

    Args:
        kind: A dataclass, whose fields are declared as numbers, text, flags, sequences and mappings of these, and other
            classes.
        values: By field; what is a class by declaration has been made one already.

    Raises:
        ValueError: If a name is unknown or missing, or a value is of another type, or no number that can be counted
            with.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    refuse_unknown(f"field of {kind.__name__}", values, fields)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{kind.__name__} must have {name}, which is missing")
    hints = _hints(kind)
    for name, value in values.items():
        if not fits(hints[name], value):
            said = getattr(hints[name], "__name__", str(hints[name])).removeprefix("evogrpo.")
            raise ValueError(f"{name} of {kind.__name__} must be {said}, got {value!r:.80}")
    return dict(values)


def fits(hint: Any, value: object) -> bool:
    """Tell whether a value is what a type says; whole numbers of at most 64 bits, others not beyond `LARGEST`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_WHOLE
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    if origin in (Union, types.UnionType):
        return any(fits(arm, value) for arm in arguments)
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
        names: The options.
        records: Dataclasses; the first that has a field of an option's name gives its default. None otherwise.
    """
    found = {
        field.name: field.default
        for record in reversed(records)
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING
    }

    def decorate(function: F) -> F:
        signature, kind = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {each.name for each in own}
        listed = [inspect.Parameter(name, kind, default=found.get(name)) for name in names if name not in taken]
        function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return function

    return decorate


def names_unknown(function: F) -> F:
    """Decorate a function so that an unknown keyword is answered with a ValueError that names the one meant."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in ("self", "cls")]
    title = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        refuse_unknown(f"argument of {title}", options, known)
        return function(*args, **options)

    return checked  # type: ignore[return-value]  # the same signature
