"""Results of a run: finalists, the best member, and their descriptions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.reporting.records import GenerationReport, TestReport
from evogrpo.reporting.step_records import Estimate, EvaluationCost, JournalFields
from evogrpo.text import count_text, duration_text, number_text, score_text


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """One of the best members, as it was after a generation.

    Attributes:
        index: Who it was.
        generation: When.
        chosen: What it earned when it was chosen: the best of many, so it is likely to be too high.
        second: What it earned on the second set.
    """

    index: int
    generation: int
    chosen: Estimate
    second: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        estimates = {"chosen": self.chosen.to_json(), "second": self.second.to_json()}
        return {"index": self.index, "generation": self.generation, **estimates}

    @classmethod
    def from_json(cls, fields: JournalFields) -> Self:
        """Read what `to_json` returned."""
        return cls(
            index=fields.whole("index"),
            generation=fields.whole("generation"),
            chosen=Estimate.from_json(fields.inner("chosen")),
            second=Estimate.from_json(fields.inner("second")),
        )


@dataclass(frozen=True, kw_only=True)
class FinalistsReport:
    """The finalists on the second set, and who is the run's best.

    Attributes:
        questions: How many the second set has.
        index: Whose state is the run's best.
        generation: As it was after which generation.
        finalists: All of them.
        measure: How the answers were given, "greedy" or "sampled".
        cost: What they took.
    """

    event: ClassVar[str] = "finalists"

    questions: int
    index: int
    generation: int
    finalists: tuple[Finalist, ...]
    measure: str
    cost: EvaluationCost

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        nested = {"finalists": [each.to_json() for each in self.finalists], "cost": self.cost.to_json()}
        return {**vars(self), **nested}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned; raises ValueError for a value that is not what it must be."""
        fields = JournalFields(values, "the finalists event")
        return cls(
            questions=fields.whole("questions"),
            index=fields.whole("index"),
            generation=fields.whole("generation"),
            finalists=tuple(Finalist.from_json(each) for each in fields.each("finalists", "a finalist")),
            measure=fields.text("measure"),
            cost=EvaluationCost.from_json(fields.inner("cost")),
        )


@dataclass(frozen=True, kw_only=True)
class BestMember:
    """The best member ever, as it was when it earned its fitness.

    Attributes:
        index: Who it was.
        generation: When.
        fitness: What it was chosen by.
        second: What it earned on the second set, which selection never saw; None where there is none.
        hyperparameters: What it trained with.
    """

    index: int
    generation: int
    fitness: Estimate
    second: Estimate | None
    hyperparameters: Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to, once it has ended.

    Attributes:
        reason: Why it ended, in words.
        complete: Whether its schedule was carried out to the end; otherwise it can be gone on with.
        generations: Generations evaluated.
        steps: Learning steps taken.
        timesteps: Steps in the environment that all members learnt from, evaluations left out; None for language
            models.
        tokens: Tokens (or transitions) processed by all members, evaluations left out.
        seconds: Wall-clock time, resumed parts included.
        evaluation: What all evaluations took, those of the untrained base and the test included.
        baseline: What the untrained base earned on the validation split; None if the run stopped before that.
        best: The best member ever; None before the first evaluation.
        test: The base and the best member on the test split, with the paired difference; None if there was no test.
        run_dir: Where the journal, the checkpoints and the best member (`best`) lie; None if nothing was recorded.
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
        best = "" if self.best is None else f", best=#{self.best.index} {number_text(self.best.fitness.mean)}"
        before, after = (None, None) if self.test is None else (self.test.before.mean, self.test.after.mean)
        test = "" if before is None else f", test: {number_text(before)} → {number_text(after)}"
        return f"Result({self.reason!r}, generations={self.generations}, steps={self.steps}{best}{test})"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The words of one kind of members.

    Attributes:
        untrained: What members are compared with.
        questions: What they start from.
        tokens: What their work is counted in, updates included.
        fitness: What their fitness is.
        best: What is kept of the best of them.
    """

    untrained: str
    questions: str
    tokens: str
    fitness: str
    best: str


LANGUAGE = Terms(
    untrained="untrained base",
    questions="questions",
    tokens="tokens",
    fitness="mean reward per validation question",
    best="best adapter",
)
NETWORKS = Terms(
    untrained="untrained network",
    questions="starts",
    tokens="transitions",
    fitness="mean return per validation start",
    best="best member",
)

TEAM = Terms(
    untrained="untrained team",
    questions="starts",
    tokens="transitions",
    fitness="mean score per validation start",
    best="best member",
)

TERMS: Mapping[str, Terms] = {"language": LANGUAGE, "networks": NETWORKS, "joint": TEAM}
"""By kind of members, as the run event of a journal names it."""


def terms_of(kind: object) -> Terms:
    """Return the words for a kind of members, as the run event of a journal names it; language models by default."""
    return TERMS.get(kind, LANGUAGE) if isinstance(kind, str) else LANGUAGE


def processed(report: GenerationReport, words: Terms) -> str:
    """Say what a run has spent so far: the steps in the environment, where there are any, and all work."""
    played = "" if report.timesteps is None else f"{count_text(report.timesteps)} steps played, "
    return f"{played}{count_text(report.tokens)} {words.tokens} processed"


def evaluated(result: Result, words: Terms) -> list[str]:
    """Say what all evaluations of a run took, beside what its members learnt from; nothing where none took any."""
    cost = result.evaluation
    if not cost.tokens:
        return []
    learnt = result.tokens if result.timesteps is None else result.timesteps
    what = words.tokens if result.timesteps is None else "steps"
    share = f", {cost.tokens / (cost.tokens + learnt):.0%} of all {what}" if learnt else ""
    return [f"evaluations took {duration_text(cost.seconds)} and {count_text(cost.tokens)} {what}{share}"]


def second_set_lines(result: Result, words: Terms) -> list[str]:
    """Say what the best member earned when it was chosen and on the second set; nothing where there was none."""
    best = result.best
    if best is None or best.second is None:
        return []
    chosen, second = (score_text(each.mean, each.standard_error) for each in (best.fitness, best.second))
    return [f"member #{best.index}: {chosen} when chosen, {second} on {words.questions} that selection never saw"]


def verdict(test: TestReport, words: Terms) -> str | None:
    """Say what a test that shows no difference means; None where it shows one."""
    if test.beyond_noise:
        return None
    return (
        f"No significant improvement over the {words.untrained}: the paired difference is less than two standard "
        f"errors. Train longer, or test on more {words.questions}."
    )
