"""ROLL's configuration files: YAML whose values may name other keys, as in `${response_length}`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def read_values(source: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the keys of a configuration, references put in, and the names of the top keys that others refer to.

    Args:
        source: A mapping of keys, the path of a YAML file, or YAML text.

    Raises:
        ValueError: If it is no mapping, or references run in a circle.
    """
    if isinstance(source, str) and "\n" not in source and ":" not in source:
        source = Path(source)
    if isinstance(source, Path):
        source = source.read_text(encoding="utf-8")
    values = yaml.safe_load(source) if isinstance(source, str) else source
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a mapping of ROLL's keys, the path of a YAML file or YAML text, got {values!r:.80}")
    named = frozenset(name.split(".")[0] for name in _references(values))
    return {str(key): _resolved(value, values, ()) for key, value in values.items()}, named


def _references(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from REFERENCE.findall(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def _resolved(value: Any, values: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    """Return a value with the references in it put in; a reference that is a whole value keeps that value's type."""
    if isinstance(value, Mapping):
        return {key: _resolved(each, values, trail) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, values, trail) for each in value]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    if whole:
        return _looked_up(whole[1], values, trail)
    return REFERENCE.sub(lambda found: str(_looked_up(found[1], values, trail)), value)


def _looked_up(name: str, values: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    """Return what a reference names, or the reference itself where there is no such key."""
    if name in trail:
        raise ValueError(f"ROLL keys refer to each other in a circle: {' -> '.join((*trail, name))}")
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return f"${{{name}}}"
        found = found[part]
    return _resolved(found, values, (*trail, name))
