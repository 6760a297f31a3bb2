"""The best member of a run: what it earned, what it learnt with, what the test says, and where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evogrpo.evolution.strategies import ScheduleStage
from evogrpo.history.descent import standing_of
from evogrpo.history.estimates import Estimate
from evogrpo.history.records import MemberReport, TestReport
from evogrpo.history.schedules import found_schedule
from evogrpo.persistence.journal import read_journal
from evogrpo.reporting.summary import RunSummary, summarise

CONFIDENT = 1.96
"""Standard errors on either side of a mean that hold the true one in 95 of 100 cases, if errors are normal."""


@dataclass(frozen=True, kw_only=True)
class WinnerReport:
    """The best member.

    Attributes:
        summary: The run.
        member: The best member, as it was when it earned its fitness.
        stages: What its line of descent learnt with.
        stored: Where it lies; None where the folder is not there.
    """

    summary: RunSummary
    member: MemberReport
    stages: Sequence[ScheduleStage]
    stored: Path | None

    @property
    def standing(self) -> Estimate | None:
        """What it won by."""
        return standing_of(self.member)

    @property
    def test(self) -> TestReport | None:
        """What the test says of it; None if the run has not reached it."""
        return self.summary.test

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        member, facts = self.member, self.summary.facts
        return {
            **{name: facts[name] for name in ("run_id", "task", "model", "seed") if name in facts},
            "member": member.index,
            "generation": member.generation,
            "fitness": None if self.standing is None else self.standing.mean,
            "standard_error": None if self.standing is None else self.standing.standard_error,
            "measured": {name: each.to_json() for name, each in member.measured.items()},
            "hyperparameters": member.hyperparameters.to_json(),
            "schedule": [stage.to_json() for stage in self.stages],
            "test": None if self.test is None else told_test(self.test),
            "stopped": self.summary.stopped,
            "stored": None if self.stored is None else str(self.stored),
        }


def read_winner(run_dir: Path) -> WinnerReport:
    """Read who won a run from its journal.

    Raises:
        ValueError: If there is no run, no member was evaluated, or a value is not what it must be.
    """
    events = read_journal(run_dir / "journal.jsonl")
    summary, found = summarise(events), found_schedule(events)
    stored = run_dir / "best"
    return WinnerReport(
        summary=summary, member=found.member, stages=found.stages, stored=stored if stored.is_dir() else None
    )


def interval(estimate: Estimate) -> tuple[float, float]:
    """Return the bounds of a mean's interval of 95 %."""
    half = CONFIDENT * estimate.standard_error
    return estimate.mean - half, estimate.mean + half


def told_test(test: TestReport) -> dict[str, Any]:
    """Return a test as plain JSON values: without single scores, with intervals of 95 %."""
    parts = {"untrained": test.before, "member": test.after, "gain": test.gain}
    return {
        "questions": test.questions,
        "measure": test.measure,
        "beyond_noise": test.beyond_noise,
        **{name: {**each.to_json(), "interval": list(interval(each))} for name, each in parts.items()},
    }
