"""Validation by pydantic: values become frozen records, and errors become plain sentences."""

import dataclasses
import inspect
import json
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial, wraps
from typing import Annotated, Any, Literal, Protocol, TypeVar, dataclass_transform, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ArgsKwargs, ErrorDetails, PydanticKnownError

from evogrpo.synonyms import OTHER_MEANINGS, close_match, counterpart, unknown_name_error
from evogrpo.text import MAX_SHOWN, class_name, one_line, shown

T = TypeVar("T")

MAX_DEPTH = 50
"""Maximum number of levels of nested settings."""
MAX_ERRORS = 10
"""Maximum number of errors in one message."""

_RULES: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "finite_number": "must be finite",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "mapping_type": "must be a mapping",
    "sequence_str": "must be a list",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}
"""Texts of errors by their type in pydantic; other errors keep the text of pydantic."""
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
_OWN_MESSAGE = ("value_error", "assertion_error")
"""Errors that a validator raised, with its own message."""
_MAX_KEYS = 16  # of a mapping whose keys a message lists

# ---- types of settings


def _whole(value: object) -> int:
    """Return a Python or numpy integer, or a whole float such as 1e4, as an integer."""
    try:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise PydanticKnownError("int_type")
        if not isinstance(value, numbers.Integral) and not float(value).is_integer():
            raise PydanticKnownError("int_type")
        whole: int = int(value)  # type: ignore[call-overload]  # a real number
    except Exception:  # noqa: BLE001 - raised by an object of a user
        raise PydanticKnownError("int_type") from None
    return whole


def _real(value: object) -> int | float:
    """Return a Python or numpy number as an integer or a float."""
    try:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise PydanticKnownError("float_type")
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value)
    except Exception:  # noqa: BLE001 - raised by an object of a user
        raise PydanticKnownError("float_type") from None


WHOLE = BeforeValidator(_whole)
REAL = BeforeValidator(_real)
"""Annotations of numbers in settings: they accept numpy scalars but no text. Must be last in an
`Annotated`.
"""

FLOAT32_LIMIT = 1e38
"""Largest size of a number that members compute with in float32."""
MAX_COUNT = 10**15
"""Maximum of numbers that are counted but never looped over."""

Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Int = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT), WHOLE]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT), WHOLE]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE]
Float = Annotated[float, Field(ge=-FLOAT32_LIMIT, le=FLOAT32_LIMIT), REAL]
NonNegativeFloat = Annotated[float, Field(ge=0, le=FLOAT32_LIMIT), REAL]
PositiveFloat = Annotated[float, Field(gt=0, le=FLOAT32_LIMIT), REAL]
Share = Annotated[float, Field(ge=0, le=1), REAL]
PositiveShare = Annotated[float, Field(gt=0, le=1), REAL]
Seed = Annotated[int, Field(ge=0, lt=2**63), WHOLE]
Number = Annotated[int | float, Field(ge=-FLOAT32_LIMIT, le=FLOAT32_LIMIT), REAL]
"""Number that stays an integer if it is one."""

_SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(kind: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass that validates by annotations.

    Integers are annotated as `Int`, floats as `Float`, booleans as `Flag` and text as `Text`, or
    narrower types. Lists become tuples. `__post_init__` checks combinations of fields. Every error
    is a ValueError that names the field.
    """
    # A dataclass whose constructor passes its arguments to pydantic, which sets the fields.
    made = dataclass(frozen=True, kw_only=True)(kind)
    made.__pydantic_config__ = _SETTINGS  # type: ignore[attr-defined]  # read by pydantic
    made.__init__.__annotations__ = get_type_hints(made)  # plain types for `help`

    @wraps(made.__init__)
    def init(self: Any, /, *positional: Any, **values: Any) -> None:
        """Validate the arguments, and set the fields."""
        if positional:
            pairs = zip(fields(made), positional, strict=False)  # type: ignore[arg-type]  # a dataclass
            parts = [f"{each.name}={shown(value, 40)}" for each, value in pairs]
            example = ", ".join(parts)
            raise ValueError(
                f"{made.__name__} takes its arguments by name, such as {made.__name__}({example})."
            )
        try:
            _adapter(made).validator.validate_python(ArgsKwargs((), values), self_instance=self)
        except ValidationError as error:
            raise ValueError(
                describe(error, made, values, kind=f"argument of {made.__name__}")
            ) from None

    made.__init__ = init  # type: ignore[method-assign, assignment]
    return made


class Misplaced(Protocol):
    """Finds the intended key of an unknown one."""

    def __call__(self, name: str, section: str, valid: Sequence[str]) -> str | None:
        """Return the dotted path of the intended key in another section, or None.

        " (only with another task)" follows the path if only tasks of another kind have the key.

        Args:
            name: The unknown key.
            section: Dotted path of its section.
            valid: Keys of that section.
        """


def build(kind: Any, values: object, where: str = "", misplaced: Misplaced | None = None) -> Any:
    """Build settings from the plain values of a configuration, in which lists stand for tuples.

    Args:
        kind: A class of settings, or another type that pydantic knows.
        values: Plain values, or built settings.
        where: Dotted path of the values, for messages.
        misplaced: Finds the section of a key that belongs to another one.

    Raises:
        ValueError: With one line for each of the first errors: key, rule and value.
    """
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise ValueError(describe(error, kind, values, where=where, misplaced=misplaced)) from None


def plain(value: Any, depth: int = 0) -> Any:
    """Convert records (with all fields), tuples, mappings and scalars of numpy to plain values.

    Raises:
        ValueError: If values are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"Settings must be nested at most {MAX_DEPTH} deep.")
    depth += 1
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth) for field in fields(value)}
    # Types, not `isinstance`: an object such as a mock may claim another class.
    if issubclass(type(value), Mapping):
        return {key: plain(item, depth) for key, item in value.items()}
    if (
        type(value).__module__ == "numpy"
        and hasattr(value, "item")
        and not getattr(value, "ndim", 1)
    ):
        # Without an import of numpy, which takes time.
        return value.item()
    if issubclass(type(value), list | tuple):
        return [plain(item, depth) for item in value]
    return value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted name; an empty mapping is a value."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{path}.")
        else:
            result[path] = value
    return result


def json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    return _adapter(kind).json_schema()


# ---- records of files

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Real = Annotated[float, Field(ge=-1e150, le=1e150)]
"""Numbers in files: integers of 64 bits, and floats whose squares are finite."""


class Record(BaseModel):
    """Base class of records in journals: exact types, no NaN, and collections declared as tuples.

    Unknown keys, which a later version may add, are ignored.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True
    )


def validate(
    model: type[T],
    data: object,
    source: str = "",
    *,
    extra: Literal["forbid", "ignore"] | None = None,
) -> T:
    """Build a record from plain values, such as the result of `load_json`.

    Args:
        model: A `Record`, a dataclass, or any other type that pydantic knows. Types are exact.
        data: Plain JSON values; lists are read as tuples where the model declares these.
        source: Name of the file, for messages.
        extra: Forbid or ignore unknown keys at every level; None = as each record declares.

    Raises:
        ValueError: With one line for each of the first errors: file, key, rule and value.
    """
    try:
        # Lone surrogates, which UTF-8 cannot encode, become question marks.
        text = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")
        built: T = _adapter(model).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        raise ValueError(describe(error, model, data, source)) from None
    return built


def dump(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain values, which `validate` reads back."""
    values: dict[str, Any] = _adapter(type(record)).dump_python(
        record, by_alias=True, warnings=False
    )
    return values


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
_schema = cache(json_schema)


# ---- errors


def describe(
    error: ValidationError,
    model: Any,
    data: object,
    source: str = "",
    *,
    kind: str = "key",
    where: str = "",
    misplaced: Misplaced | None = None,
) -> str:
    """Return one line for each of the first errors: file, key, rule and value.

    Args:
        error: Error of the model.
        model: Model that was used; names the valid keys.
        data: The validated values.
        source: Name of the file, or an empty text.
        kind: Name of an unknown key at the top level, such as "key".
        where: Dotted path of the values.
        misplaced: Finds the section of a key that belongs to another one.
    """
    # 1. Find where each error is. A value that fits no type of a union has one error for each type.
    #    Errors inside the value are more precise and replace them.
    errors = error.errors(include_url=False)
    paths = [tuple(_keys_in(data, details)) for details in errors]
    outer: set[tuple[str | int, ...]] = set()
    for path in paths:
        outer.update(path[:length] for length in range(len(path)))
    # 2. Collect the broken rules by path and received value.
    rules: dict[tuple[str, str], list[str]] = {}
    for path, details in zip(paths, errors, strict=True):
        if path in outer:
            continue
        full_path = (where, *path) if where else path
        if details["type"] in _UNKNOWN_KEY:
            valid = _valid_keys(_schema(model), path[:-1])
            # This message is whole: it needs neither a rule nor a value.
            line = _unknown_key(full_path, valid, kind, misplaced)
            rules[line, ""] = [""]
            continue
        rule, value = _broken_rule(details, partial(_valid_keys, _schema(model), path))
        name = dotted(full_path)
        if name and details["type"] in _OWN_MESSAGE and not rule.startswith("must "):
            name = f"{name}:"
        rules.setdefault((name, value), []).append(rule)
    # 3. Write one line for each value, with the rules of all types that it fits.
    lines = []
    for (name, value), (first, *others) in rules.items():
        further = [rule.removeprefix("must be ") for rule in others if rule != first]
        rule = " or ".join(dict.fromkeys([first, *further]))
        lines.append(f"{name} {rule}".strip() + value)
    if len(lines) > MAX_ERRORS:
        lines[MAX_ERRORS:] = [f"and {len(lines) - MAX_ERRORS} more errors"]
    start = f"{source}: " if source else ""
    return "\n".join(start + line for line in lines)


def _unknown_key(
    path: Sequence[str | int], valid: Sequence[str], kind: str, misplaced: Misplaced | None
) -> str:
    """Return the message for an unknown key."""
    section = dotted(path[:-1])
    key = str(path[-1])
    where = None
    if misplaced is not None:
        intended = misplaced(key, section, valid)
        if intended == f"{dotted(path)} (only with another task)":
            return f"unknown key in {section} {key!r}: only tasks of another kind have it."
        if intended is not None:
            note = OTHER_MEANINGS.get(intended, "")
            return f"Unknown key {dotted(path)!r}. Use {intended!r}{note}."
        where = partial(misplaced, section=section, valid=())
    return str(unknown_name_error(f"key in {section}" if section else kind, key, valid, where))


def _broken_rule(details: ErrorDetails, valid_keys: Callable[[], list[str]]) -> tuple[str, str]:
    """Return the broken rule and the received value, both as text.

    Args:
        details: The error.
        valid_keys: Returns the keys of a mapping in the place of the value.
    """
    name = details["type"]
    context = details.get("ctx", {})
    value = f", got {shown(details['input'])}"
    if name == "missing":
        return "must be given", ""
    if name in _OWN_MESSAGE:
        return str(context["error"]), ""
    if name == "literal_error":
        # pydantic names the valid values in a text only.
        names = re.findall(r"'([^']*)'", context["expected"])
        typed = one_line(details["input"], MAX_SHOWN)
        match = counterpart(typed, names) or close_match(typed, names)
        if match is not None:
            value += f": did you mean {match!r}?"
        return f"must be one of {', '.join(names)}", value
    if name in ("dataclass_type", "model_type"):
        keys = valid_keys()
        if len(keys) < _MAX_KEYS:
            return f"must be a mapping with the keys {', '.join(keys)}", value
        return "must be a mapping", value
    if name in _RULES:
        bounds = {key: _bound(bound) for key, bound in context.items()}
        return _RULES[name].format_map(bounds), value
    return re.sub(r"^\w+ should ", "must ", one_line(details["msg"])), value


def _bound(value: object) -> object:
    """Return a bound of an error message; whole numbers are written in full."""
    if isinstance(value, int | float) and value == int(value) and value < 1e18:
        return f"{int(value):,}"
    return value


def dotted(keys: Sequence[str | int]) -> str:
    """Return the path of a value, such as `population.founders[2].lr`."""
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{one_line(key, MAX_SHOWN)}"
    return path.removeprefix(".")


def _keys_in(data: object, details: ErrorDetails) -> Iterator[str | int]:
    """Yield the keys and positions of an error's location.

    Types of unions, which pydantic adds to it, are left out.
    """
    location = details["loc"]
    for number, key in enumerate(location, 1):
        if isinstance(data, Mapping):
            present = key in data
        else:
            present = isinstance(data, list | tuple) and key in range(len(data))
        if present:
            data = data[key]  # type: ignore[index]  # a key of a mapping, or a position in a list
            yield key
        elif number == len(location) and details["type"] == "missing":
            yield key


def _valid_keys(schema: Mapping[str, Any], keys: Sequence[str | int]) -> list[str]:
    """Return the keys that a JSON schema allows in the mapping at a path."""
    nodes = _alternatives(schema, schema)
    for key in keys:
        children: list[Mapping[str, Any]] = []
        for node in nodes:
            # A field by its name, or the values of a mapping, or the elements of a list.
            child = (
                node.get("properties", {}).get(key)
                or node.get("additionalProperties")
                or node.get("items")
            )
            if isinstance(child, Mapping):
                children += _alternatives(child, schema)
        nodes = children
    names: dict[str, None] = {}
    for node in nodes:
        names |= dict.fromkeys(node.get("properties", ()))
    return list(names)


def _alternatives(node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a union in a JSON schema, with references resolved."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return _alternatives(schema["$defs"][name], schema)
    parts = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    if not parts:
        return [node]
    found = []
    for part in parts:
        found += _alternatives(part, schema)
    return found


MAX_STEPS = 1_000_000
"""Maximum number of generations of a run, and of learning steps of a generation."""
_MAX_WHOLE = 10**300  # fits into a float


def refuse_unknown(kind: str, names: Iterable[object], valid: Iterable[str]) -> None:
    """Raise ValueError for the first of `names` that is not in `valid`, with a hint.

    See `unknown_name_error`.
    """
    known = list(valid)
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise unknown_name_error(kind, name, known)


def check_call(what: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise ValueError unless a user's function can be called with these arguments by position."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{what} ({', '.join(arguments)}): {one_line(error)}.") from error
    except ValueError:  # a built-in function without a signature
        pass


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}


def plain_value(value: Any) -> Any:
    """Return values of numpy and torch as Python numbers or lists; other values stay."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception:  # noqa: BLE001 - raised by an object of a user
        return value


def float32_number(value: object) -> float | None:
    """Return a number of Python, numpy or torch as a float.

    None if it is not a finite number of float32.
    """
    try:
        scalar = plain_value(value)
        if not isinstance(scalar, numbers.Real):
            return None
        number = float(scalar)
    except Exception:  # noqa: BLE001 - raised by an object of a user, or too large for a float
        return None
    return number if abs(number) <= FLOAT32_LIMIT else None  # False for NaN


def plain_list(values: object) -> list[Any] | None:
    """Return a list, tuple, array or tensor as a list; None for any other value."""
    try:
        if hasattr(values, "tolist"):
            listed = values.tolist()
        else:
            listed = values
        if isinstance(listed, str) or not isinstance(listed, Sequence):
            return None
        return list(listed)
    except Exception:  # noqa: BLE001 - raised by an object of a user
        return None


def is_text(value: object, text: str) -> bool:
    """Return True if a value is this text.

    Arrays and objects with a comparison of their own are not compared.
    """
    return isinstance(value, str) and value == text


def finite_number(what: str, value: object) -> float:
    """Return `value` as a plain int or float; raise ValueError if it is not a finite number."""
    try:
        number = _real(value)
    except PydanticKnownError:
        raise ValueError(
            f"{what} must be a number, got {shown(value)} ({class_name(value)})."
        ) from None
    if isinstance(number, int):
        return whole_number(what, number)  # huge ones have no float
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {value}.")
    return number


def whole_number(what: str, value: object) -> int:
    """Return an integer or a whole float such as 1e4 as a plain int.

    Raise ValueError for any other value.
    """
    try:
        number = _whole(value)
    except PydanticKnownError:
        raise ValueError(
            f"{what} must be an integer, got {shown(value)} ({class_name(value)})."
        ) from None
    if abs(number) > _MAX_WHOLE:
        raise ValueError(f"{what} must be at most 10**300 in size, got {number.bit_length()} bits.")
    return number


def whole_between(what: str, value: object, low: int, high: int = MAX_COUNT) -> int:
    """Return `value` as a plain int, or raise ValueError if it is not an integer in [low, high].

    The upper bound refuses typing errors in numbers of repetitions or sizes, which would look like
    a hang.
    """
    number = whole_number(what, value)
    if number < low:
        raise ValueError(f"{what} must be at least {low}, got {number}.")
    if number > high:
        raise ValueError(f"{what} must be at most {high:,}, got {number:,}.")
    return number


def flag(what: str, value: object) -> bool:
    """Return `value`, or raise ValueError if it is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {shown(value)}.")
    return value


def instance(what: str, value: object, kind: type[T], example: str) -> T:
    """Return `value`, or raise ValueError with an example if it is not an instance of `kind`."""
    if not isinstance(value, kind):
        title = getattr(kind, "__name__", str(kind))
        article = "an" if title[0] in "AEIOU" else "a"
        raise ValueError(
            f"{what} must be {article} {title}, such as {example}, got {shown(value)}"
            f" ({class_name(value)})."
        )
    return value


F = TypeVar("F", bound=Callable[..., Any])


def lists_options(
    names: Iterable[str], *records: Callable[..., Any], **others: Any
) -> Callable[[F], F]:
    """Return a decorator that replaces `**options` in a signature by the options themselves.

    `help` and the documentation then show each option with its default.

    Args:
        names: Names of the options.
        records: Dataclasses or functions with the defaults; of several with the same name, the
            first counts. The default of any other option is None.
        others: Defaults that replace those of the records.
    """
    defaults: dict[str, Any] = {}
    for record in reversed(records):  # so that the first one overwrites the others
        if isinstance(record, type):
            listed = [(field.name, field.default) for field in dataclasses.fields(record)]
        else:
            listed = [
                (each.name, each.default) for each in inspect.signature(record).parameters.values()
            ]
        # A default factory is shown as None: the value that it makes may be long.
        missing = (dataclasses.MISSING, inspect.Parameter.empty)
        defaults |= {name: default for name, default in listed if default not in missing}
    defaults |= others

    def decorate(function: F) -> F:
        """Add the names to the signature of a function, in place of its `**options`."""
        signature = inspect.signature(function)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        present = {parameter.name for parameter in parameters}
        added = [
            inspect.Parameter(name, kind, default=defaults.get(name))
            for name in names
            if name not in present
        ]
        function.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
        return function

    return decorate


def names_unknown(function: F) -> F:
    """Decorate a function so that an unknown keyword raises a ValueError with a hint."""
    # `help` and type checkers see the signature of the function itself.
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in ("self", "cls")]
    title = function.__qualname__.removesuffix(".__init__").split(".")[-1]

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        refuse_unknown(f"argument of {title}", options, known)
        return function(*args, **options)

    return checked  # type: ignore[return-value]  # the same signature
