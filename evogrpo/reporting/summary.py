"""Summary of a run, read from its journal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.checks import refuse_unknown
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.reporting.records import BaselineReport, GenerationReport, TestReport
from evogrpo.reporting.results import FinalistsReport, Terms, terms_of
from evogrpo.reporting.step_records import REMEDY, Estimate, EvaluationCost, JournalFields
from evogrpo.storage.journal import latest_generations


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Evolution plan of one generation, read from the journal.

    Attributes:
        generation: Generation after which it applies.
        reasons: Reason per slot; untrusted.
        retired: Index of every retired member, by slot.
        samples_per_step: New samples per member and step; None = unchanged.
        steps_per_generation: New learning steps per generation; None = unchanged.
        samples: Samples of each slot until the next plan; None = equal.
    """

    generation: int
    reasons: tuple[str, ...] = ()
    retired: Mapping[int, int]
    samples_per_step: int | None = None
    steps_per_generation: int | None = None
    samples: tuple[int, ...] | None = None

    @property
    def budgets(self) -> str:
        """Changed budgets as text; empty if unchanged."""
        changed = {
            "samples per step": self.samples_per_step,
            "steps per generation": self.steps_per_generation,
        }
        changes = [f"{value} {name}" for name, value in changed.items() if value is not None]
        if self.samples is not None:
            changes.append(f"samples by slot: {', '.join(map(str, self.samples))}")
        return ", ".join(changes)


def read_decisions(events: Sequence[Mapping[str, Any]]) -> tuple[Decision, ...]:
    """Return the plans of all generations, oldest first.

    Args:
        events: A journal's events, oldest first; untrusted input.

    Raises:
        ValueError: If a value is invalid.
    """
    decisions = []
    for event in latest_generations(events):
        if event.get("plan") is not None:
            number = JournalFields(event, "a generation event").whole("generation")
            where = f"generation {number}"
            plan = JournalFields(event, where).inner("plan")
            members = JournalFields(event, where).objects("members", f"a member of {where}")
            decisions.append(_decision(number, plan, {each.whole("slot"): each.whole("index") for each in members}))
    return tuple(decisions)


def _decision(generation: int, plan: JournalFields, members: Mapping[int, int]) -> Decision:
    parents, reasons = plan.values.get("parents", []), plan.values.get("reasons", [])
    if not isinstance(reasons, list) or not all(isinstance(each, str) for each in reasons):
        raise ValueError(f"'reasons' of {plan.where} must be a list of texts, got {reasons!r:.80}: {REMEDY}")
    if not isinstance(parents, list):
        raise ValueError(f"'parents' of {plan.where} must be a list, got {parents!r:.80}: {REMEDY}")
    samples = plan.values.get("samples")
    if samples is not None and (not isinstance(samples, list) or not all(type(each) is int for each in samples)):
        raise ValueError(f"'samples' of {plan.where} must be a list of whole numbers, got {samples!r:.80}: {REMEDY}")
    children = plan.objects("children", f"a child of {plan.where}") if "children" in plan.values else []
    filled = {child.whole("slot") for child in children}
    vacant = [slot for slot, parent in enumerate(parents) if parent is None and slot not in filled]
    return Decision(
        generation=generation,
        reasons=tuple(reasons),
        retired={slot: members[slot] for slot in vacant if slot in members},
        samples_per_step=plan.whole_or_none("samples_per_step"),
        steps_per_generation=plan.whole_or_none("steps_per_generation"),
        samples=None if samples is None else tuple(samples),
    )


MEASURES: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "mean of the samples"),
    "kl": ("KL to the reference", "nats per action"),
    "entropy": ("entropy", "nats per action"),
    "completions/mean_length": ("length", "actions per sample"),
}
"""Metrics shown for every learning step: name -> (title, unit)."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one member over its learning steps.

    Attributes:
        index: The member.
        slot: Its slot.
        points: (step from 1, generation, value), in order.
    """

    index: int
    slot: int
    points: tuple[tuple[int, int, float], ...]


def read_curves(events: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Curve, ...]]:
    """Return the curves of every recorded metric, by name.

    Args:
        events: A journal's events, oldest first; untrusted input.

    Raises:
        ValueError: If a value is invalid.
    """
    found: dict[str, dict[tuple[int, int], list[tuple[int, int, float]]]] = {}
    for step, event in sorted(latest_steps(events).items()):
        generation = event.whole("generation")
        for member in event.objects("members", f"a member of step {step}"):
            who = member.whole("index"), member.whole("slot")
            for name in MEASURES:
                value = member.number_or_none(name)
                if value is not None:
                    found.setdefault(name, {}).setdefault(who, []).append((step + 1, generation, value))
    return {
        name: tuple(Curve(index=who[0], slot=who[1], points=tuple(points)) for who, points in sorted(curves.items()))
        for name, curves in sorted(found.items(), key=lambda item: list(MEASURES).index(item[0]))
    }


def latest_steps(events: Sequence[Mapping[str, Any]]) -> dict[int, JournalFields]:
    """Return the step events by step."""
    fields = (JournalFields(event, "a step event") for event in events if event["event"] == "step")
    return {each.whole("step"): each for each in fields}


PHASES = ("sampling", "scoring", "learning")
"""Phases of a learning step in the journal."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one kind of work.

    Attributes:
        name: Kind of work.
        tokens: Tokens or environment steps; None for the rest of the time.
        seconds: Wall-clock time.
    """

    name: str
    tokens: int | None
    seconds: float


def run_costs(
    events: Sequence[Mapping[str, Any]],
    generations: Sequence[GenerationReport],
    finalists: FinalistsReport | None,
    test: TestReport | None,
) -> tuple[Cost, ...]:
    """Return the cost of each kind of work.

    Args:
        events: The journal's events, for the time of learning steps; untrusted input.
        generations: Valid generations.
        finalists: Evaluation of the finalists, if any.
        test: Test, if any.

    Returns:
        Phases of learning steps, evaluations, the rest of the time, finalists and test; empty before the first
        generation.

    Raises:
        ValueError: If a value is invalid.
    """
    if not generations:
        return ()
    last = generations[-1]
    steps = latest_steps(events).values()
    timed = [each.inner("phases").numbers() for each in steps if each.whole("step") < last.step]
    phases = {name: math.fsum(each.get(name) or 0.0 for each in timed) for name in PHASES}
    # Environment steps, where counted, are comparable with those of evaluations; tokens include updates.
    played = last.tokens if last.timesteps is None else last.timesteps
    costs = [
        *(Cost(name=name, tokens=None, seconds=phases[name]) for name in PHASES[:-1] if phases[name]),
        Cost(name=PHASES[-1], tokens=played, seconds=phases[PHASES[-1]]),
        _of("evaluations", last.evaluation),
    ]
    rest = last.seconds - math.fsum(each.seconds for each in costs)
    if rest > 0:
        costs.append(Cost(name="everything else", tokens=None, seconds=rest))
    if finalists is not None:
        costs.append(_of("finalists", finalists.cost))
    if test is not None:
        costs.append(_of("test", test.cost))
    return tuple(costs)


def rank_waiting(events: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return the share of the learning steps' time that each rank waited; empty for one process."""
    steps = latest_steps(events).values()
    seconds = math.fsum(each.number("seconds") for each in steps)
    waited = [each.each_number("waiting") for each in steps]
    ranks = max(map(len, waited), default=0)  # a resumed run may have another number of ranks
    return tuple(math.fsum(each[rank] for each in waited if rank < len(each)) / (seconds or 1) for rank in range(ranks))


def _of(name: str, cost: EvaluationCost) -> Cost:
    return Cost(name=name, tokens=cost.tokens, seconds=cost.seconds)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Content of a journal.

    Attributes:
        facts: Fields of the run event: version, seed, model, task and so on; untrusted.
        evolvable: Search space of every evolving hyperparameter, by name.
        baseline: Fitness of the untrained base, or None if not evaluated yet.
        generations: In order; may be empty.
        test: The test, or None.
        resumes: Number of times the run was resumed.
        stopped: Reason of its end, or None.
        changed_data: Changes of questions, rewards or environment that resuming accepted; untrusted.
        curves: Curves of learning steps, by metric.
        decisions: Evolution plans, oldest first.
        costs: Cost of each kind of work.
        waiting: Share of the learning steps' time that each rank waited for others; empty for one process.
        finalists: Finalists on a second set of questions, or None.
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
    waiting: tuple[float, ...] = ()
    finalists: FinalistsReport | None = None

    @property
    def terms(self) -> Terms:
        """Terms for its kind of members."""
        return terms_of(self.facts.get("kind"))

    @property
    def split(self) -> str:
        """Split that fitness is measured on: "validation" or "training"."""
        return "training" if self._by in (ROLLOUTS, "both") else "validation"

    @property
    def baseline_split(self) -> str:
        """Split that the untrained base is measured on."""
        return "training" if self._by == ROLLOUTS else "validation"

    @property
    def start(self) -> Estimate | None:
        """Fitness that founders start from: that of the untrained base, if measured on the same split."""
        return self.baseline.fitness if self.baseline is not None and self.split == self.baseline_split else None

    @property
    def _by(self) -> object:
        measured = self.facts.get("fitness")
        return measured.get("by") if isinstance(measured, Mapping) else None

    @property
    def fitness_words(self) -> str:
        """Definition of fitness."""
        return self.terms.fitness.replace("validation", self.split)

    @property
    def ending(self) -> str:
        """Reason of the run's end; untrusted."""
        return self.stopped or "still active, or killed"

    @property
    def title(self) -> str:
        """Task and, if any, model; untrusted."""
        return " · ".join(str(self.facts[name]) for name in ("task", "model") if self.facts.get(name)) or "run"


_GOES_ON = ("step", "generation", "resumed")


def summarise(events: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Summarise a run from its journal.

    Args:
        events: Result of `read_journal`; untrusted input.

    Returns:
        The run, with its generations (see `latest_generations`).

    Raises:
        ValueError: If the run event is missing, or a value is invalid.
    """
    last = {event["event"]: event for event in events}
    runs = [event for event in events if event["event"] == "run"]
    if not runs:
        raise ValueError(
            "The journal has no run event. If RUN_DIR/checkpoints is not empty, `evogrpo resume RUN_DIR` continues the "
            "run and GRPO.load('RUN_DIR/best') loads the best member."
        )
    evolvable = JournalFields(runs[0], "the run event").inner("evolvable")
    refuse_unknown("hyperparameter in evolvable of the run event", evolvable.values, HYPERPARAMETER_NAMES)
    # A test and an end are of the whole run only if the run did not go on.
    went_on = max((n for n, event in enumerate(events) if event["event"] in _GOES_ON), default=-1)
    ending = {event["event"]: event for event in events[went_on + 1 :]}
    reasons = [event for event in ending.values() if event["event"] in ("stopped", "ended")]
    baseline = BaselineReport.from_json(last["baseline"]) if "baseline" in last else None
    generations = tuple(GenerationReport.from_json(event) for event in latest_generations(events))
    finalists = FinalistsReport.from_json(last["finalists"]) if _later("finalists", "generation", events) else None
    test = TestReport.from_json(ending["test"]) if "test" in ending else None
    stopped = JournalFields(reasons[-1], f"the {reasons[-1]['event']} event").text("reason") if reasons else None
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
        costs=run_costs(events, generations, finalists, test),
        waiting=rank_waiting(events),
        finalists=finalists,
    )


def _later(event: str, other: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the last of these events is the first kind."""
    return next((each["event"] for each in reversed(events) if each["event"] in (event, other)), other) == event


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
