"""ROLL's configuration files: YAML whose values may name other keys, as in `${response_length}`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evogrpo.bounded_yaml import bounded_yaml

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MOST_REFERENCES, LONGEST = 10_000, 100_000


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
    values = bounded_yaml(source, "the configuration of ROLL") if isinstance(source, str) else source
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a mapping of ROLL's keys, the path of a YAML file or YAML text, got {values!r:.80}")
    named = frozenset(name.split(".")[0] for name in _references(values))
    references = _References(values)
    return {str(key): references.resolved(value) for key, value in values.items()}, named


def _references(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from REFERENCE.findall(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


class _References:
    """Puts in what references name, a bounded number of times: they can name each other so that it doubles and doubles.

    Args:
        values: Of all keys.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._left = values, MOST_REFERENCES

    def resolved(self, value: Any, trail: tuple[str, ...] = ()) -> Any:
        """Return a value with the references in it put in; one that is a whole value keeps that value's type."""
        if isinstance(value, Mapping):
            return {key: self.resolved(each, trail) for key, each in value.items()}
        if isinstance(value, list):
            return [self.resolved(each, trail) for each in value]
        if not isinstance(value, str):
            return value
        whole = REFERENCE.fullmatch(value)
        if whole:
            return self._looked_up(whole[1], trail)
        text = REFERENCE.sub(lambda found: str(self._looked_up(found[1], trail)), value)
        if len(text) > max(len(value), LONGEST):
            raise ValueError(f"ROLL keys refer to each other so that a text has more than {LONGEST:,} characters")
        return text

    def _looked_up(self, name: str, trail: tuple[str, ...]) -> Any:
        """Return what a reference names, or the reference itself where there is no such key."""
        if name in trail:
            raise ValueError(f"ROLL keys refer to each other in a circle: {' -> '.join((*trail, name))}")
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"ROLL keys refer to each other more than {MOST_REFERENCES:,} times")
        found: Any = self._values
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return f"${{{name}}}"
            found = found[part]
        return self.resolved(found, (*trail, name))
