"""Parsing of untrusted JSON and YAML: bounded size, depth and numbers, no repeated keys."""

import errno
import json
import math
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from evogrpo.text import class_name, one_line, shown

MAX_VALUES = 100_000
MAX_DEPTH = 100
MAX_DIGITS = 300
MAX_CHARACTERS = 20_000_000
"""Maximum length of all texts of a YAML file together, counting those of aliases each time."""


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file, or of a link to one.

    Raises:
        OSError: If it cannot be read, or is a pipe or device, which could make the program wait for
            ever.
    """
    # A folder raises the usual error of the system when it is read.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or device, not a regular file", str(path))
    return path.read_bytes()


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that refuses repeated keys, huge values and excessive aliases.

    An alias counts as all the values and characters that it refers to.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        # Values and characters of each node, by its id; those of aliases counted again.
        self._sizes: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and count its values."""
        mark = self.peek_event().start_mark
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} levels deep", mark)
        # The event is consumed below.
        alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not alias:
            self._count(node)
        elif id(node) not in self._sizes:
            # An alias inside its own anchor, which has no size yet.
            raise _refused("the alias refers to a value that contains it. Remove the alias.", mark)
        too_many = ""
        if self._lengths[id(node)] > MAX_CHARACTERS:
            too_many = f"{MAX_CHARACTERS:,} characters"
        if self._sizes[id(node)] > MAX_VALUES:
            too_many = f"{MAX_VALUES:,} values"
        if too_many:
            raise _refused(f"more than {too_many}, counting those of aliases each time", mark)
        return node  # type: ignore[no-any-return]

    def _count(self, node: Any) -> None:
        """Add up the values and characters of a node, whose children have been counted."""
        size = 1
        length = 0
        if isinstance(node, yaml.ScalarNode):
            length = len(node.value)
        for child in _children(node):
            size += self._sizes[id(child)]
            length += self._lengths[id(child)]
        self._sizes[id(node)] = size
        self._lengths[id(node)] = length

    def construct_yaml_int(self, node: Any) -> int:
        """Read an integer of at most `MAX_DIGITS` digits."""
        if len(node.value) > MAX_DIGITS:
            why = f"a whole number has at most {MAX_DIGITS} digits, got {len(node.value):,}"
            raise _refused(why, node.start_mark)
        return int(super().construct_yaml_int(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Read a mapping; every key is text and appears once."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            mark = key_node.start_mark
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _refused("merge keys (<<) are not supported. Write the keys out.", mark)
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise _refused(f"every key must be text, got {shown(key)}. Put it in quotes.", mark)
            # The base class would let the last of several equal keys win.
            if key in seen:
                raise _refused(f"the key {key!r} appears twice. Remove one.", mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _refused(why: str, mark: Any) -> yaml.MarkedYAMLError:
    """Return the error of a value that is not read; `load_yaml` adds file and line."""
    return yaml.MarkedYAMLError(None, None, why, mark)


class _Dumper(yaml.SafeDumper):
    """Safe YAML dumper that quotes text which `_Loader` would read as a number."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
# YAML 1.1 reads 1e-4 and 1.5e3 as text, because it requires a dot and a signed exponent.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def load_yaml(text: str, where: str) -> Any:
    """Parse YAML; numbers in scientific notation need no dot.

    Args:
        text: YAML text.
        where: Source for messages, such as a file name.

    Raises:
        ValueError: If it is not valid YAML or exceeds the limits.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.YAMLError as error:
        # Most errors have a line and a column.
        mark = getattr(error, "problem_mark", None)
        position = ""
        if mark is not None:
            position = f", line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{where}{position}: {problem}") from error
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # yaml raises these for values that do not match their tag, such as malformed dates.
        raise ValueError(
            f"{where}: a value cannot be read as its YAML type ({one_line(error, 200)}). Quote it"
            " to keep it as text."
        ) from error


def dump_yaml(value: Any, **style: Any) -> str:
    """Write plain values as ASCII YAML, which `load_yaml` reads back; keys keep their order.

    Args:
        value: Plain values.
        style: Options of `yaml.dump`, such as `width`.
    """
    # Not `allow_unicode`: YAML reads some of these characters, such as U+0085, as the end of a
    # line.
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style))


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read a file that contains one mapping.

    Raises:
        ValueError: If the file cannot be read, is not valid YAML, or contains anything else.
    """
    try:
        text = read_regular(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8. Save it in UTF-8.") from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"cannot read {path}: {reason}. Check the path of the YAML file."
        ) from error
    values = load_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must contain a mapping, got {class_name(values)}. Write `key: value` lines."
        )
    return values


def _children(node: Any) -> list[yaml.Node]:
    """Return the nodes inside a YAML node."""
    if isinstance(node, yaml.MappingNode):
        return list(chain.from_iterable(node.value))
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []


def dump_json(value: Any, *, what: str = "record", indent: int | None = None) -> str:
    """Write a value as ASCII JSON that any JSON reader accepts.

    Args:
        value: Mappings with text keys, lists or tuples (read back as lists), text, integers, finite
            floats, booleans and None, nested in any way.
        what: Name of the value in error messages.
        indent: Spaces per level, or None for one line.

    Returns:
        JSON text without a final newline.

    Raises:
        ValueError: If a part of the value has no exact JSON form.
    """
    try:
        return json.dumps(_plain(value, what), allow_nan=False, ensure_ascii=True, indent=indent)
    except RecursionError as error:
        raise ValueError(
            f"{what} is nested too deeply for JSON (or contains itself). Flatten it."
        ) from error


def load_json(text: bytes | str) -> Any:
    """Parse strict JSON.

    Args:
        text: UTF-8 bytes or text.

    Returns:
        The value: dictionaries, lists, text, integers, finite floats, booleans and None.

    Raises:
        ValueError: If it is not UTF-8 or not JSON, is nested too deeply, or has NaN, an infinity, a
            huge integer or a repeated key.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text,
            # Each hook refuses what Python accepts beyond strict JSON.
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
            object_pairs_hook=unique_keys,
        )
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def _plain(value: Any, path: str) -> Any:
    """Copy a value into plain JSON types; the ValueError for an invalid part has its path."""
    if value is None or isinstance(value, (str, bool)):
        return value
    # Booleans, which are integers in Python, were returned above. Subclasses become plain integers.
    if isinstance(value, int):
        if abs(value) >= 10**MAX_DIGITS:
            raise ValueError(
                f"{path} must have at most {MAX_DIGITS} digits, got a longer integer. Pass it as"
                " text."
            )
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"{path} is {value}, but JSON has only finite numbers. Pass None for a missing"
                " value."
            )
        return float(value)
    if isinstance(value, Mapping):
        # json.dumps would convert numbers to text in silence.
        for key in value:
            if not isinstance(key, str):
                raise ValueError(
                    f"{path} has the key {key!r}, but JSON keys are text. Pass str(key)."
                )
        return {key: _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{position}]") for position, item in enumerate(value)]
    raise ValueError(
        f"{path} is a {class_name(value)}, which JSON cannot hold. "
        "Convert it to text, a number, a boolean, None, a list or a mapping."
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    """Return a JSON number; ValueError if a float cannot hold it."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} does not fit a float")
    return number


def _bounded_int(text: str) -> int:
    """Return a JSON integer; ValueError if it has too many digits."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a whole number has at most {MAX_DIGITS} digits, got {len(text):,}")
    return int(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a mapping; raise ValueError if a key is repeated."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"an object has the key {shown(key)} twice")
        mapping[key] = value
    return mapping
