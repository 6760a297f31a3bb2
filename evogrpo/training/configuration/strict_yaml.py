"""Strict YAML: plain values become frozen records; unknown keys are errors with their full path."""

import dataclasses
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from evogrpo.config.checks import finite_number, whole_number
from evogrpo.safe_parsing import BoundedLoader, load_yaml
from evogrpo.synonyms import close_match, counterpart, unknown_name_error


class _StrictLoader(BoundedLoader):
    """A safe loader that rejects duplicate keys and keys that are not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"every key must be text, got {key!r}. Put it in quotes.", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice. Remove one.", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads 1e-4 and 1.5e3 as text, because it requires a dot and a signed exponent.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML.

    Args:
        text: YAML text.
        where: Source for messages, such as a file name.

    Raises:
        ValueError: If it is not valid YAML, exceeds the limits of `safe_parsing`, or a key appears twice.
    """
    return load_yaml(text, where, _StrictLoader)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read a file that contains one mapping.

    Raises:
        ValueError: If the file cannot be read, is not valid YAML, or contains anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8. Save it in UTF-8.") from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot read {path}: {reason}. Check the path of the YAML file.") from error
    values = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a mapping, got {type(values).__name__}. Write `key: value` lines.")
    return values


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split an override such as `schedule.generations=8` into its keys and its value, which is read as YAML.

    Raises:
        ValueError: If there is no "=", a key is empty, or the value is not valid YAML.
    """
    name, sign, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not sign or not all(keys):
        raise ValueError(f"An override must have the form section.key=value, got {text!r:.80}.")
    return keys, read_yaml(value, f"override {text!r:.80}")


def with_value(values: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested mappings with the value at the path `keys` replaced.

    Raises:
        ValueError: If a key on the path has a value that is not a mapping.
    """
    first, *rest = keys
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"Cannot set {'.'.join(keys)}: {first} is {inner!r}, which has no keys.")
    return {**values, first: with_value(inner or {}, rest, value)}


T = TypeVar("T")


def build(kind: type[T], values: object, where: str) -> T:
    """Build a dataclass from a mapping of its fields.

    Args:
        kind: The dataclass; fields may be plain types, dataclasses, Literal, unions, sequences and mappings of those.
        values: The mapping; None counts as an empty one.
        where: Dotted path of the mapping, for messages.

    Raises:
        ValueError: If a name is unknown or missing, a value has the wrong type, or the dataclass rejects it.
    """
    assert dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = mapping({} if values is None else values, where, fields)
    refuse_unknown_keys(values, fields, where)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{inside(where, name)} must be given")
    hints = get_type_hints(kind)
    checked = {name: typed(hints[name], value, inside(where, name)) for name, value in values.items()}
    try:
        return kind(**checked)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class UnknownKeyError(ValueError):
    """A key that its section does not have.

    Attributes:
        name: The key.
        where: Dotted path of the section.
        has_suggestion: True if a valid key of the section has a similar name, or this name in another library.
        overlaps: True if the name is part of a valid key, or a valid key is part of the name.
    """

    def __init__(self, name: str, where: str, valid: Iterable[str]) -> None:
        super().__init__(str(unknown_name_error(f"key in {where}" if where else "key", name, valid)))
        self.name, self.where = name, where
        names = list(valid)
        self.has_suggestion = (close_match(name, names) or counterpart(name, names)) is not None
        self.overlaps = any(name in key or key in name for key in names)


def refuse_unknown_keys(values: Mapping[str, Any], valid: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """Raise `UnknownKeyError` for the first key that is not valid, naming the closest valid one."""
    for name in values:
        if name not in valid:
            raise UnknownKeyError(name, where, valid)


def mapping(value: object, where: str, keys: Iterable[str] = ()) -> Mapping[str, Any]:
    """Return the value if it is a mapping with text keys; otherwise raise ValueError naming the valid keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        names = ", ".join(keys)
        raise ValueError(f"{where} must be a mapping{f' with the keys {names}' if names else ''}, got {value!r:.80}")
    return value


def optional_mapping(value: object, where: str) -> Mapping[str, Any]:
    """Return the value as `mapping` does; an empty mapping for None."""
    return {} if value is None else mapping(value, where)


def inside(where: str, name: str) -> str:
    """Return the dotted path of a key."""
    return f"{where}.{name}" if where else name


def typed(hint: Any, value: object, where: str) -> Any:
    """Convert a plain value to the type `hint`; lists become tuples.

    Raises:
        ValueError: If it has another type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            raise unknown_name_error(f"value of {where}:", value, map(str, arguments))
        return value
    if origin is not None and issubclass(origin, Mapping):
        return {key: typed(arguments[1], item, inside(where, key)) for key, item in mapping(value, where).items()}
    if origin is not None and issubclass(origin, Sequence):
        return _sequence(arguments, value, where)
    return _plain(hint, value, where)


def _one_of(arguments: Sequence[Any], value: object, where: str) -> Any:
    """Convert a value of a union: None, or the first type that accepts it."""
    if value is None and type(None) in arguments:
        return None
    errors: list[ValueError] = []
    for hint in arguments:
        if hint is type(None):
            continue
        try:
            return typed(hint, value, where)
        except ValueError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise ValueError(" or ".join(dict.fromkeys(str(error) for error in errors)))


def _sequence(arguments: Sequence[Any], value: object, where: str) -> tuple[Any, ...]:
    """Convert a list to a tuple of typed values."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{where} must be a list, got {value!r:.80}")
    if len(arguments) == 1 or arguments[1] is Ellipsis:
        return tuple(typed(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if len(value) != len(arguments):
        raise ValueError(f"{where} must be a list of {len(arguments)} values, got {len(value)}")
    return tuple(
        typed(hint, item, f"{where}[{number}]")
        for number, (hint, item) in enumerate(zip(arguments, value, strict=True))
    )


def _plain(hint: Any, value: object, where: str) -> Any:
    """Convert a value of a plain type."""
    if hint is Any:
        return value
    if hint is int:
        return whole_number(where, value)
    if hint is float:
        return finite_number(where, value)
    assert hint in (bool, str), f"{where} is declared as {hint}"
    if not isinstance(value, hint):
        kind = "true or false" if hint is bool else "text"
        raise ValueError(f"{where} must be {kind}, got {value!r:.80} ({type(value).__name__})")
    return value


def plain(value: Any) -> Any:
    """Convert records, tuples and mappings to plain lists and dicts, with all fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
