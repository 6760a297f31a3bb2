"""What a run came to."""

from dataclasses import dataclass
from pathlib import Path

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.history.estimates import Estimate, EvaluationCost
from evogrpo.history.records import TestReport
from evogrpo.markup import card
from evogrpo.text import duration_text, number_text


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

    def _repr_html_(self) -> str:
        rows = [] if self.baseline is None else [("validation, untrained", self.baseline)]
        if self.best is not None:
            rows.append((f"validation, member #{self.best.index}", self.best.fitness))
        if self.test is not None:
            rows += [(f"test, {name}", estimate) for name, estimate in self.test.estimates.items()]
        facts = (f"{self.generations} generations", duration_text(self.seconds), f"finished: {self.reason}")
        return card("Result", facts, ("", "mean ± SE"), rows)

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best=#{self.best.index} {number_text(self.best.fitness.mean)}"
        before, after = (None, None) if self.test is None else (self.test.before.mean, self.test.after.mean)
        test = "" if before is None else f", test: {number_text(before)} → {number_text(after)}"
        return f"Result({self.reason!r}, generations={self.generations}, steps={self.steps}{best}{test})"
