"""Validation by pydantic: plain values of JSON and YAML files become records, and errors become plain sentences."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from evogrpo.synonyms import unknown_name_error
from evogrpo.text import printable, shorten

T = TypeVar("T")

MAX_ERRORS = 10
"""Maximum number of errors in one message."""
MAX_SHOWN = 80
"""Maximum number of characters of a value in a message."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Real = Annotated[float, Field(ge=-1e150, le=1e150)]
"""Numbers in files: integers of 64 bits, and floats whose squares are finite."""

_RULES: Mapping[str, str] = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "finite_number": "finite",
    "float_type": "a number",
    "int_type": "an integer",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
"""Our words after "must be", by pydantic's type of error; other errors keep pydantic's words."""
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


class Record(BaseModel):
    """Base class of records in files: exact types, no unknown keys, no NaN. Collections are declared as tuples."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class ForwardRecord(Record):
    """A record whose unknown keys are ignored, for readers of files that a later version may extend."""

    model_config = ConfigDict(extra="ignore")


def validate(model: type[T], data: object, source: str = "", *, extra: Literal["forbid", "ignore"] | None = None) -> T:
    """Build a record from plain values, such as the result of `load_json`.

    Args:
        model: A `Record`, a dataclass, or any other type that pydantic knows. Types are exact.
        data: Plain JSON values; lists are read as tuples where the model declares these.
        source: Name of the file, for messages.
        extra: Forbid or ignore unknown keys at every level; None = as each record declares.

    Raises:
        ValueError: With one line for each of the first errors: file, key, rule and value.
    """
    adapter: TypeAdapter[T] = _adapter(model)  # type: ignore[arg-type]  # a type is hashable
    try:
        return adapter.validate_json(json.dumps(data), strict=True, extra=extra)
    except ValidationError as error:
        raise ValueError(describe(error, adapter, data, source)) from None


def dump(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain values, which `dump_json` writes and `validate` reads."""
    adapter: TypeAdapter[Any] = _adapter(type(record))  # type: ignore[arg-type]  # a type is hashable
    values: dict[str, Any] = adapter.dump_python(record, by_alias=True, warnings=False)
    return values


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def describe(error: ValidationError, adapter: TypeAdapter[Any], data: object, source: str = "") -> str:
    """Return one line for each of the first errors: file, key, rule and value.

    Args:
        error: Error of the adapter.
        adapter: Adapter that was used; names the valid keys.
        data: The validated values.
        source: Name of the file, or an empty text.
    """
    # A value that fits no part of a union has one error for each part. These are joined to one line.
    rules: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for details in error.errors(include_url=False):
        keys = list(_keys_in(data, details["loc"]))
        path, value = dotted(keys), f", got {_shown(details['input'])}"
        if details["type"] in _UNKNOWN_KEY:
            section = dotted(keys[:-1])
            valid = _valid_keys(adapter.json_schema(), keys[:-1])
            path, value = "", ""
            rule = str(unknown_name_error(f"key in {section}" if section else "key", keys[-1], valid))
        elif details["type"] == "missing":
            rule, value = "must be given", ""
        elif details["type"] in ("value_error", "assertion_error"):  # raised by a validator, with words of its own
            path, rule, value = f"{path}:" if path else "", str(details["ctx"]["error"]), ""
        elif details["type"] in _RULES:
            rule = f"must be {_RULES[details['type']]}"
        else:
            rule = re.sub(r"^\w+ should ", "must ", details["msg"])
        listed = rules.setdefault(path, [])
        if rule not in listed:
            listed.append(rule)
        values[path] = value
    lines = []
    for path, listed in rules.items():
        joined = [" or ".join(listed)] if path else listed
        lines += [" ".join(part for part in (path, rule) if part) + values[path] for rule in joined]
    more = [f"and {len(lines) - MAX_ERRORS} more errors"] if len(lines) > MAX_ERRORS else []
    return "\n".join(f"{source}: {line}" if source else line for line in [*lines[:MAX_ERRORS], *more])


def _shown(value: object) -> str:
    return shorten(printable(repr(value)), MAX_SHOWN)


def dotted(keys: Sequence[str | int]) -> str:
    """Return the path of a value, such as `population.founders[2].lr`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _keys_in(data: object, location: Sequence[str | int]) -> Iterator[str | int]:
    """Yield the keys and positions of a location; pydantic also lists the parts of unions there."""
    for number, key in enumerate(location, 1):
        if key in (data if isinstance(data, Mapping) else range(len(data)) if isinstance(data, list | tuple) else ()):
            data = data[key]  # type: ignore[index]  # a key of a mapping, or a position in a list
        elif number < len(location) or not isinstance(data, Mapping):
            continue
        yield key


def _valid_keys(schema: Mapping[str, Any], keys: Sequence[str | int]) -> list[str]:
    """Return the keys that a JSON schema allows in the mapping at a path."""
    nodes = _alternatives(schema, schema)
    for key in keys:
        children = []
        for node in nodes:
            child = node.get("properties", {}).get(key) or node.get("additionalProperties") or node.get("items")
            if isinstance(child, Mapping):
                children += _alternatives(child, schema)
        nodes = children
    return list(dict.fromkeys(name for node in nodes for name in node.get("properties", ())))


def _alternatives(node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a union in a JSON schema, with references resolved."""
    if "$ref" in node:
        return _alternatives(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    parts = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    return [each for part in parts for each in _alternatives(part, schema)] if parts else [node]
