"""The frozen reports of a run: one per learning step, one per generation, one test at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evogrpo.evolution.plans import Plan
from evogrpo.hyperparameters import Hyperparameters, Value
from evogrpo.records import LearnReport


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
    """

    prompt: str
    completion: str
    reward: float | None
    index: int
    step: int = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One learning step of all healthy members.

    Attributes:
        step: Its number in the run, from 0.
        generation: The generation it belongs to, from 1.
        learned: What it did to each member, by slot.
        indices: Who lives in each slot.
        seconds: Its wall-clock time.
        tokens: Tokens processed by all members, updates included.
        examples: One completion of each member.
    """

    step: int
    generation: int
    learned: Mapping[int, LearnReport]
    indices: Mapping[int, int]
    seconds: float
    tokens: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """One member at the end of a generation.

    Attributes:
        slot: Where it lives.
        index: Who it is.
        parent: Whom it was cloned from; None for a founder.
        born: Generation of its birth.
        hyperparameters: What it trained with.
        fitness: Mean raw reward on the validation questions; None when it failed.
        standard_error: Of that mean, over questions.
        failed: Why it failed; None when all is well.
        tokens: Tokens it processed in this generation, updates included.
        seconds: Its share of the generation's time, by tokens.
        changes: How it differed from its parent at birth, by name: (old, new).
        reason: Why it was born.
        metrics: Means over the generation's learning steps: loss, kl, grad_norm, reward, ...; None = not measured.
    """

    slot: int
    index: int
    parent: int | None
    born: int
    hyperparameters: Hyperparameters
    fitness: float | None
    standard_error: float | None
    failed: str | None
    tokens: int
    seconds: float
    changes: Mapping[str, tuple[Value, Value]]
    reason: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["hyperparameters"] = self.hyperparameters.to_json()
        values["changes"] = {name: list(change) for name, change in self.changes.items()}
        values["metrics"] = dict(self.metrics)
        return values


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """One generation: the members as they were evaluated, and what evolution decided.

    Attributes:
        generation: Its number, from 1.
        step: Learning steps taken so far.
        members: One report per member, in slot order; a slot that holds nobody has none.
        best: The member with the highest fitness.
        plan: What happens next; None after the last generation.
        seconds: Wall-clock time of the run so far, resumed parts included.
        tokens: Tokens processed by all members so far, evaluations left out.
        examples: One completion of each member, from the last learning step.
    """

    generation: int
    step: int
    members: tuple[MemberReport, ...]
    best: MemberReport
    plan: Plan | None
    seconds: float
    tokens: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TestReport:
    """The best member ever against the untrained base, on questions that neither training nor selection saw.

    Attributes:
        questions: How many.
        index: Who was tested.
        generation: When it earned its fitness.
        before: Mean reward of the base, and its standard error.
        after: Mean reward of the member, and its standard error.
    """

    __test__ = False  # the name is not pytest's

    questions: int
    index: int
    generation: int
    before: tuple[float, float]
    after: tuple[float, float]
