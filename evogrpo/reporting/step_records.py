"""Records of learning steps, and validation of journal fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from evogrpo.config.hyperparameters import CATEGORIES, Hyperparameters, Value
from evogrpo.evolution.fitness import MEASURES
from evogrpo.evolution.history import NETWORK
from evogrpo.text import number_text, score_text, short_repr

REMEDY = "the journal was not written by evogrpo, or was changed"


@dataclass(frozen=True)
class JournalFields:
    """Typed access to the fields of one journal record; unknown fields are ignored.

    Attributes:
        values: Field values by name.
        where: Name of the record, for messages.

    Every method raises ValueError if a value is missing or of the wrong type.
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
        inner = JournalFields(
            {str(position): value for position, value in enumerate(values)}, f"{name} of {self.where}"
        )
        return tuple(inner.number(position) for position in inner.values)

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
        """Return a string; untrusted."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._error(name, "text")
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a string; None if it is null or missing."""
        return None if self.values.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        """Return True or False."""
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def inner(self, name: str, where: str | None = None) -> "JournalFields":
        """Return the fields of an object; `where` names it in messages, by default its own name."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self._error(name, "an object")
        return JournalFields(value, where or f"{name!r:.80} of {self.where}")

    def objects(self, name: str, where: str) -> "list[JournalFields]":
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
            return Hyperparameters.from_json({key: inner._value(key) for key in inner.values})
        except ValueError as error:
            raise ValueError(f"{inner.where}: {error}") from error

    def changes(self, name: str) -> dict[str, tuple[Value, Value]]:
        """Return the (old, new) values that changed at a birth, by name."""
        changes = {}
        for key, change in self.inner(name).values.items():
            if not isinstance(change, list) or len(change) != 2:
                raise ValueError(
                    f"the change of {key!r:.80} in {self.where} must be [old, new], got {change!r:.80}: {REMEDY}"
                )
            old, new = (JournalFields({key: value}, self.where)._value(key) for value in change)
            changes[key] = (old, new)
        return changes

    def _value(self, name: str) -> Value:
        """Return a finite number, None, or a string for a categorical hyperparameter or network."""
        value = self.values[name]
        return value if isinstance(value, str) and name in (*CATEGORIES, NETWORK) else self.number_or_none(name)

    def _error(self, name: str, what: str) -> ValueError:
        return ValueError(f"{name!r:.80} of {self.where} must be {what}, got {self.values.get(name)!r:.80}: {REMEDY}")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its standard error.

    Attributes:
        mean: Mean raw reward over questions or starts; higher is better.
        standard_error: Standard error of that mean, in reward units.
    """

    mean: float
    standard_error: float

    def __str__(self) -> str:
        return score_text(self.mean, self.standard_error)

    def __repr__(self) -> str:
        return f"Estimate({score_text(self.mean, self.standard_error)})"

    def to_json(self) -> dict[str, float]:
        """Return plain JSON values."""
        return {"fitness": self.mean, "standard_error": self.standard_error}

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read the result of `to_json`."""
        return cls(mean=fields.number("fitness"), standard_error=fields.number("standard_error"))

    @classmethod
    def read_each(cls, fields: JournalFields, name: str) -> dict[str, Self]:
        """Read the estimates of a field, by measure."""
        inner = fields.inner(name)
        return {measure: cls.from_json(inner.inner(measure)) for measure in MEASURES if measure in inner.values}


@dataclass(frozen=True, kw_only=True)
class EvaluationCost:
    """Cost of an evaluation.

    Attributes:
        tokens: Tokens read and sampled, or environment steps.
        seconds: Wall-clock time.
    """

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "EvaluationCost") -> "EvaluationCost":
        return EvaluationCost(tokens=self.tokens + other.tokens, seconds=self.seconds + other.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read the result of `to_json`."""
        return cls(tokens=fields.whole("tokens"), seconds=fields.number("seconds"))


@dataclass(frozen=True, kw_only=True)
class Example:
    """One completion with its prompt and reward; untrusted text.

    Attributes:
        prompt: The question, without its template.
        completion: The completion.
        reward: Total reward; None where no reward applies.
        index: Index of the member.
        step: Learning step.
        rewards: Unweighted reward of each reward function; None where it does not apply.
        advantage: Mean advantage over its actions; None if unknown.
        truncated: True if it reached the maximum length.
        columns: Further values that reward functions logged; untrusted.
    """

    prompt: str
    completion: str
    reward: float | None
    index: int
    step: int = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    truncated: bool = False

    __repr__ = short_repr
    columns: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "rewards": dict(self.rewards), "columns": dict(self.columns)}

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read the result of `to_json`."""
        return cls(
            prompt=fields.text("prompt"),
            completion=fields.text("completion"),
            reward=fields.number_or_none("reward"),
            index=fields.whole("index"),
            step=fields.whole("step"),
            rewards=fields.inner("rewards").numbers(),
            advantage=fields.number_or_none("advantage"),
            truncated=fields.flag("truncated"),
        )


@dataclass(frozen=True, kw_only=True)
class MemberStep:
    """One member in one learning step.

    Attributes:
        index: Index of the member.
        metrics: Measured values and costs by name; None = not finite.
        samples: Number of completions or episodes it trained on.
        failed: Reason of its failure, or None.
    """

    index: int
    metrics: Mapping[str, float | None]
    samples: int
    failed: str | None

    __repr__ = short_repr

    @property
    def reward(self) -> float | None:
        """Mean reward."""
        return self.metrics.get("reward")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One learning step of all healthy members; the journal stores its metrics.

    Attributes:
        step: Its number in the run, from 0.
        generation: The generation it belongs to, from 1.
        learned: Each member's step, by slot.
        seconds: Its wall-clock time.
        phases: Seconds of it by phase: "sampling", "scoring" (reward functions) and "learning".
        waiting: Seconds that each rank waited for others; empty for one process.
        tokens: Tokens processed by all members, including updates.
        examples: One completion of each member.
    """

    event: ClassVar[str] = "step"

    step: int
    generation: int
    learned: Mapping[int, MemberStep]
    seconds: float
    phases: Mapping[str, float]
    waiting: tuple[float, ...] = ()
    tokens: int
    examples: tuple[Example, ...] = ()

    def __repr__(self) -> str:
        rewards = ", ".join(f"#{member.index} {number_text(member.reward)}" for member in self.learned.values())
        return f"StepReport(step={self.step}, generation={self.generation}, rewards: {rewards})"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "step": self.step,
            "generation": self.generation,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "waiting": list(self.waiting),
            "tokens": self.tokens,
            "members": [
                {"slot": slot, "index": member.index, **member.metrics} for slot, member in self.learned.items()
            ],
        }
