"""The records of a learning step: what each member made of it, and what one of its completions was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from evogrpo.history.checked_fields import JournalFields
from evogrpo.text import number_text, short_repr


@dataclass(frozen=True, kw_only=True)
class Example:
    """One completion, to look at; untrusted text.

    Attributes:
        prompt: The question, without what surrounds it in what the model read.
        completion: What it wrote.
        reward: What that earned in all; None where no reward applies.
        index: Who wrote it.
        step: In which learning step.
        rewards: What it earned from each reward function, before its weight; None where that does not apply.
        advantage: What was made of it: the mean over its actions; None where that is unknown.
        truncated: Whether it ran out of length.
        columns: What else its reward functions have logged of it; untrusted.
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
        """Read what `to_json` returned."""
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
        index: Who it is.
        metrics: What was measured and what it cost; None = not finite.
        samples: How many completions or episodes it learnt from.
        failed: Why the member must be replaced; None when all is well.
    """

    index: int
    metrics: Mapping[str, float | None]
    samples: int
    failed: str | None

    __repr__ = short_repr

    @property
    def reward(self) -> float | None:
        """Its mean reward."""
        return self.metrics.get("reward")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One learning step of all healthy members; of what it holds, the journal keeps the metrics.

    Attributes:
        step: Its number in the run, from 0.
        generation: The generation it belongs to, from 1.
        learned: What it did to each member, by slot.
        seconds: Its wall-clock time.
        tokens: Tokens processed by all members, updates included.
        examples: One completion of each member.
    """

    event: ClassVar[str] = "step"

    step: int
    generation: int
    learned: Mapping[int, MemberStep]
    seconds: float
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
            "members": [
                {"slot": slot, "index": member.index, **member.metrics} for slot, member in self.learned.items()
            ],
        }
