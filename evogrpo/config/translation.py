"""Translation of another library's settings by a table, with parsers of their values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from evogrpo.synonyms import unknown_name_error
from evogrpo.text import shown
from evogrpo.validation import finite_number, whole_between, whole_number

Parse = Callable[[str, Any], Any]
"""Function of a setting's name, for messages, and its value. Returns the parsed value or raises
ValueError.
"""


@dataclass(frozen=True)
class Key:
    """One setting of another library.

    Attributes:
        default: The other library's default.
        parse: Check and conversion of the value.
        target: Field of `Imported` and name in it, such as "hyperparameters.lr"; empty if the
            reader computes it.
    """

    default: Any
    parse: Parse
    target: str = ""


@dataclass
class SettingsReader:
    """Settings of another library, parsed by a table.

    A refused setting is replaced by its default and listed in `refused`, so that one error can name
    all of them.

    Attributes:
        kind: Name of a setting in messages, such as "TRL field".
        given: Given values by name; None and the text "None", which YAML does not read as null, are
            left out.
        keys: Table of the settings that are translated.
        values: Parsed values by name, defaults included.
        ignored: Settings that change nothing here, by name, with the reason.
        refused: One sentence for each refused setting.
        arguments: Keyword arguments of the records, by field of
            `evogrpo.config.objective.Imported`.
    """

    kind: str
    given: dict[str, Any]
    keys: Mapping[str, Key]
    values: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given = {
            name: value
            for name, value in self.given.items()
            if value is not None and value != "None"
        }
        for name, key in self.keys.items():
            self.values[name] = None if key.default is None else key.parse(name, key.default)
            if name in self.given:
                try:
                    self.values[name] = key.parse(f"{self.kind} {name}", self.given[name])
                except ValueError as error:
                    self.refused.append(str(error))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def ignore(self, reason: str, *names: str) -> None:
        """List given settings in `ignored`, unless they have their default."""
        for name in names:
            if name in self.given and (
                name not in self.keys or self.given[name] != self.keys[name].default
            ):
                self.ignored[name] = reason

    def check_names(self, known: Iterable[str]) -> None:
        """Refuse given settings that are neither in the table nor in `known`."""
        names = [*self.keys, *known]
        for name in self.given:
            if name not in names:
                self.refused.append(str(unknown_name_error(self.kind, name, names)))

    def check_unsupported(self, unsupported: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Refuse settings whose effect is not implemented, unless their value has no effect."""
        for name, (neutral, reason) in unsupported.items():
            if name in self.given and self.given[name] not in neutral:
                self.refused.append(
                    f"{self.kind} {name} is not supported, got {shown(self.given[name])}: {reason}"
                )

    def translate(self, **computed: Mapping[str, Any]) -> Self:
        """Set `arguments` to all values with a target and to `computed`, by field of `Imported`.

        None is left out.
        """
        arguments: dict[str, dict[str, Any]] = {
            "objective": {},
            "hyperparameters": {},
            "optimizer": {},
            "settings": {},
        }
        for name, key in self.keys.items():
            if key.target:
                section, target = key.target.split(".")
                arguments[section][target] = self.values[name]
        for section, values in computed.items():
            arguments[section].update(values)
        self.arguments = {
            section: {name: value for name, value in values.items() if value is not None}
            for section, values in arguments.items()
        }
        return self


# ---- parsers


def number(what: str, value: Any) -> float:
    """Return a finite number; text is parsed, because YAML 1.1 reads 1e-6 as text."""
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return finite_number(what, value)


def count(what: str, value: Any) -> int:
    """Return an integer of at least 1."""
    return whole_between(what, value, 1)


def one_of(*choices: Any) -> Parse:
    """Return a parser that accepts these values."""

    def parse(what: str, value: Any) -> Any:
        if value not in choices:
            raise unknown_name_error(f"value of {what}:", value, map(str, choices))
        return value

    return parse


def unless(neutral: Sequence[Any], parse: Parse) -> Parse:
    """Return a parser that returns None for values without effect."""

    def parsed(what: str, value: Any) -> Any:
        result = parse(what, value)
        return None if result in neutral else result

    return parsed


top_k = unless((0, -1), whole_number)
top_p = unless((1.0,), number)
min_p = unless((0.0,), number)
repetition_penalty = unless((1.0,), number)
