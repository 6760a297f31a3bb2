"""The story of a run, read from its journal: the records that count, in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.checks import refuse_unknown
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.history.checked_fields import REMEDY, JournalFields
from evogrpo.history.estimates import Estimate
from evogrpo.history.finals import FinalsReport
from evogrpo.history.records import BaselineReport, GenerationReport, TestReport
from evogrpo.history.words import Words, words_of
from evogrpo.persistence.journal import latest_generations
from evogrpo.reporting.costs import Cost, run_costs
from evogrpo.reporting.decisions import Decision, read_decisions
from evogrpo.reporting.steps import Curve, read_curves


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a journal tells.

    Attributes:
        facts: The fields of the run event: version, seed, model, task and so on, unchecked.
        evolvable: The fields of every evolvable hyperparameter's range or ladder, by name.
        baseline: The untrained base on the validation questions, or None if not measured yet.
        generations: In order; may be empty.
        test: Or None if the run has not reached it.
        resumes: How often the run was resumed.
        stopped: Why the run stopped, or None if it did not say.
        changed_data: How questions, rewards or environment differed where it was resumed all the same; untrusted.
        curves: What learning steps measured, by the metric's name.
        decisions: The plans, oldest first.
        costs: What the kinds of work took.
        finals: The finalists on a second set of questions; None if the run has none, or has not reached them.
    """

    facts: Mapping[str, Any]
    evolvable: Mapping[str, Mapping[str, Any]]
    baseline: BaselineReport | None
    generations: tuple[GenerationReport, ...]
    test: TestReport | None
    resumes: int
    stopped: str | None
    changed_data: tuple[str, ...] = ()
    curves: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    costs: tuple[Cost, ...] = ()
    finals: FinalsReport | None = None

    @property
    def words(self) -> Words:
        """What things are called in it."""
        return words_of(self.facts.get("kind"))

    @property
    def split(self) -> str:
        """On what fitness is measured: validation, or training where it is that of the samples learnt from."""
        return "training" if self._by in (ROLLOUTS, "both") else "validation"

    @property
    def baseline_split(self) -> str:
        """On what the untrained base is measured."""
        return "training" if self._by == ROLLOUTS else "validation"

    @property
    def start(self) -> Estimate | None:
        """Where founders begin: what the untrained base earned, where that is measured as their fitness is."""
        return self.baseline.fitness if self.baseline is not None and self.split == self.baseline_split else None

    @property
    def _by(self) -> object:
        measured = self.facts.get("fitness")
        return measured.get("by") if isinstance(measured, Mapping) else None

    @property
    def fitness_words(self) -> str:
        """What fitness is."""
        return self.words.fitness.replace("validation", self.split)

    @property
    def ending(self) -> str:
        """How the run ended, in words; untrusted."""
        return self.stopped or "not yet, or its process ended without a word, as when it is killed"

    @property
    def title(self) -> str:
        """The task and, where there is one, the model; untrusted."""
        return " · ".join(str(self.facts[name]) for name in ("task", "model") if self.facts.get(name)) or "run"


def summarise(events: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Read the story of a run out of its journal.

    Args:
        events: What `read_journal` returned; untrusted input.

    Returns:
        The run, with the generations that count (see `latest_generations`).

    Raises:
        ValueError: If the run event is missing, or a value is not what it must be.
    """
    last = {event["event"]: event for event in events}
    runs = [event for event in events if event["event"] == "run"]
    if not runs:
        raise ValueError(
            "The journal has no run event, so there is nothing to report. If RUN_DIR/checkpoints is not empty, "
            "`evogrpo resume RUN_DIR` goes on, and GRPO.load('RUN_DIR/best') loads the best member."
        )
    evolvable = JournalFields(runs[0], "the run event").inner("evolvable")
    refuse_unknown("hyperparameter in evolvable of the run event", evolvable.values, HYPERPARAMETER_NAMES)
    resumed_last = max((place for place, event in enumerate(events) if event["event"] == "resumed"), default=-1)
    # What a run said before it was resumed about its end no longer holds.
    ending = {event["event"]: event for event in events[resumed_last + 1 :]}
    baseline = BaselineReport.from_json(last["baseline"]) if "baseline" in last else None
    generations = tuple(GenerationReport.from_json(event) for event in latest_generations(events))
    finals = FinalsReport.from_json(ending["finals"]) if "finals" in ending else None
    test = TestReport.from_json(ending["test"]) if "test" in ending else None
    stopped = JournalFields(ending["stopped"], "the stopped event").text("reason") if "stopped" in ending else None
    if stopped is None and test is not None:  # killed between the test and the last event
        stopped = "the test is done"
    return RunSummary(
        facts={name: value for name, value in runs[0].items() if name != "event"},
        evolvable={name: evolvable.inner(name).values for name in evolvable.values},
        baseline=baseline,
        generations=generations,
        test=test,
        resumes=sum(event["event"] == "resumed" for event in events),
        stopped=stopped,
        changed_data=tuple(_changed_data(events)),
        curves=read_curves(events),
        decisions=read_decisions(events),
        costs=run_costs(events, generations, finals, test),
        finals=finals,
    )


def _changed_data(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for event in events:
        if event["event"] == "resumed" and "changed_data" in event:
            changes = event["changed_data"]
            if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
                raise ValueError(
                    f"changed_data of a resumed event must be a list of texts, got {changes!r:.80}: {REMEDY}"
                )
            step = JournalFields(event, "a resumed event").whole("step")
            yield from (f"before step {step}: {change}" for change in changes)
