"""Result of a run: finalists, the best member, and the terms that describe them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.reporting.records import Estimate, EvaluationCost, GenerationReport, TestReport
from evogrpo.text import count_text, duration_text, number_text, score_text


@dataclass(frozen=True, kw_only=True)
class BestMember:
    """Best member of a run, with the state that reached its fitness.

    Attributes:
        index: Index of the member.
        generation: Generation of its state.
        fitness: Fitness that it was selected by.
        second: Fitness on the second set, which selection does not use; None where there is none.
        hyperparameters: Its hyperparameters.
    """

    index: int
    generation: int
    fitness: Estimate
    second: Estimate | None
    hyperparameters: Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run that has ended.

    Attributes:
        reason: Reason of its end.
        complete: True if its schedule is finished; otherwise it can be resumed.
        generations: Generations evaluated.
        steps: Learning steps taken.
        timesteps: Environment steps that all members trained on, without evaluations; None for language models.
        tokens: Tokens (or transitions) processed by all members, without evaluations.
        seconds: Wall-clock time, including resumed parts.
        evaluation: Cost of all evaluations, including the untrained base and the test.
        baseline: Fitness of the untrained base on the validation split; None if the run stopped before.
        best: The best member; None before the first evaluation.
        test: Base and best member on the test split, with the paired difference; None if there was no test.
        run_dir: Folder of the journal, the checkpoints and the best member (`best`); None if nothing was recorded.
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
    """Terms that texts use for one kind of members.

    Attributes:
        untrained: The baseline.
        questions: Units of evaluation.
        tokens: Units of work, including updates.
        fitness: Definition of fitness.
        best: The exported best member.
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
"""Terms by kind of members, the `kind` of a journal's run event."""


def terms_of(kind: object) -> Terms:
    """Return the terms of a kind of members; those of language models for unknown kinds."""
    return TERMS.get(kind, LANGUAGE) if isinstance(kind, str) else LANGUAGE


def processed(report: GenerationReport, terms: Terms) -> str:
    """Describe the work of a run so far: environment steps, where there are any, and tokens."""
    played = "" if report.timesteps is None else f"{count_text(report.timesteps)} environment steps, "
    return f"{played}{count_text(report.tokens)} {terms.tokens} processed"


def evaluated(result: Result, terms: Terms) -> list[str]:
    """Describe the cost of all evaluations and their share of the work; empty without evaluations."""
    cost = result.evaluation
    if not cost.tokens:
        return []
    learnt = result.tokens if result.timesteps is None else result.timesteps
    what = terms.tokens if result.timesteps is None else "steps"
    share = f", {cost.tokens / (cost.tokens + learnt):.0%} of all {what}" if learnt else ""
    return [f"evaluations took {duration_text(cost.seconds)} and {count_text(cost.tokens)} {what}{share}"]


def second_set_lines(result: Result, terms: Terms) -> list[str]:
    """Describe the best member's fitness when selected and on the second set; empty without one."""
    best = result.best
    if best is None or best.second is None:
        return []
    chosen, second = (score_text(each.mean, each.standard_error) for each in (best.fitness, best.second))
    return [f"member #{best.index}: {chosen} when selected, {second} on unseen {terms.questions}"]


def verdict(test: TestReport, terms: Terms) -> str | None:
    """Return a warning if a test shows no significant difference, else None."""
    if test.beyond_noise:
        return None
    return (
        f"No significant improvement over the {terms.untrained}: the paired difference is less than two standard "
        f"errors. Train longer, or test on more {terms.questions}."
    )
