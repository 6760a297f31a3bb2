"""Settings of other libraries: a reader that leaves no field unread, and what it reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from evogrpo.hyperparameters import finite_number, unknown_name_error, whole_number

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What foreign settings say in this package's words, as keyword arguments; nothing is dropped in silence.

    Attributes:
        objective: Of `Objective`.
        hyperparameters: Of `Hyperparameters`.
        optimizer: Of `Optimizer`.
        settings: What belongs elsewhere in a configuration, by name.
        ignored: Fields that were given and have no counterpart here, with the reason.
        refused: What cannot be honoured, one sentence each; the rest is then read as if it had been left out.
    """

    objective: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    ignored: Mapping[str, str]
    refused: tuple[str, ...] = ()


@dataclass
class Fields:
    """The fields of another library's settings: every one is read, refused or ignored with a reason.

    A refusal is noted and reading goes on with the default, so that all refusals are found at once.

    Attributes:
        kind: What a field is called in messages, such as "TRL field".
        values: By name; None counts as left out.
        defaults: What the other library takes for fields that are left out.
        ignored: Filled by `ignore`.
        refused: Filled by `refuse`.
    """

    kind: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    ignored: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def inside(self, kind: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> "Fields":
        """Return the fields of a section, which notes what it ignores and refuses in the same place."""
        return Fields(kind, values, defaults, self.ignored, self.refused)

    def refuse(self, reason: str) -> None:
        """Note in one sentence what cannot be honoured."""
        if reason not in self.refused:
            self.refused.append(reason)

    def check_names(self, *known: Iterable[str]) -> None:
        """Refuse unknown names, with the nearest known one."""
        names = [name for group in (self.defaults, *known) for name in group]
        for name in self.values:
            if name not in names:
                self.refuse(str(unknown_name_error(self.kind, name, names)))

    def given(self, name: str) -> bool:
        """Whether a field is there and not None, nor the text "None", which YAML does not take for null."""
        value = self.values.get(name)
        return value is not None and value != "None"

    def get(self, name: str) -> Any:
        """Return a field, or its default."""
        return self.values[name] if self.given(name) else self.defaults[name]

    def number(self, name: str) -> Any:
        """Return a finite number, or None where that is the default; text such as 1e-6 is read, as YAML gives it."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self.refuse(f"{self.kind} {name} must be a number, got {value!r}")
                value = self.defaults[name]
        return None if value is None else self._checked(name, value, finite_number)

    def numbers(self, name: str) -> list[float] | None:
        """Return a list of finite numbers, or None where that is the default."""
        values = self.get(name)
        if isinstance(values, Sequence) and not isinstance(values, str | bytes):
            return [self._checked(name, value, finite_number) for value in values]
        if values is not None:
            self.refuse(f"{self.kind} {name} must be a list of numbers, got {values!r:.80}")
        return None

    def whole(self, name: str) -> Any:
        """Return a whole number, or None where that is the default."""
        value = self.get(name)
        return None if value is None else self._checked(name, value, whole_number)

    def count(self, name: str) -> Any:
        """Return a whole number of at least 1, or None where that is the default."""
        number = self.whole(name)
        if number is not None and number < 1:
            self.refuse(f"{self.kind} {name} must be at least 1, got {number}")
            return self.defaults[name]
        return number

    def _checked(self, name: str, value: object, check: Callable[[str, object], T]) -> T | Any:
        try:
            return check(f"{self.kind} {name}", value)
        except ValueError as error:
            self.refuse(str(error))
            return self.defaults[name]

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        value = self.get(name)
        if not isinstance(value, bool):
            self.refuse(f"{self.kind} {name} must be true or false, got {value!r}")
            return bool(self.defaults[name])
        return value

    def choice(self, name: str, choices: Iterable[Any]) -> Any:
        """Return one of `choices`."""
        value = self.get(name)
        known = list(choices)
        if value not in known:
            self.refuse(str(unknown_name_error(f"value of {self.kind} {name}:", value, map(str, known))))
            return self.defaults[name]
        return value

    def refuse_unless(self, neutral: tuple[Any, ...], reason: str, *names: str) -> None:
        """Refuse fields that are given with another value than those that mean nothing."""
        for name in names:
            if self.given(name) and self.values[name] not in neutral:
                self.refuse(
                    f"{self.kind} {name} has no counterpart here, got {self.values[name]!r:.80}: {reason}; leave "
                    f"it out, or set it to {neutral[0]!r}"
                )

    def ignore(self, reason: str, *names: str) -> None:
        """Note fields that are given, differ from their default and do not matter here."""
        for name in names:
            if self.given(name) and self.values[name] != self.defaults.get(name, _UNKNOWN):
                self.ignored[name] = reason


_UNKNOWN = object()


def sampling_settings(
    *, top_k: int | None, top_p: float | None, min_p: float | None, repetition_penalty: float | None
) -> dict[str, Any]:
    """Return those of the sampling options that draw from anything but the whole distribution, in this package's words.

    Elsewhere -1 and 0 both stand for all tokens; None = not given.
    """
    given = {
        "top_k": (None if top_k == -1 else top_k, 0),
        "top_p": (top_p, 1.0),
        "min_p": (min_p, 0.0),
        "repetition_penalty": (repetition_penalty, 1.0),
    }
    return {name: value for name, (value, neutral) in given.items() if value is not None and value != neutral}
