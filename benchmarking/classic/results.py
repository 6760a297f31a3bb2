"""From the runs' curves to the numbers of the table: what each contestant was worth when a budget was spent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from intervals import Interval, first_reached, interquartile_mean, stratified_bootstrap, value_at
from tasks import TASKS, Task

Budget = Literal["steps", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's curve.

    Attributes:
        task: What was learnt.
        contestant: Who learnt it.
        seed: Of the run.
        steps: Environment steps at each evaluation.
        seconds: Training time there, by the clock that the run was made with.
        scores: Mean return of greedy play there.
    """

    task: Task
    contestant: str
    seed: int
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    scores: tuple[float, ...]

    @classmethod
    def read(cls, path: Path, contestant: str) -> Run:
        """Read what a runner wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        steps, wall, processor, scores = zip(*content["curve"], strict=True)
        return cls(
            task=replace(TASKS[content["task"]], **content["budgets"]),
            contestant=contestant,
            seed=content["seed"],
            steps=steps,
            seconds=processor if content["clock"] == "processor" else wall,
            scores=scores,
        )

    def budgets(self, budget: Budget) -> tuple[float, ...]:
        """Return what had been spent at each evaluation."""
        return self.steps if budget == "steps" else self.seconds

    def score_at(self, budget: Budget, amount: float) -> float:
        """Return the score when so much was spent; the untrained policy's before the first evaluation."""
        return value_at((0.0, *self.budgets(budget)[1:]), self.scores, amount)


def amount(task: Task, budget: Budget) -> float:
    """Return how much of a budget a task grants."""
    return task.steps if budget == "steps" else task.seconds


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return runs by (task, contestant), in the order of tasks, then of first appearance."""
    names = list(dict.fromkeys(run.contestant for run in runs))
    keys = [(task, name) for task in TASKS for name in names]
    found = {key: [run for run in runs if (run.task.name, run.contestant) == key] for key in keys}
    return {key: sorted(group, key=lambda run: run.seed) for key, group in found.items() if group}


def scores(runs: Sequence[Run], budget: Budget) -> list[float]:
    """Return each run's score when its task's budget was spent."""
    return [run.score_at(budget, amount(run.task, budget)) for run in runs]


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return every number of the table as plain JSON values, with what it was computed from."""
    rows = []
    for (task, contestant), group in grouped(runs).items():
        row: dict[str, Any] = {"task": task, "contestant": contestant, "seeds": [run.seed for run in group]}
        for budget in ("steps", "seconds"):
            reached = [first_reached(run.budgets(budget), run.scores, run.task.solved) for run in group]
            values = scores(group, budget)
            row[budget] = {
                "budget": amount(group[0].task, budget),
                "scores": values,
                "interval": vars(stratified_bootstrap({task: values})),
                "solved_after": [None if value == float("inf") else value for value in reached],
            }
        rows.append(row)
    return {"rows": rows, "overall": overall(runs)}


def overall(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return each contestant's normalised score over the tasks that every contestant has runs of."""
    groups = grouped(runs)
    names = list(dict.fromkeys(name for _, name in groups))
    common = [task for task in TASKS if all((task, name) in groups for name in names)]
    if not common:
        return {}
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        result[name] = {"tasks": common}
        for budget in ("steps", "seconds"):
            normalised = {
                task: [TASKS[task].normalised(score) for score in scores(groups[task, name], budget)] for task in common
            }
            result[name][budget] = vars(stratified_bootstrap(normalised, interquartile_mean))
    return result


def table(content: Mapping[str, Any]) -> str:
    """Return a summary as Markdown: one row per task and contestant, the best of each task in bold, then overall."""
    lines = [
        "| task | contestant | seeds | at equal steps | solved | at equal time | solved | steps to solve | s to it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        same = [other for other in content["rows"] if other["task"] == row["task"]]
        cells = [f"{row['task']}", row["contestant"], str(len(row["seeds"]))]
        solved = TASKS[row["task"]].solved
        for budget in ("steps", "seconds"):
            part = row[budget]
            best = max(other[budget]["interval"]["value"] for other in same)
            text = str(Interval(**part["interval"]))
            cells.append(f"**{text}**" if part["interval"]["value"] == best and len(same) > 1 else text)
            cells.append(f"{sum(score >= solved for score in part['scores'])}/{len(part['scores'])}")
        cells += [_median(row["steps"]["solved_after"], 0), _median(row["seconds"]["solved_after"], 1)]
        lines.append("| " + " | ".join(cells) + " |")
    if content["overall"]:
        first = next(iter(content["overall"].values()))
        lines += ["", f"Over {', '.join(first['tasks'])}, random play = 0, solved = 1:", ""]
        lines += ["| contestant | at equal steps | at equal time |", "|---|---|---|"]
        for name, entry in content["overall"].items():
            lines.append(f"| {name} | {Interval(**entry['steps'])} | {Interval(**entry['seconds'])} |")
    return "\n".join(lines)


def _median(values: Sequence[float | None], digits: int) -> str:
    """Return the median of what may be infinite, as None; a dash if more than half never got there."""
    ordered = sorted(float("inf") if value is None else value for value in values)
    middle = ordered[len(ordered) // 2] if len(ordered) % 2 else sum(ordered[len(ordered) // 2 - 1 :][:2]) / 2
    return "–" if middle == float("inf") else f"{middle:,.{digits}f}".replace(",", " ")
