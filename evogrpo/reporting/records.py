"""Records of a run: reports, which the journal stores, result, and terms that describe them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import Changes, MemberRecord
from evogrpo.evolution.plan import Plan
from evogrpo.text import count_text, number_text, score_text, short_repr
from evogrpo.validation import Real, Record, Whole, dump, validate


class JournalRecord:
    """Base class of dataclasses in the journal; unknown fields are ignored when they are read."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dump(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from the result of `to_json`; raise ValueError for an invalid value."""
        return validate(cls, values, f"journal, {cls.__name__}")


# ---- measured values


@dataclass(frozen=True, kw_only=True)
class Estimate(JournalRecord):
    """A mean with its standard error.

    Attributes:
        mean: Mean raw reward over questions (or reset seeds); higher is better.
        standard_error: Standard error of that mean, in reward units.
    """

    mean: Annotated[Real, Field(alias="fitness")]
    standard_error: Real

    def __str__(self) -> str:
        return score_text(self.mean, self.standard_error)

    def __format__(self, spec: str) -> str:
        """Return the text; with "+" as the specification, positive means have a sign."""
        sign = "+" if spec == "+" and self.mean > 0 else ""
        return f"{sign}{self!s}"

    def __repr__(self) -> str:
        return f"Estimate({self})"


@dataclass(frozen=True, kw_only=True)
class EvaluationCost(JournalRecord):
    """Cost of an evaluation.

    Attributes:
        tokens: Tokens read and sampled, or environment steps.
        seconds: Wall-clock time.
    """

    tokens: Whole = 0
    seconds: Real = 0.0


@dataclass(frozen=True, kw_only=True)
class Example(JournalRecord):
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
        feedback: Reasons that reward functions gave beside their numbers; untrusted.
    """

    prompt: str
    completion: str
    reward: Real | None
    index: Whole
    step: Whole = 0
    rewards: Mapping[str, Real | None] = field(default_factory=dict)
    advantage: Real | None = None
    truncated: bool = False
    columns: Mapping[str, bool | Whole | Real | str | None] = field(default_factory=dict)
    feedback: Mapping[str, str] = field(default_factory=dict)

    __repr__ = short_repr


# ---- learning steps


@dataclass(frozen=True, kw_only=True)
class MemberStep:
    """One member in one learning step.

    Attributes:
        index: Index of the member.
        metrics: Measured values and costs by name; None = not finite.
        samples: Number of completions or episodes it trained on.
        failed: Reason of its failure, or None.
    """

    index: Whole
    metrics: Mapping[str, Real | None]
    samples: Whole
    failed: str | None

    __repr__ = short_repr

    @property
    def reward(self) -> float | None:
        """Mean reward."""
        return self.metrics.get("reward")


@dataclass(frozen=True, kw_only=True)
class StepReport(JournalRecord):
    """One learning step of all healthy members; the journal stores its metrics.

    Attributes:
        step: Its number in the run, from 0.
        generation: The generation it belongs to, from 1.
        learned: Each member's step, by slot.
        seconds: Its wall-clock time.
        phases: Seconds by phase: "sampling", "scoring" (reward functions) and "learning".
        waiting: Seconds that each rank waited for others; empty for one process.
        tokens: Tokens processed by all members, including updates.
        examples: Of each member, the best and the worst completion of a group whose rewards differ;
            one completion without such a group.
    """

    event: ClassVar[str] = "step"

    step: Whole
    generation: Whole
    learned: Mapping[Whole, MemberStep]
    seconds: Real
    phases: Mapping[str, Real]
    waiting: tuple[Real, ...] = ()
    tokens: Whole
    examples: tuple[Example, ...] = ()

    def __repr__(self) -> str:
        rewards = ", ".join(
            f"#{member.index} {number_text(member.reward)}" for member in self.learned.values()
        )
        return f"StepReport(step={self.step}, generation={self.generation}, rewards: {rewards})"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without completions; see `StepRecord`."""
        # Metrics are written beside slot and index, so that a line of the journal stays short.
        members = [
            {"slot": slot, "index": each.index, **each.metrics}
            for slot, each in self.learned.items()
        ]
        names = ("step", "generation", "seconds", "phases", "waiting", "tokens")
        return {**{name: getattr(self, name) for name in names}, "members": members}


class StepMember(Record):
    """A member in a learning step of the journal; all other fields are its metrics."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Real | None]

    slot: Whole
    index: Whole

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Metrics by name."""
        return self.__pydantic_extra__


class StepRecord(Record):
    """A learning step as the journal stores it; see `StepReport`."""

    step: Whole
    generation: Whole
    seconds: Real
    phases: dict[str, Real | None]
    waiting: tuple[Real, ...]
    members: tuple[StepMember, ...]


# ---- generations


@dataclass(frozen=True, kw_only=True)
class BaselineReport(JournalRecord):
    """Fitness of the untrained base before training.

    Attributes:
        questions: Number of validation questions, or of starts of the first step if fitness is the
            training rewards.
        fitness: Mean reward on them.
        measure: "greedy", "sampled" or "rollouts", as for members.
        cost: Cost of the evaluation.
    """

    event: ClassVar[str] = "baseline"

    questions: Whole
    fitness: Estimate
    measure: str
    cost: EvaluationCost

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        # The estimate's two fields stand beside those of the event.
        return {**super().to_json(), **self.fitness.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from the result of `to_json`; raise ValueError for an invalid value."""
        # `to_json` merges the fields of the estimate.
        return super().from_json({**values, "fitness": values})


@dataclass(frozen=True, kw_only=True)
class MemberReport(JournalRecord):
    """One member at the end of a generation.

    Attributes:
        generation: Number of the generation.
        slot: Slot of the member.
        index: Index of the member.
        parent: Index of its parent; None for a founder.
        born: Generation of its birth.
        hyperparameters: Its hyperparameters.
        fitness: Mean raw reward per question that selection uses; None if it failed.
        standard_error: Standard error of that mean, over questions.
        failed: Reason of its failure, or None.
        tokens: Tokens processed in this generation, including updates.
        seconds: Its share of the generation's time, by tokens.
        changes: (old, new) of every hyperparameter that changed at its birth, by name.
        reason: Reason of its birth.
        metrics: Means over the generation's learning steps: loss, kl, grad_norm, reward, ...; None
            = not measured.
        measured: Estimates by measure: "greedy" and "sampled" on validation questions, "rollouts"
            for training rewards. One of them is `fitness`; empty if it failed.
        questions: Number of validation questions it was evaluated on.
        evaluation: Cost of its evaluation.
        scores: Fitness by measure, with the score of every question.
    """

    generation: Whole
    slot: Whole
    index: Whole
    parent: Whole | None
    born: Whole
    hyperparameters: Hyperparameters
    fitness: Real | None
    standard_error: Real | None
    failed: str | None
    tokens: Whole
    seconds: Real
    changes: Changes
    reason: str
    metrics: Mapping[str, Real | None]
    measured: Mapping[str, Estimate]
    questions: Whole
    evaluation: EvaluationCost
    scores: Mapping[str, Fitness] = field(default_factory=dict, compare=False)

    @property
    def estimate(self) -> Estimate | None:
        """Fitness with its standard error; None if the member failed."""
        if self.fitness is None or self.standard_error is None:
            return None
        return Estimate(mean=self.fitness, standard_error=self.standard_error)

    def record(self) -> MemberRecord:
        """Return the member as strategies see it."""
        # The journal has architectures in births only.
        names = [each.name for each in fields(MemberRecord) if each.name != "architecture"]
        return MemberRecord(**{name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        score = f"fitness={self.estimate}"
        if self.failed:
            score = f"failed={self.failed!r}"
        return (
            f"MemberReport(index={self.index}, slot={self.slot}, generation={self.generation},"
            f" {score})"
        )


@dataclass(frozen=True, kw_only=True)
class GenerationReport(JournalRecord):
    """One generation: evaluated members and the evolution plan.

    Attributes:
        generation: Its number, from 1.
        step: Learning steps taken so far.
        members: One report per member, in slot order; empty slots are left out.
        best_index: Index of the member with the highest fitness.
        plan: The evolution plan; None after the last generation.
        seconds: Wall-clock time of the run so far, including resumed parts.
        tokens: Tokens processed by all members so far, without evaluations.
        timesteps: Environment steps that members have trained on so far, without evaluations; None
            for language models.
        examples: Completions of each member in the last learning step, as in `StepReport`.
        questions: Largest number of questions (or starts) that a member was evaluated on.
        evaluation: Cost of all evaluations so far, including the untrained base.
        best_ever: (index, generation) of the run's best member so far; None before the first
            evaluation.
        samples_per_step: Samples per member and learning step.
        steps_per_generation: Learning steps that were planned for it; a limit of the run may have
            ended it earlier.
    """

    event: ClassVar[str] = "generation"

    generation: Whole
    step: Whole
    members: tuple[MemberReport, ...]
    best_index: Whole
    plan: Plan | None
    seconds: Real
    tokens: Whole
    timesteps: Whole | None
    examples: tuple[Example, ...]
    questions: Whole
    evaluation: EvaluationCost
    best_ever: tuple[Whole, Whole] | None
    samples_per_step: Whole | None = None
    steps_per_generation: Whole | None = None

    def __post_init__(self) -> None:
        if all(member.index != self.best_index for member in self.members):
            raise ValueError(
                f"best_index must be the index of one of the members, got {self.best_index}."
            )

    @property
    def best(self) -> MemberReport:
        """The member with the highest fitness."""
        return next(member for member in self.members if member.index == self.best_index)

    @property
    def retired(self) -> dict[int, int]:
        """Index of every member that the plan retires, by slot."""
        if self.plan is None:
            return {}
        vacant = self.plan.vacant
        return {member.slot: member.index for member in self.members if member.slot in vacant}

    @property
    def new_budgets(self) -> list[str]:
        """Budgets that the plan changes, as text."""
        if self.plan is None:
            return []
        budgets = {
            "samples per step": self.plan.samples_per_step,
            "steps per generation": self.plan.steps_per_generation,
        }
        return [f"{value} {name}" for name, value in budgets.items() if value is not None]

    def __repr__(self) -> str:
        scores = ", ".join(
            f"#{member.index} {number_text(member.fitness)}" for member in self.members
        )
        return (
            f"GenerationReport(generation={self.generation}, step={self.step},"
            f" best=#{self.best_index} of {scores})"
        )


# ---- test and result


@dataclass(frozen=True, kw_only=True)
class TestReport(JournalRecord):
    """Test of the run's best member against the untrained base, on held-out questions.

    Attributes:
        questions: Number of test questions (or starts).
        index: Index of the tested member.
        before: Mean reward of the base.
        after: Mean reward of the member.
        gain: Mean of the paired differences, question by question, with its standard error.
        measure: "greedy" or "sampled".
        cost: Cost of the test.
        scores: Raw reward of the member per question, in the split's order, for paired comparison
            with other runs.
    """

    # Pytest must not collect it.
    __test__ = False
    event: ClassVar[str] = "test"

    questions: Whole
    index: Whole
    before: Estimate
    after: Estimate
    gain: Estimate
    measure: str
    cost: EvaluationCost
    scores: tuple[Real, ...]

    def __repr__(self) -> str:
        shown = (
            f"questions={self.questions}, index={self.index}, before={self.before!r},"
            f" after={self.after!r}"
        )
        return f"TestReport({shown}, gain={self.gain!r})"

    @property
    def beyond_noise(self) -> bool:
        """True if the gain exceeds two standard errors."""
        return abs(self.gain.mean) > 2 * self.gain.standard_error


@dataclass(frozen=True, kw_only=True)
class BestMember:
    """Best member of a run, with the state that reached its fitness.

    Attributes:
        index: Index of the member.
        generation: Generation of its state.
        fitness: Fitness that it was selected by.
        hyperparameters: Its hyperparameters.
    """

    index: int
    generation: int
    fitness: Estimate
    hyperparameters: Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run that has ended.

    Attributes:
        reason: Reason of its end.
        complete: True if its schedule is finished; otherwise it can be resumed.
        generations: Generations evaluated.
        steps: Learning steps taken.
        timesteps: Environment steps that all members trained on, without evaluations; None for
            language models.
        tokens: Tokens (or actions) processed by all members, without evaluations.
        seconds: Wall-clock time, including resumed parts.
        evaluation: Cost of all evaluations, including the untrained base and the test.
        baseline: Fitness of the untrained base on the validation split; None if the run stopped
            before.
        best: The best member; None before the first evaluation.
        test: Base and best member on the test split, with the paired difference; None if there was
            no test.
        run_dir: Folder of the journal, the checkpoints and the best member (`best`); None if
            nothing was recorded.
    """

    reason: str
    complete: bool
    generations: int
    steps: int
    timesteps: int | None
    tokens: int
    seconds: float
    evaluation: EvaluationCost
    baseline: Estimate | None
    best: BestMember | None
    test: TestReport | None
    run_dir: Path | None

    def __repr__(self) -> str:
        shown = f"{self.reason!r}, generations={self.generations}, steps={self.steps}"
        if self.best is not None:
            shown += f", best=#{self.best.index} {number_text(self.best.fitness.mean)}"
        if self.test is not None:
            before = number_text(self.test.before.mean)
            after = number_text(self.test.after.mean)
            shown += f", test: {before} → {after}"
        return f"Result({shown})"


# ---- terms


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms of one kind of members, for texts.

    Attributes:
        untrained: The baseline.
        questions: Units of evaluation.
        samples: Units of training.
        tokens: Units of work, including updates.
        fitness: Definition of fitness.
    """

    untrained: str
    questions: str
    samples: str
    tokens: str
    fitness: str


LANGUAGE = Terms(
    untrained="untrained base",
    questions="questions",
    samples="completions",
    tokens="tokens",
    fitness="mean reward per validation question",
)
NETWORKS = Terms(
    untrained="untrained network",
    questions="starts",
    samples="episodes",
    tokens="actions",
    fitness="mean return per validation start",
)
TEAM = replace(NETWORKS, untrained="untrained team", fitness="mean score per validation start")
TERMS: Mapping[str, Terms] = {"language": LANGUAGE, "networks": NETWORKS, "joint": TEAM}
"""Terms by kind of members, the `kind` of a journal's run event."""


def terms_of(kind: object) -> Terms:
    """Return the terms of a kind of members; for an unknown kind, those of language models."""
    return TERMS.get(str(kind), LANGUAGE)


def processed(report: GenerationReport, terms: Terms) -> str:
    """Describe the work of a run so far: environment steps, if members take any, and tokens."""
    done = f"{count_text(report.tokens)} {terms.tokens} processed"
    if report.timesteps is None:
        return done
    return f"{count_text(report.timesteps)} environment steps, {done}"


def verdict(test: TestReport, terms: Terms) -> str | None:
    """Return a warning if a test shows no significant difference, else None."""
    if test.beyond_noise:
        return None
    return (
        f"No significant difference from the {terms.untrained} (less than two standard errors)."
        f" Train longer or use more test {terms.questions}."
    )


Report = StepReport | GenerationReport | TestReport
"""Reports that an active run yields."""
