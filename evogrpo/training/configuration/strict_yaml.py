"""YAML read strictly: 1e-4 is a number, a key stands once, and overrides name their key with dots."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evogrpo.bounded_yaml import BoundedLoader, bounded_yaml


class _StrictLoader(BoundedLoader):
    """A safe loader that refuses duplicate keys and keys that are no text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"every key must be text, got {key!r}: put it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice: only one of the two could count", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 takes 1e-4 and 1.5e3 for text: it asks for a dot and for a sign in the exponent.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML.

    Args:
        text: The YAML.
        where: What it is, for messages: a file name, say.

    Raises:
        ValueError: If it is not YAML, more than is bearable, or a key stands twice; with the line.
    """
    return bounded_yaml(text, where, _StrictLoader)


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Read a file that holds one mapping.

    Raises:
        ValueError: If the file cannot be read, is not YAML, or holds anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8. Save it in UTF-8.") from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot read {path} ({reason}): name a YAML file, or see `evogrpo demo`") from error
    values = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of keys to values, got {type(values).__name__}")
    return values


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Take `schedule.generations=8` apart: the keys on the way, and the value, read as YAML.

    Raises:
        ValueError: If there is no "=", a key is empty, or the value is not YAML.
    """
    name, sign, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not sign or not all(keys):
        raise ValueError(f"an override reads key=value, with dots between nested keys, got {text!r:.80}")
    return keys, read_yaml(value, f"the override {text!r:.80}")


def with_value(values: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested mappings in which `keys` leads to `value`.

    Raises:
        ValueError: If the way leads through something that is no mapping.
    """
    first, *rest = keys
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{'.'.join(keys)} cannot be set: {first} is {inner!r}, which holds no keys")
    return {**values, first: with_value(inner or {}, rest, value)}
