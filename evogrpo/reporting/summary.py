"""Summary of a run, read from its journal."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from evogrpo.config.hyperparameters import check_name
from evogrpo.config.task_settings import is_task_setting
from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.evolution.history import MemberRecord
from evogrpo.reporting.records import (
    BaselineReport,
    Estimate,
    GenerationReport,
    MemberReport,
    StepRecord,
    Terms,
    TestReport,
    terms_of,
)
from evogrpo.reporting.setting_labels import SettingLabels, differing_settings, short_name
from evogrpo.safe_parsing import load_json, read_regular
from evogrpo.storage.journal import (
    JournalError,
    latest_generations,
    parse_journal,
    read_bytes,
)
from evogrpo.text import count_text, expand_user, shown
from evogrpo.validation import Record, validate
from evogrpo.warnings import warn

_METRICS: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "mean of the {samples}"),
    "kl": ("KL to the reference", "nats per {token}"),
    "entropy": ("entropy", "nats per {token}"),
    "completions/mean_length": ("length", "{token}s per {sample}"),
    "learning_rate": ("learning rate", "AdamW step size"),
    "step_kl": ("KL of a step", "nats per {token}"),
}
"""Metrics shown for every learning step: name -> (title, unit)."""
# Metric of a reward function: its mean, without its weight.
_COMPONENT = re.compile("rewards/(.+)/mean")


class Headline(NamedTuple):
    """Main result of a run.

    Attributes:
        before: Fitness of the untrained base.
        after: Fitness of the best member.
        text: What they are, and on which questions they were measured.
    """

    before: Estimate
    after: Estimate
    text: str


@dataclass(frozen=True, kw_only=True)
class MemberHistory:
    """Results of one member in all its generations.

    Attributes:
        index: The member.
        origin: Its parent's report of the state that it began with; None for a founder.
        results: Its reports, one per generation, in order.
    """

    index: int
    origin: MemberReport | None
    results: tuple[MemberReport, ...]


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
        warnings: Texts of the warnings during the run, each with the number of learning steps
            before it; untrusted.
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
    warnings: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[MemberReport, ...]:
        """Reports of all members in all generations, in order."""
        return tuple(chain.from_iterable(each.members for each in self.generations))

    @cached_property
    def best(self) -> MemberReport | None:
        """Report of the run's best member in the generation that made it the best.

        None before the first generation.
        """
        if not self.generations:
            return None
        # The trainer has chosen it. It compares members that left a race early on the questions
        # that both have answered, not by the means in the reports.
        best_ever = self.generations[-1].best_ever
        states = {(member.index, member.generation): member for member in self.members}
        return states.get(best_ever) if best_ever else None

    @cached_property
    def histories(self) -> Mapping[int, MemberHistory]:
        """History of every member that finished a generation, by its index."""
        reports: dict[int | None, list[MemberReport]] = {}
        for member in self.members:
            reports.setdefault(member.index, []).append(member)
        histories = {}
        for results in reports.values():
            first = results[0]
            # A child begins with its parent's last state before its own first generation. That
            # is always earlier, even in a damaged journal, so a loop over origins ends.
            origin = None
            for report in reports.get(first.parent, []):
                if report.generation < first.generation:
                    origin = report
            histories[first.index] = MemberHistory(
                index=first.index, origin=origin, results=tuple(results)
            )
        return histories

    @cached_property
    def founders(self) -> Mapping[int, int]:
        """Index of the first ancestor of every member, by its index."""
        founders: dict[int, int] = {}
        for birth in self.births:
            parent = birth.index if birth.parent is None else birth.parent
            # Parents come before their children, so the founder of a parent is known.
            founders[birth.index] = founders.get(parent, birth.index)
        return founders

    @cached_property
    def task_settings(self) -> tuple[str, ...]:
        """Names of the task settings that evolve, or in which members differ."""
        evolving = [name for name in self.evolvable if is_task_setting(name)]
        differing = differing_settings(birth.hyperparameters for birth in self.births)
        return tuple(dict.fromkeys([*evolving, *differing]))

    @property
    def shown_names(self) -> tuple[str, ...]:
        """Names of evolving hyperparameters and of `task_settings`."""
        return tuple(dict.fromkeys([*self.evolvable, *self.task_settings]))

    @cached_property
    def labels(self) -> SettingLabels:
        """Labels of the texts of task settings."""
        return SettingLabels.of(self.evolvable, (birth.hyperparameters for birth in self.births))

    @property
    def terms(self) -> Terms:
        """Terms of the kind of members of this run."""
        return terms_of(self.facts.get("kind"))

    @cached_property
    def metrics(self) -> Mapping[str, tuple[str, str]]:
        """Title and unit of each metric that is shown for learning steps, by name.

        The learning rate only if it was calibrated. If members weight rewards differently, their
        sums cannot be compared: the mean of each reward function is shown instead.
        """
        # 1. Candidates.
        candidates = dict(_METRICS)
        if any(name.startswith("reward_weights.") for name in self.task_settings):
            _, unit = candidates.pop("reward")
            members = chain.from_iterable(step.members for step in self.steps)
            components = {}
            for name in dict.fromkeys(chain.from_iterable(each.metrics for each in members)):
                function = _COMPONENT.fullmatch(name)
                if function is not None:
                    title = short_name(function[1])
                    if not title.startswith("reward"):
                        title = f"reward {title}"
                    components[name] = (title, unit)
            candidates = components | candidates
        # 2. Those with values.
        values: dict[str, set[float]] = {name: set() for name in candidates}
        for step in self.steps:
            for member in step.members:
                for name, found in values.items():
                    value = member.metrics.get(name)
                    if value is not None:
                        found.add(value)
        if "lr" in self.evolvable or len(values["learning_rate"]) < 2:
            del values["learning_rate"]
        # 3. Units in the terms of the task.
        terms = self.terms
        words = {
            "samples": terms.samples,
            "sample": terms.samples.removesuffix("s"),
            "token": terms.tokens.removesuffix("s"),
        }
        shown = {}
        for name, found in values.items():
            if found:
                title, unit = candidates[name]
                shown[name] = (title, unit.format(**words))
        return shown

    @property
    def is_alone(self) -> bool:
        """True for a run of one agent, in which nothing is selected."""
        return len(self.histories) == 1

    @property
    def questions(self) -> int:
        """Number of questions that the best member's fitness is measured on."""
        if self.best is not None and self.best.questions:
            return self.best.questions
        return self.baseline.questions if self.baseline else 0

    @property
    def headline(self) -> Headline | None:
        """Main result: the test, or before it the best fitness. None before the first result."""
        terms = self.terms
        test = self.test
        best = self.best
        if test is not None:
            questions = f"{count_text(test.questions)} test {terms.questions}"
            member = f"member #{test.index}, on {questions}"
            text = f"{terms.untrained} → {member}; paired difference {test.gain:+}."
            return Headline(test.before, test.after, text)
        if self.start is None or best is None or best.estimate is None:
            return None
        questions = f"{count_text(self.questions)} {self.split} {terms.questions}"
        text = f"{terms.untrained} → member #{best.index}, on {questions}, without a test."
        if len(self.members) > 1:
            text += " The best of several results is biased upwards."
        return Headline(self.start, best.estimate, text)

    @property
    def split(self) -> str:
        """Split that fitness is measured on: "validation" or "training"."""
        # Untrusted.
        config = self.facts.get("fitness")
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
        names = [self.facts.get("task"), self.facts.get("model")]
        return " · ".join(str(name) for name in names if name) or "run"


class _Checkpoint(NamedTuple):
    """Checkpoint of a run, with length and SHA-256 of the journal when it was written."""

    name: str
    size: int
    sha256: str

    def fits(self, journal: bytes) -> bool:
        """Return True if the journal begins with the events before the checkpoint."""
        return hashlib.sha256(journal[: self.size]).hexdigest() == self.sha256


def _newest_checkpoint(run_dir: Path) -> _Checkpoint | None:
    """Return the newest checkpoint whose record can be read; None if there is none."""
    folders = (run_dir / "checkpoints").glob("generation-*")
    for folder in sorted(folders, key=lambda each: (len(each.name), each.name), reverse=True):
        # A checkpoint may be damaged, or be replaced at this moment.
        with suppress(OSError, ValueError, TypeError, KeyError):
            journal = load_json(read_regular(folder / "population.json"))["journal"]
            return _Checkpoint(folder.name, int(journal["bytes"]), str(journal["sha256"]))
    return None


def read_summary(run_dir: str | Path) -> RunSummary:
    """Summarise a run from the journal in its directory; see `summarise`.

    The run may still be active. Warn if the journal does not fit the newest checkpoint.

    Raises:
        ValueError: If there is no journal, its start is missing, or a value is invalid.
    """
    path = expand_user(run_dir, "run_dir") / "journal.jsonl"
    checkpoint = _newest_checkpoint(path.parent)  # first: an active run may write another one
    content = read_bytes(path)
    if checkpoint is not None and not checkpoint.fits(content):
        warn(
            f"{path} does not fit {checkpoint.name}: it was changed, or is older. What is shown may"
            " be wrong. Restore it from a copy."
        )
    events: Sequence[Mapping[str, Any]]
    try:
        events = parse_journal(content, path)
    except JournalError as error:
        if not error.events:
            raise
        warn(f"The events of the journal from a damaged line on are left out: {error}")
        events = error.events
    if all(event["event"] != "run" for event in events):
        best = path.parent / "best"
        hint = ""
        if best.is_dir():
            hint = f" GRPO.load({str(best)!r}) loads its best member."
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
        ValueError: If a value is invalid, or a generation is missing or repeated.
    """
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    # 1. Read the start of the run. Resuming may change the schedule: the last one counts.
    started = by_kind["run"][0]
    run = validate(_RunRecord, started, "journal, run event")
    for name in run.evolvable:
        check_name(name)
    facts = {name: value for name, value in started.items() if name != "event"}
    changed_data = []
    for event in by_kind.get("resumed", []):
        if "schedule" in event:
            facts["schedule"] = event["schedule"]
        changes = event.get("changed_data", [])
        changes = validate(tuple[str, ...], changes, "journal, changed_data")
        changed_data += [f"before step {event.get('step')}: {change}" for change in changes]
    # 2. Read what was measured.
    baseline = None
    if "baseline" in by_kind:
        baseline = BaselineReport.from_json(by_kind["baseline"][-1])
    generations = tuple(map(GenerationReport.from_json, latest_generations(events)))
    numbers = [generation.generation for generation in generations]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(
            f"journal: generations must be 1 to {len(numbers)}, got {shown(numbers)}. Restore the"
            " journal from a copy."
        )
    steps = {}
    for event in by_kind.get("step", []):
        step = validate(StepRecord, event, "journal, step event")
        steps[step.step] = step
    # 3. Read the test and the end, which count only if no training follows.
    test = None
    stopped = None
    for event in events:
        if event["event"] in ("step", "generation", "resumed"):
            test = None
            stopped = None
        elif event["event"] == "test":
            test = TestReport.from_json(event)
        elif event["event"] in ("stopped", "ended"):
            stopped = validate(str, event.get("reason"), "journal, reason of the end")
    # Killed between the test and the last event.
    if stopped is None and test is not None:
        stopped = "the test is done"
    # 4. Collect the births: founders, children in plans, and all members of generations, which
    #    include those of an earlier run. The first record of a member counts.
    births = {birth.index: birth for birth in reversed(run.lineage)}
    for generation in generations:
        records = [member.record() for member in generation.members]
        if generation.plan is not None:
            records += generation.plan.children
        for record in records:
            births.setdefault(record.index, record)
    return RunSummary(
        facts=facts,
        evolvable=run.evolvable,
        baseline=baseline,
        generations=generations,
        births=tuple(births[index] for index in sorted(births)),
        steps=tuple(steps[number] for number in sorted(steps)),
        test=test,
        resumes=len(by_kind.get("resumed", [])),
        stopped=stopped,
        changed_data=tuple(changed_data),
        warnings=_warnings(by_kind.get("warning", [])),
    )


def _warnings(events: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the texts of warnings; a run that was resumed may have some of them again."""
    steps: dict[str, int] = {}
    for event in events:
        warning = validate(_WarningRecord, event, "journal, warning event")
        steps.setdefault(warning.message, warning.step)
    texts = []
    for message, step in steps.items():
        when = f"after step {step}" if step else "before the first step"
        texts.append(f"{when}: {message}")
    return tuple(texts)


class _WarningRecord(Record):
    """Fields of a warning event."""

    step: int
    message: str


class _RunRecord(Record):
    """Fields of the run event that all reports need."""

    evolvable: dict[str, dict[str, Any]]
    lineage: tuple[MemberRecord, ...] = ()
