"""The fields of a record that was read from a journal: untrusted input, so every value is checked for its type."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evogrpo.config.hyperparameters import CATEGORIES, Hyperparameters, Value
from evogrpo.evolution.lineage import NETWORK

REMEDY = "the journal was not written by evogrpo, or was changed"


@dataclass(frozen=True)
class JournalFields:
    """The fields of one record; those that nobody asks for are ignored, as later versions may add some.

    Attributes:
        values: By name.
        where: What the record is, for messages.

    Every method raises ValueError, naming field and record, if a value is missing or of the wrong type.
    """

    values: Mapping[str, Any]
    where: str

    def number(self, name: str) -> float:
        """Return a finite number."""
        value = self.values.get(name)
        # No run measures anything near 1e300; beyond it, integers and plots overflow.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
            raise self._error(name, "a finite number")
        return value

    def number_or_none(self, name: str) -> float | None:
        """Return a finite number; None if it is null or missing."""
        return None if self.values.get(name) is None else self.number(name)

    def each_number(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        values = self.values.get(name)
        if not isinstance(values, list):
            raise self._error(name, "a list of finite numbers")
        inner = JournalFields({str(place): value for place, value in enumerate(values)}, f"{name} of {self.where}")
        return tuple(inner.number(place) for place in inner.values)

    def numbers_or_none(self, name: str) -> tuple[float, ...] | None:
        """Return a list of finite numbers; None if it is null or missing."""
        return None if self.values.get(name) is None else self.each_number(name)

    def whole(self, name: str) -> int:
        """Return a whole number."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not abs(value) < 1e300:
            raise self._error(name, "a whole number")
        return value

    def whole_or_none(self, name: str) -> int | None:
        """Return a whole number; None if it is null or missing."""
        return None if self.values.get(name) is None else self.whole(name)

    def pair_or_none(self, name: str) -> tuple[int, int] | None:
        """Return two whole numbers; None if they are null or missing."""
        values = self.values.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != 2 or any(type(value) is not int for value in values):
            raise self._error(name, "two whole numbers")
        return values[0], values[1]

    def text(self, name: str) -> str:
        """Return a text; it is untrusted."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._error(name, "text")
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a text; None if it is null or missing."""
        return None if self.values.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        """Return True or False."""
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def inner(self, name: str, where: str | None = None) -> "JournalFields":
        """Return the fields of an object; `where` names it in messages if that is not its own name."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self._error(name, "an object")
        return JournalFields(value, where or f"{name!r:.80} of {self.where}")

    def each(self, name: str, where: str) -> "list[JournalFields]":
        """Return the fields of every object of a list."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self._error(name, "a list of objects")
        return [JournalFields(item, where) for item in value]

    def numbers(self) -> dict[str, float | None]:
        """Return all fields, each a finite number or None."""
        return {name: self.number_or_none(name) for name in self.values}

    def hyperparameters(self, name: str) -> Hyperparameters:
        """Return one member's hyperparameters."""
        inner = self.inner(name)
        try:
            return Hyperparameters.from_json({each: inner._value(each) for each in inner.values})
        except ValueError as error:
            raise ValueError(f"{inner.where}: {error}") from error

    def changes(self, name: str) -> dict[str, tuple[Value, Value]]:
        """Return what changed at a birth, by name: (old, new)."""
        changes = {}
        for each, change in self.inner(name).values.items():
            if not isinstance(change, list) or len(change) != 2:
                raise ValueError(
                    f"the change of {each!r:.80} in {self.where} must be [old, new], got {change!r:.80}: {REMEDY}"
                )
            old, new = (JournalFields({each: value}, self.where)._value(each) for value in change)
            changes[each] = (old, new)
        return changes

    def _value(self, name: str) -> Value:
        """Return a finite number, None, or a name where names are legal: also a network in words."""
        value = self.values[name]
        return value if isinstance(value, str) and name in (*CATEGORIES, NETWORK) else self.number_or_none(name)

    def _error(self, name: str, what: str) -> ValueError:
        return ValueError(f"{name!r:.80} of {self.where} must be {what}, got {self.values.get(name)!r:.80}: {REMEDY}")
