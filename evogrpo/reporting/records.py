"""Records of a run that training yields and the journal stores: baseline, generations and test."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.evolution.fitness import ROLLOUTS, Fitness
from evogrpo.evolution.plan import Plan
from evogrpo.reporting.step_records import REMEDY, Estimate, EvaluationCost, Example, JournalFields, StepReport
from evogrpo.text import number_text, score_text


@dataclass(frozen=True, kw_only=True)
class BaselineReport:
    """Fitness of the untrained base before training.

    Attributes:
        questions: Validation questions; starts of the first step where fitness is measured by training rewards.
        fitness: Mean reward on them.
        measure: "greedy", "sampled" or "rollouts", as for members.
        cost: Cost of the evaluation.
    """

    event: ClassVar[str] = "baseline"

    questions: int
    fitness: Estimate
    measure: str
    cost: EvaluationCost

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "split": "train" if self.measure == ROLLOUTS else "validation",
            "questions": self.questions,
            **self.fitness.to_json(),
            "measure": self.measure,
            "cost": self.cost.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`; raises ValueError for an invalid value."""
        fields = JournalFields(values, "the baseline event")
        return cls(
            questions=fields.whole("questions"),
            fitness=Estimate.from_json(fields),
            measure=fields.text("measure"),
            cost=EvaluationCost.from_json(fields.inner("cost")),
        )


@dataclass(frozen=True, kw_only=True)
class MemberReport:
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
        metrics: Means over the generation's learning steps: loss, kl, grad_norm, reward, ...; None = not measured.
        measured: Estimates by measure: "greedy" and "sampled" on validation questions, "rollouts" for training
            rewards. One of them is `fitness`; empty if it failed.
        questions: Number of validation questions it was evaluated on.
        evaluation: Cost of its evaluation.
        scores: Fitness by measure, with the score of every question; empty in reports read from a journal.
    """

    generation: int
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
    metrics: Mapping[str, float | None]
    measured: Mapping[str, Estimate]
    questions: int
    evaluation: EvaluationCost
    scores: Mapping[str, Fitness] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        score = f"failed={self.failed!r}" if self.failed else f"fitness={score_text(self.fitness, self.standard_error)}"
        return f"MemberReport(index={self.index}, slot={self.slot}, generation={self.generation}, {score})"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without the generation."""
        values = {name: value for name, value in vars(self).items() if name != "generation"}
        values["hyperparameters"] = self.hyperparameters.to_json()
        values["changes"] = {name: list(change) for name, change in self.changes.items()}
        values["metrics"] = dict(self.metrics)
        values["measured"] = {name: estimate.to_json() for name, estimate in self.measured.items()}
        values["evaluation"] = self.evaluation.to_json()
        values["scores"] = {name: fitness.to_json() for name, fitness in self.scores.items()}
        return values

    @classmethod
    def from_json(cls, fields: JournalFields, generation: int) -> Self:
        """Read the result of `to_json`."""
        return cls(
            generation=generation,
            slot=fields.whole("slot"),
            index=fields.whole("index"),
            parent=fields.whole_or_none("parent"),
            born=fields.whole("born"),
            hyperparameters=fields.hyperparameters("hyperparameters"),
            fitness=fields.number_or_none("fitness"),
            standard_error=fields.number_or_none("standard_error"),
            failed=fields.text_or_none("failed"),
            tokens=fields.whole("tokens"),
            seconds=fields.number("seconds"),
            changes=fields.changes("changes"),
            reason=fields.text("reason"),
            metrics=fields.inner("metrics").numbers(),
            measured=Estimate.read_each(fields, "measured"),
            questions=fields.whole("questions"),
            evaluation=EvaluationCost.from_json(fields.inner("evaluation")),
        )


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """One generation: evaluated members and the evolution plan.

    Attributes:
        generation: Its number, from 1.
        step: Learning steps taken so far.
        members: One report per member, in slot order; empty slots are left out.
        best: The member with the highest fitness.
        plan: The evolution plan; None after the last generation, and in reports read from a journal.
        seconds: Wall-clock time of the run so far, including resumed parts.
        tokens: Tokens processed by all members so far, without evaluations.
        timesteps: Environment steps that members have trained on so far, without evaluations; None for language models.
        examples: One completion of each member, from the last learning step.
        questions: Largest number of questions (or starts) that a member was evaluated on.
        evaluation: Cost of all evaluations so far, including the untrained base.
        best_ever: (index, generation) of the run's best member so far; None before the first evaluation.
        samples_per_step: Samples per member and learning step.
        steps_per_generation: Learning steps that were planned for it; a limit of the run may have ended it earlier.
    """

    event: ClassVar[str] = "generation"

    generation: int
    step: int
    members: tuple[MemberReport, ...]
    best: MemberReport
    plan: Plan | None
    seconds: float
    tokens: int
    timesteps: int | None
    examples: tuple[Example, ...]
    questions: int
    evaluation: EvaluationCost
    best_ever: tuple[int, int] | None
    samples_per_step: int | None = None
    steps_per_generation: int | None = None

    def __repr__(self) -> str:
        scores = ", ".join(f"#{member.index} {number_text(member.fitness)}" for member in self.members)
        return f"GenerationReport(generation={self.generation}, step={self.step}, best=#{self.best.index} of {scores})"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "generation": self.generation,
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "timesteps": self.timesteps,
            "members": [member.to_json() for member in self.members],
            "best": self.best.index,
            "plan": None if self.plan is None else self.plan.to_json(),
            "examples": [example.to_json() for example in self.examples],
            "questions": self.questions,
            "evaluation": self.evaluation.to_json(),
            "best_ever": None if self.best_ever is None else list(self.best_ever),
            "samples_per_step": self.samples_per_step,
            "steps_per_generation": self.steps_per_generation,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`; raises ValueError for an invalid value."""
        number = JournalFields(values, "a generation event").whole("generation")
        where = f"generation {number}"
        fields = JournalFields(values, where)
        members = tuple(
            MemberReport.from_json(member, number) for member in fields.objects("members", f"a member of {where}")
        )
        best = fields.whole("best")
        chosen = [member for member in members if member.index == best]
        if not chosen:
            raise ValueError(f"'best' of {where} must be the index of one of its members, got {best}: {REMEDY}")
        return cls(
            generation=number,
            step=fields.whole("step"),
            members=members,
            best=chosen[0],
            plan=None,
            seconds=fields.number("seconds"),
            tokens=fields.whole("tokens"),
            timesteps=fields.whole_or_none("timesteps"),
            examples=tuple(Example.from_json(each) for each in fields.objects("examples", f"an example of {where}")),
            questions=fields.whole("questions"),
            evaluation=EvaluationCost.from_json(fields.inner("evaluation")),
            best_ever=fields.pair_or_none("best_ever"),
            samples_per_step=fields.whole_or_none("samples_per_step"),
            steps_per_generation=fields.whole_or_none("steps_per_generation"),
        )


@dataclass(frozen=True, kw_only=True)
class TestReport:
    """Test of the run's best member against the untrained base, on held-out questions.

    Attributes:
        questions: Number of test questions (or starts).
        index: Index of the tested member.
        before: Mean reward of the base.
        after: Mean reward of the member.
        gain: Mean of the paired differences, question by question, with its standard error.
        measure: "greedy" or "sampled".
        cost: Cost of the test.
        scores: Raw reward of the member per question, in the split's order, for paired comparison with other runs.
    """

    __test__ = False  # the name is not pytest's
    event: ClassVar[str] = "test"

    questions: int
    index: int
    before: Estimate
    after: Estimate
    gain: Estimate
    measure: str
    cost: EvaluationCost
    scores: tuple[float, ...]

    def __repr__(self) -> str:
        shown = f"questions={self.questions}, index={self.index}, before={self.before!r}, after={self.after!r}"
        return f"TestReport({shown}, gain={self.gain!r})"

    @property
    def beyond_noise(self) -> bool:
        """True if the gain exceeds two standard errors."""
        return abs(self.gain.mean) > 2 * self.gain.standard_error

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "split": "test",
            "questions": self.questions,
            "index": self.index,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "gain": self.gain.to_json(),
            "measure": self.measure,
            "cost": self.cost.to_json(),
            "scores": list(self.scores),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`; raises ValueError for an invalid value."""
        fields = JournalFields(values, "the test event")
        return cls(
            questions=fields.whole("questions"),
            index=fields.whole("index"),
            before=Estimate.from_json(fields.inner("before", "before of the test")),
            after=Estimate.from_json(fields.inner("after", "after of the test")),
            gain=Estimate.from_json(fields.inner("gain", "gain of the test")),
            measure=fields.text("measure"),
            cost=EvaluationCost.from_json(fields.inner("cost")),
            scores=fields.each_number("scores"),
        )


Report = StepReport | GenerationReport | TestReport
"""Reports that an active run yields."""
