"""A run as pandas data frames with typed, documented columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, is_categorical, is_integer
from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.extras import require
from evogrpo.reporting.lineage import lineage_of
from evogrpo.reporting.records import Estimate
from evogrpo.reporting.summary import RunSummary, read_summary

if TYPE_CHECKING:
    from pandas import DataFrame

# Nullable pandas types of columns.
WHOLE = "Int64"
REAL = "float64"
TEXT = "string"
FLAG = "boolean"

COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    # Results.
    "members": {
        "generation": (WHOLE, "generation, from 1"),
        "member": (WHOLE, "index of the member, never reused"),
        "slot": (WHOLE, "slot of the member"),
        "parent": (WHOLE, "index of its parent; missing for a founder"),
        "born": (WHOLE, "generation whose plan gave birth to it; 0 for the first founders"),
        "step": (WHOLE, "learning steps of the run by the end of the generation"),
        "fitness": (
            REAL,
            (
                "mean raw reward per question that selection uses, in reward units; missing if it"
                " failed"
            ),
        ),
        "standard_error": (REAL, "standard error of the mean over questions, in reward units"),
        "fitness_before": (
            REAL,
            "fitness of its state at the start of the generation; missing if unknown",
        ),
        "questions": (WHOLE, "number of validation questions"),
        "failed": (TEXT, "reason of its failure; missing if it did not fail"),
        "best": (FLAG, "true for the best member of the generation"),
        "in_best_lineage": (
            FLAG,
            "true if the row belongs to the lineage of the run's best member",
        ),
        "tokens": (
            WHOLE,
            "tokens (small networks: actions) processed in the generation, without evaluations",
        ),
        "seconds": (REAL, "its share of the generation's wall-clock time"),
        "evaluation_tokens": (
            WHOLE,
            "tokens (small networks: environment steps) of its evaluation",
        ),
        "evaluation_seconds": (REAL, "wall-clock time of its evaluation"),
    },
    "steps": {
        "step": (WHOLE, "learning step, from 0"),
        "generation": (WHOLE, "generation, from 1"),
        "member": (WHOLE, "index of the member"),
        "slot": (WHOLE, "slot of the member"),
        "step_seconds": (REAL, "wall-clock time of the step, all members"),
    },
    # Lineage.
    "births": {
        "member": (WHOLE, "index of the member"),
        "parent": (WHOLE, "index of its parent; missing for a founder"),
        "founder": (WHOLE, "index of its first ancestor"),
        "born": (WHOLE, "generation whose plan gave birth to it; 0 for the first founders"),
        "slot": (WHOLE, "slot of the member"),
        "last": (WHOLE, "its last generation; missing if it finished none"),
        "best_fitness": (REAL, "its highest fitness, in reward units"),
        "reason": (TEXT, "reason of its birth"),
        "winner": (FLAG, "true for the run's best member"),
    },
    "changes": {
        "member": (WHOLE, "index of the child"),
        "parent": (WHOLE, "index of its parent"),
        "born": (WHOLE, "generation whose plan gave birth to it"),
        "name": (TEXT, "the hyperparameter, or network"),
        "old": (REAL, "its parent's value, if numeric"),
        "new": (REAL, "its own value, if numeric"),
        "old_name": (TEXT, "its parent's value, if a name"),
        "new_name": (TEXT, "its own value, if a name"),
    },
    "evaluations": {
        "split": (TEXT, "validation, test, or train where fitness is measured by training rewards"),
        "measure": (TEXT, "greedy, sampled or rollouts"),
        "who": (
            TEXT,
            "untrained, member, or gain: the paired difference of a member and the untrained base",
        ),
        "member": (WHOLE, "index of the member; missing for the untrained base"),
        "generation": (
            WHOLE,
            "generation at whose end it was measured; 0 for the baseline, missing for the test",
        ),
        "questions": (WHOLE, "number of questions"),
        "fitness": (REAL, "mean raw reward per question, in reward units"),
        "standard_error": (REAL, "standard error of the mean over questions, in reward units"),
    },
}
"""Columns of every frame: type, and description with unit. `members` and `births` also have one
column per hyperparameter and task setting. `steps` has one column per metric of learning steps;
`members` has their means as `mean/NAME`. In `members`, a calibrated `lr` is the mean of the rates
that were used; in `births` it is the first guess.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFrames:
    """A run as data frames, with the columns of `COLUMNS`; steps discarded on resume are left out.

    Attributes:
        facts: Fields of the run event: version, seed, task, schedule, search space and so on;
            untrusted.
        members: One row per member and generation.
        steps: One row per member and learning step.
        births: One row per member.
        changes: One row per hyperparameter that changed at a birth.
        evaluations: One row per measured mean.
        best: Index of the best member; None before the first evaluation.
        stopped: Reason of the run's end; None if it is active or was killed.
        resumes: Number of times it was resumed.
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
        parts = [f"{name} {len(getattr(self, name))}" for name in COLUMNS]
        frames = ", ".join(parts)
        return f"RunFrames(rows: {frames}; best={self.best}, stopped={self.stopped!r})"


def read_run(run_dir: str | Path) -> RunFrames:
    """Read a run's journal into data frames; the run may still be active.

    Args:
        run_dir: Run directory.

    Raises:
        ImportError: If pandas is not installed.
        ValueError: If there is no journal, or a value is invalid.
    """
    # pandas is optional and slow to import.
    require("read_run", "pandas")
    import pandas as pd

    summary = read_summary(run_dir)
    rows = {
        "members": _members(summary),
        "steps": _steps(summary),
        "births": _births(summary),
        "changes": _changes(summary),
        "evaluations": _evaluations(summary),
    }
    frames = {name: _frame(pd, name, list(each)) for name, each in rows.items()}
    best = None
    if summary.best is not None:
        best = summary.best.index
    return RunFrames(
        facts=summary.facts,
        best=best,
        stopped=summary.stopped,
        resumes=summary.resumes,
        **frames,
    )


def _members(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """Yield one row per member and generation."""
    # 1. Fitness of each state at the start of its generation: that of the previous generation. In
    #    the first generation of a member it is that of its parent before the birth, or for a
    #    founder the baseline.
    fitness_before = {}
    for history in summary.histories.values():
        before = None
        if history.origin is not None:
            before = history.origin.fitness
        elif summary.start is not None and history.results[0].parent is None:
            before = summary.start.mean
        for result in history.results:
            fitness_before[result.index, result.generation] = before
            before = result.fitness
    # 2. States that the best member descends from.
    states = set()
    if summary.best is not None:
        for result in lineage_of(summary, summary.best):
            states.add((result.index, result.generation))
    # 3. The rows.
    for generation in summary.generations:
        for member in generation.members:
            state = (member.index, member.generation)
            row = _documented(member, "members")
            row |= {
                "member": member.index,
                "step": generation.step,
                "fitness_before": fitness_before[state],
                "best": member.index == generation.best_index,
                "in_best_lineage": state in states,
                "evaluation_tokens": member.evaluation.tokens,
                "evaluation_seconds": member.evaluation.seconds,
                **member.hyperparameters.by_name(),
            }
            for name, value in member.metrics.items():
                row[f"mean/{name}"] = value
            # Where the learning rate is calibrated, `lr` is only the first guess.
            used_lr = member.metrics.get("learning_rate")
            if member.hyperparameters.target_kl is not None and used_lr is not None:
                row["lr"] = used_lr
            yield row


def _documented(record: object, frame: str) -> dict[str, Any]:
    """Return the attributes of a record that are columns of a frame."""
    return {name: getattr(record, name) for name in COLUMNS[frame] if hasattr(record, name)}


def _steps(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """Yield one row per member and learning step."""
    for step in summary.steps:
        for member in step.members:
            yield {
                **member.metrics,
                "step": step.step,
                "generation": step.generation,
                "member": member.index,
                "slot": member.slot,
                "step_seconds": step.seconds,
            }


def _births(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """Yield one row per member."""
    for birth in summary.births:
        row = _documented(birth, "births")
        row |= {
            "member": birth.index,
            "founder": summary.founders[birth.index],
            "winner": summary.best is not None and birth.index == summary.best.index,
            **birth.hyperparameters.by_name(),
        }
        # A member that finished no generation has no history.
        if birth.index in summary.histories:
            results = summary.histories[birth.index].results
            row["last"] = results[-1].generation
            scores = [result.fitness for result in results if result.fitness is not None]
            row["best_fitness"] = max(scores, default=None)
        yield row


def _changes(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """Yield one row per hyperparameter that changed at a birth."""
    for birth in summary.births:
        for name, (old, new) in birth.changes.items():
            row: dict[str, Any] = {
                "member": birth.index,
                "parent": birth.parent,
                "born": birth.born,
                "name": name,
            }
            # Names and numbers have a column each.
            for column, value in (("old", old), ("new", new)):
                if isinstance(value, str):
                    row[f"{column}_name"] = value
                else:
                    row[column] = value
            yield row


def _evaluations(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """Yield one row per measured mean: baseline, members and test."""
    baseline = summary.baseline
    if baseline is not None:
        yield {
            **_measured("untrained", baseline.measure, baseline.fitness),
            "questions": baseline.questions,
            "generation": 0,
        }
    for member in summary.members:
        for measure, estimate in member.measured.items():
            row = _measured("member", measure, estimate)
            row |= {"member": member.index, "generation": member.generation}
            # Training groups are not counted.
            if measure != ROLLOUTS:
                row["questions"] = member.questions
            yield row
    test = summary.test
    if test is not None:
        means = {"untrained": test.before, "member": test.after, "gain": test.gain}
        for who, estimate in means.items():
            row = _measured(who, test.measure, estimate)
            row |= {"questions": test.questions, "split": "test"}
            if who != "untrained":
                row["member"] = test.index
            yield row


def _measured(who: str, measure: str, estimate: Estimate) -> dict[str, Any]:
    """Return the columns of a measured mean that all rows share."""
    return {
        "split": "train" if measure == ROLLOUTS else "validation",
        "who": who,
        "measure": measure,
        "fitness": estimate.mean,
        "standard_error": estimate.standard_error,
    }


def _frame(pd: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    """Return a typed frame of the documented columns, hyperparameters and metrics."""
    types = {column: kind for column, (kind, _) in COLUMNS[name].items()}
    if name in ("members", "births"):
        for hyperparameter in HYPERPARAMETER_NAMES:
            types[hyperparameter] = REAL
            if is_categorical(hyperparameter):
                types[hyperparameter] = TEXT
            elif is_integer(hyperparameter):
                types[hyperparameter] = WHOLE
    # All other columns are task settings, which may be texts, and metrics.
    for column in dict.fromkeys(chain.from_iterable(rows)):
        is_text = any(isinstance(row.get(column), str) for row in rows)
        types.setdefault(column, TEXT if is_text else REAL)
    # A frame has all documented columns, also those without values yet.
    columns = {}
    for column, kind in types.items():
        values = [row.get(column) for row in rows]
        columns[column] = pd.Series(values, dtype=kind)
    frame: DataFrame = pd.DataFrame(columns)
    return frame
