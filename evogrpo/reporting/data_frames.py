"""`read_run`: a run's journal as pandas data frames with typed, documented columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Value, is_categorical, is_integer
from evogrpo.reporting.descent import lineage_of
from evogrpo.reporting.lineage import ToldBirth, fitness_before, read_births, winner
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.step_records import REMEDY, Estimate
from evogrpo.reporting.summary import RunSummary, latest_steps, summarise
from evogrpo.storage.journal import read_journal
from evogrpo.text import extra_command

if TYPE_CHECKING:
    from pandas import DataFrame

WHOLE, REAL, TEXT, FLAG = "Int64", "float64", "string", "boolean"
"""The types of columns, as pandas calls them; all of them hold missing values."""

COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "members": {
        "generation": (WHOLE, "which, from 1"),
        "member": (WHOLE, "who: the member's index, never reused"),
        "slot": (WHOLE, "where it lived"),
        "parent": (WHOLE, "index of whom it was cloned from; missing for a founder"),
        "born": (WHOLE, "generation whose plan gave birth to it; 0 for the first founders"),
        "step": (WHOLE, "learning steps that the run had taken by the end of the generation"),
        "fitness": (REAL, "mean raw reward per question that selection went by, in reward units; missing if it failed"),
        "standard_error": (REAL, "of that mean over questions, in reward units"),
        "fitness_before": (
            REAL,
            "of the state it began the generation with (its own, its parent's, the untrained's); missing if unknown",
        ),
        "questions": (WHOLE, "how many it was asked"),
        "failed": (TEXT, "why it failed; missing if it did not"),
        "best": (FLAG, "whether it was the best of its generation"),
        "in_best_lineage": (
            FLAG,
            "whether the state that won the run was trained in this: the winner's whole line of descent",
        ),
        "tokens": (WHOLE, "tokens (small networks: transitions) it processed in the generation, evaluations left out"),
        "seconds": (REAL, "its share of the generation's wall-clock time"),
        "evaluation_tokens": (WHOLE, "tokens (small networks: steps) that its evaluation took"),
        "evaluation_seconds": (REAL, "wall-clock time that its evaluation took"),
    },
    "steps": {
        "step": (WHOLE, "number of the learning step, from 0"),
        "generation": (WHOLE, "to which it belongs, from 1"),
        "member": (WHOLE, "index of the member"),
        "slot": (WHOLE, "where it lived"),
        "step_seconds": (REAL, "wall-clock time of the step, all members together"),
    },
    "births": {
        "member": (WHOLE, "index of the member"),
        "parent": (WHOLE, "index of whom it was cloned from; missing for a founder"),
        "founder": (WHOLE, "index of its first ancestor"),
        "born": (WHOLE, "generation whose plan gave birth to it; 0 for the first founders"),
        "back_to": (
            WHOLE,
            "generation after which its parent's state was kept that it began with, if so",
        ),
        "slot": (WHOLE, "where it lived"),
        "last": (WHOLE, "the last generation that it lived through; missing if it lived through none"),
        "best_fitness": (REAL, "the highest that it ever had, in reward units"),
        "reason": (TEXT, "why it was born"),
        "winner": (FLAG, "whether it is the run's best member"),
    },
    "changes": {
        "member": (WHOLE, "index of whoever was born with it"),
        "parent": (WHOLE, "index of its parent"),
        "born": (WHOLE, "generation whose plan gave birth to it"),
        "name": (TEXT, "the hyperparameter, or network"),
        "old": (REAL, "its parent's value, where that is a number"),
        "new": (REAL, "its own"),
        "old_name": (TEXT, "its parent's value, where that is a name"),
        "new_name": (TEXT, "its own"),
    },
    "evaluations": {
        "split": (TEXT, "validation, test, or train where fitness is measured by training rewards"),
        "measure": (TEXT, "greedy, sampled or rollouts"),
        "who": (TEXT, "untrained, member, or gain: a member less the untrained, question by question"),
        "member": (WHOLE, "index of the member; missing for the untrained"),
        "generation": (WHOLE, "at whose end; 0 before the first one, missing for the test"),
        "questions": (WHOLE, "how many"),
        "fitness": (REAL, "mean raw reward per question, in reward units"),
        "standard_error": (REAL, "of that mean over questions, in reward units"),
    },
}
"""Every frame's columns: its type, and what it is with its unit. `members` and `births` also have a column for every
hyperparameter, under its name, and `members` and `steps` for everything measured in learning steps: under its name in
`steps`, and as `mean/NAME` over the generation in `members`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFrames:
    """A run as data frames; `COLUMNS` says what their columns are. What was given up when it was resumed is left out.

    Attributes:
        facts: What the run's first event says: version, seed, task, schedule, what evolves and so on; untrusted.
        members: One row for each member and generation.
        steps: One row for each member and learning step.
        births: One row for each member that was ever born.
        changes: One row for each hyperparameter that a child did not have from its parent.
        evaluations: One row for each mean that was measured.
        best: Index of the best member; None before the first evaluation.
        stopped: Why the run ended; None if it goes on, or was killed.
        resumes: How often it was resumed.
    """

    facts: Mapping[str, Any]
    members: "DataFrame"
    steps: "DataFrame"
    births: "DataFrame"
    changes: "DataFrame"
    evaluations: "DataFrame"
    best: int | None
    stopped: str | None
    resumes: int

    def __repr__(self) -> str:
        frames = ", ".join(f"{name} {len(getattr(self, name))}" for name in COLUMNS)
        return f"RunFrames(rows: {frames}; best={self.best}, stopped={self.stopped!r})"


def read_run(run_dir: str | Path) -> RunFrames:
    """Read a run's journal into data frames; it may be under way or stopped.

    Args:
        run_dir: The run's folder.

    Raises:
        ImportError: If pandas is not installed.
        ValueError: If there is no journal, or a value in it is not what it must be.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(f"read_run returns pandas data frames: {extra_command('pandas')}") from error
    events = read_journal(Path(run_dir) / "journal.jsonl")
    summary = summarise(events)
    births = read_births(events)
    rows: dict[str, tuple[list[dict[str, Any]], set[str]]] = {
        "members": (list(_members(summary)), set(HYPERPARAMETER_NAMES)),
        "steps": (list(_steps(events)), set()),
        "births": (list(_births(births, summary)), set(HYPERPARAMETER_NAMES)),
        "changes": (list(_changes(births)), set()),
        "evaluations": (list(_evaluations(summary)), set()),
    }
    frames = {name: _frame(pd, name, *each) for name, each in rows.items()}
    best = winner(summary)
    return RunFrames(
        facts=summary.facts,
        best=None if best is None else best.index,
        stopped=summary.stopped,
        resumes=summary.resumes,
        **frames,
    )


def _members(summary: RunSummary) -> Iterator[dict[str, Any]]:
    won, before = winner(summary), fitness_before(summary)
    way = () if won is None else lineage_of(summary.generations, won)
    states = {(member.index, member.generation) for member in way}
    for generation in summary.generations:
        for member in generation.members:
            state = member.index, member.generation
            yield {
                **{name: getattr(member, name) for name in COLUMNS["members"] if hasattr(member, name)},
                "member": member.index,
                "step": generation.step,
                "fitness_before": before[state],
                "best": member.index == generation.best.index,
                "in_best_lineage": state in states,
                "evaluation_tokens": member.evaluation.tokens,
                "evaluation_seconds": member.evaluation.seconds,
                **member.hyperparameters.to_json(),
                **{f"mean/{name}": value for name, value in member.metrics.items()},
            }


def _steps(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for step, event in sorted(latest_steps(events).items()):
        for member in event.each("members", f"a member of step {step}"):
            yield {
                **{name: member.number_or_none(name) for name in member.values if name != "index"},
                "step": step,
                "generation": event.whole("generation"),
                "member": member.whole("index"),
                "slot": member.whole("slot"),
                "step_seconds": event.number_or_none("seconds"),
            }


def _births(births: Sequence[ToldBirth], summary: RunSummary) -> Iterator[dict[str, Any]]:
    founders: dict[int, int] = {}
    best = winner(summary)
    lives: dict[int, list[MemberReport]] = {}
    for generation in summary.generations:
        for member in generation.members:
            lives.setdefault(member.index, []).append(member)
    for birth in births:
        founders[birth.index] = founders.get(birth.parent, birth.index) if birth.parent is not None else birth.index
        lived = lives.get(birth.index, [])
        yield {
            **{name: getattr(birth, name) for name in ("parent", "born", "back_to", "slot", "reason")},
            "member": birth.index,
            "founder": founders[birth.index],
            "last": max((member.generation for member in lived), default=None),
            "best_fitness": max((m.fitness for m in lived if m.fitness is not None), default=None),
            "winner": best is not None and birth.index == best.index,
            **birth.hyperparameters.to_json(),
        }


def _changes(births: Sequence[ToldBirth]) -> Iterator[dict[str, Any]]:
    for birth in births:
        for name, pair in birth.changes.items():
            row: dict[str, Any] = {"member": birth.index, "parent": birth.parent, "born": birth.born, "name": name}
            for column, value in zip(("old", "new"), pair, strict=True):
                row[f"{column}_name" if isinstance(value, str) else column] = value
            yield row


def _evaluations(summary: RunSummary) -> Iterator[dict[str, Any]]:
    baseline, test = summary.baseline, summary.test
    if baseline is not None:
        used = baseline.measure
        split = "train" if used == "rollouts" else "validation"
        row = {"split": split, "measure": used, "who": "untrained", "generation": 0, "questions": baseline.questions}
        yield {**row, **_told(baseline.fitness)}
    for generation in summary.generations:
        for member in generation.members:
            asked = member.questions
            row = {"who": "member", "member": member.index, "generation": generation.generation, "questions": asked}
            for measure, earned in member.measured.items():
                where = "train" if measure == "rollouts" else "validation"
                own = None if measure == "rollouts" else asked  # training starts are not counted here
                yield {"split": where, "measure": measure, **row, "questions": own, **_told(earned)}
    if test is not None:
        row = {"split": "test", "measure": test.measure, "questions": test.questions}
        yield {**row, "who": "untrained", **_told(test.before)}
        yield {**row, "who": "member", "member": test.index, **_told(test.after)}
        yield {**row, "who": "gain", "member": test.index, **_told(test.gain)}


def _told(estimate: Estimate) -> dict[str, float]:
    return {"fitness": estimate.mean, "standard_error": estimate.standard_error}


def _frame(pd: Any, name: str, rows: Sequence[Mapping[str, Any]], also: Iterable[str]) -> "DataFrame":
    """Make a frame of the documented columns, those of hyperparameters, and whatever was measured, all typed."""
    types = {column: kind for column, (kind, _) in COLUMNS[name].items()}
    types |= {each: _type_of(each) for each in HYPERPARAMETER_NAMES if each in also}
    types |= {column: REAL for row in rows for column in row if column not in types}
    columns = {}
    for column, kind in types.items():
        try:
            columns[column] = pd.Series([_cell(kind, row.get(column), pd) for row in rows], dtype=kind)
        except (OverflowError, TypeError) as error:  # pandas says one or the other, by how much there is too much
            raise ValueError(f"{column!r:.80} in {name} holds a number that no run counts to: {REMEDY}") from error
    frame: DataFrame = pd.DataFrame(columns)
    return frame


def _cell(kind: str, value: Value, pd: Any) -> Any:
    return (float("nan") if kind == REAL else pd.NA) if value is None else value


def _type_of(name: str) -> str:
    return TEXT if is_categorical(name) else WHOLE if is_integer(name) else REAL
