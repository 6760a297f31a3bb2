"""Summary of a run, read from its journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.evolution.history import MemberRecord
from evogrpo.evolution.plan import Plan
from evogrpo.reporting.records import (
    BaselineReport,
    Estimate,
    GenerationReport,
    StepRecord,
    Terms,
    TestReport,
    terms_of,
)
from evogrpo.storage.journal import JournalError, latest_generations, read_journal
from evogrpo.text import expand_user
from evogrpo.validation import Record, refuse_unknown, validate
from evogrpo.warnings import warn


def retired_members(generation: GenerationReport) -> dict[int, int]:
    """Return the index of every member that the plan of a generation retires, by slot."""
    vacant = () if generation.plan is None else generation.plan.vacant
    return {member.slot: member.index for member in generation.members if member.slot in vacant}


def changed_budgets(plan: Plan | None) -> list[str]:
    """Return the budgets that a plan changes, as text."""
    if plan is None:
        return []
    changed = {
        "samples per step": plan.samples_per_step,
        "steps per generation": plan.steps_per_generation,
    }
    return [f"{value} {name}" for name, value in changed.items() if value is not None]


METRICS: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "mean of the samples"),
    "kl": ("KL to the reference", "nats per action"),
    "entropy": ("entropy", "nats per action"),
    "completions/mean_length": ("length", "actions per sample"),
    "learning_rate": ("learning rate", "AdamW step size"),
}
"""Metrics shown for every learning step: name -> (title, unit)."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Content of a journal.

    Attributes:
        facts: Fields of the run event: version, seed, model, task and so on, with the schedule of
            the last resume; untrusted.
        evolvable: Search space of every evolving hyperparameter, by name.
        baseline: Fitness of the untrained base, or None if not evaluated yet.
        generations: In order; may be empty.
        births: Every member by index, without those of generations that were discarded on resume.
        steps: Learning steps in order.
        test: The test, or None.
        resumes: Number of times the run was resumed.
        stopped: Reason of its end, or None.
        changed_data: Changes of questions, rewards or environment that resuming accepted;
            untrusted.
    """

    facts: Mapping[str, Any]
    evolvable: Mapping[str, Mapping[str, Any]]
    baseline: BaselineReport | None
    generations: tuple[GenerationReport, ...]
    births: tuple[MemberRecord, ...]
    steps: tuple[StepRecord, ...]
    test: TestReport | None
    resumes: int
    stopped: str | None
    changed_data: tuple[str, ...] = ()

    @property
    def terms(self) -> Terms:
        """Terms of the kind of members of this run."""
        return terms_of(self.facts.get("kind"))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of `METRICS` that the learning steps have.

        The learning rate only if it was calibrated.
        """
        members = [member for step in self.steps for member in step.members]
        values = {
            name: {member.metrics.get(name) for member in members} - {None} for name in METRICS
        }
        if "lr" in self.evolvable or len(values["learning_rate"]) < 2:
            del values["learning_rate"]
        return tuple(name for name in values if values[name])

    @property
    def split(self) -> str:
        """Split that fitness is measured on: "validation" or "training"."""
        config = self.facts.get("fitness")  # untrusted
        if isinstance(config, Mapping) and config.get("by") == ROLLOUTS:
            return "training"
        return "validation"

    @property
    def start(self) -> Estimate | None:
        """Fitness that founders start from: that of the untrained base."""
        if self.baseline is None:
            return None
        return self.baseline.fitness

    @property
    def fitness_text(self) -> str:
        """Definition of fitness in this run."""
        return self.terms.fitness.replace("validation", self.split)

    @property
    def ending(self) -> str:
        """Reason of the run's end; untrusted."""
        return self.stopped or "not ended (active or killed)"

    @property
    def title(self) -> str:
        """Task and, if any, model; untrusted."""
        return (
            " · ".join(str(self.facts[name]) for name in ("task", "model") if self.facts.get(name))
            or "run"
        )


def read_summary(run_dir: str | Path) -> RunSummary:
    """Summarise a run from the journal in its directory; see `summarise`.

    The run may still be active.

    Raises:
        ValueError: If there is no journal, its start is missing, or a value is invalid.
    """
    path = expand_user(run_dir, "run_dir") / "journal.jsonl"
    events: Sequence[Mapping[str, Any]]
    try:
        events = read_journal(path)
    except JournalError as error:
        if not error.events:
            raise
        warn(f"The events of the journal from a damaged line on are left out: {error}")
        events = error.events
    if all(event["event"] != "run" for event in events):
        best = path.parent / "best"
        if best.is_dir():
            hint = f" GRPO.load({str(best)!r}) loads its best member."
        else:
            hint = ""
        raise ValueError(
            f"{path} does not contain the start of the run: it was stopped too early, or lines were"
            f" removed. Restore it from a copy, or start another run.{hint}"
        )
    try:
        return summarise(events)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def summarise(events: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Summarise a run from its journal.

    Args:
        events: Result of `read_journal` with the start of the run; untrusted input.

    Returns:
        The run, with its generations (see `latest_generations`).

    Raises:
        ValueError: If a value is invalid.
    """
    # 1. Read the start of the run.
    last = {event["event"]: event for event in events}  # the last event of each kind
    started = next(event for event in events if event["event"] == "run")
    run = validate(_RunRecord, started, "journal, run event")
    refuse_unknown(
        "hyperparameter in evolvable of the run event", run.evolvable, HYPERPARAMETER_NAMES
    )
    # 2. Find the events of the end. A test and an end count only if no training follows.
    names = [event["event"] for event in events]
    last_training = max(
        (n for n, name in enumerate(names) if name in ("step", "generation", "resumed")), default=-1
    )
    ending = {event["event"]: event for event in events[last_training + 1 :]}
    reasons = [event for event in ending.values() if event["event"] in ("stopped", "ended")]
    # 3. Read generations and learning steps.
    generations = tuple(map(GenerationReport.from_json, latest_generations(events)))
    steps = {
        step.step: step
        for event in events
        if event["event"] == "step"
        for step in [validate(StepRecord, event, "journal, step event")]
    }
    # 4. Read the test and the reason of the end.
    if "test" in ending:
        test = TestReport.from_json(ending["test"])
    else:
        test = None
    if reasons:
        stopped = validate(str, reasons[-1].get("reason"), "journal, reason of the end")
    else:
        stopped = None
    if stopped is None and test is not None:  # killed between the test and the last event
        stopped = "the test is done"
    resumed = [event for event in events if event["event"] == "resumed"]
    schedules = [event["schedule"] for event in (started, *resumed) if "schedule" in event]
    # 5. Collect the births. Members occur several times; the first record of each counts.
    # the founders; children are in the plans, and all members in generations
    births = list(run.lineage)
    for generation in generations:
        births += [member.record() for member in generation.members]
        births += () if generation.plan is None else generation.plan.children
    by_index = {birth.index: birth for birth in reversed(births)}
    return RunSummary(
        facts={
            name: schedules[-1] if name == "schedule" else value
            for name, value in started.items()
            if name != "event"
        },
        evolvable=run.evolvable,
        baseline=BaselineReport.from_json(last["baseline"]) if "baseline" in last else None,
        generations=generations,
        births=tuple(by_index[index] for index in sorted(by_index)),
        steps=tuple(steps[number] for number in sorted(steps)),
        test=test,
        resumes=len(resumed),
        stopped=stopped,
        changed_data=tuple(
            f"before step {event.get('step')}: {change}"
            for event in resumed
            for change in validate(
                tuple[str, ...], event.get("changed_data", []), "journal, changed_data"
            )
        ),
    )


class _RunRecord(Record):
    """Fields of the run event that all reports need."""

    evolvable: dict[str, dict[str, Any]]
    lineage: tuple[MemberRecord, ...] = ()
