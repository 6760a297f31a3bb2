"""Tables and the figure of the study: interquartile means with bootstrap intervals, and probabilities of improvement.

Source: Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (arXiv:2108.13264).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.classic.intervals import Interval, interquartile_mean, stratified_bootstrap
from benchmarking.hpo.protocol import ARMS_OF, CONTROLS, FORMER, PLAYED, STARTS_OF, WRITTEN
from benchmarking.hpo.tasks import TASKS

Runs = Sequence[Mapping[str, Any]]
CANDIDATES = ("narrowing", "narrowing-shared")


def tables(runs: Runs) -> str:
    """Return the study's tables as Markdown."""
    parts = []
    for start in ("unknown", "wrong", "right"):
        there = [run for run in runs if run["start"] == start]
        if there:
            parts.append(f"## Starts: {start}\n\n### At equal cost\n\n{_scores(there, start, 'score')}")
            parts.append(f"### At equal processor time\n\n{_scores(there, start, 'early')}")
            parts.append(f"### What it cost\n\n{_costs(there, start)}")
            parts.append(f"### Probability that narrowing beats an arm, normalised scores\n\n{_beaten(there, start)}")
    return "\n\n".join(parts)


def _scores(runs: Runs, start: str, key: str) -> str:
    tasks = _tasks(runs, start)
    rows = []
    for arm in _arms(runs, start):
        cells, all_scores = [], {}
        for task in tasks:
            values = _values(runs, arm, task, key)
            cells.append(_cell(task, values))
            if len(values):
                all_scores[task] = [TASKS[task].normalised(value) for value in values]
        whole = str(stratified_bootstrap(all_scores)) if len(all_scores) == len(tasks) else ""
        rows.append([arm, *cells, whole])
    return _markdown(["arm", *tasks, "all, normalised"], rows)


def _costs(runs: Runs, start: str) -> str:
    rows, tasks = [], _tasks(runs, start)
    for arm in _arms(runs, start):
        cells = []
        for task in tasks:
            own = [run for run in runs if (run["arm"], run["task"]) == (arm, task)]
            if not own:
                cells.append("")
                continue
            cost, shares = np.mean([run["cost"] for run in own]), [run["evaluations"] / run["cost"] for run in own]
            seconds = np.median([run["seconds"] for run in own])
            cells.append(f"{cost:,.0f}, {100 * np.mean(shares):.0f} % evaluations, {seconds:.0f} s")
        rows.append([arm, *cells])
    return _markdown(["arm", *tasks], rows)


def _beaten(runs: Runs, start: str) -> str:
    """Return, for each candidate and each other arm, the mean over tasks of P(candidate > arm), with its interval."""
    rows, tasks = [], _tasks(runs, start)
    for arm in _arms(runs, start):
        cells = []
        for candidate in CANDIDATES:
            pairs = {
                task: (_values(runs, candidate, task, "score"), _values(runs, arm, task, "score")) for task in tasks
            }
            pairs = {task: pair for task, pair in pairs.items() if all(map(len, pair))}
            same = arm == candidate or not pairs
            cells.append("" if same else str(probability_of_improvement(list(pairs.values()))))
        rows.append([arm, *cells])
    return _markdown(["arm", *CANDIDATES], rows)


def probability_of_improvement(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, draws: int = 2000, seed: int = 0
) -> Interval:
    """Return the chance that a run of one arm beats a run of another, as a mean over tasks; ties count one half.

    Args:
        pairs: Scores of the one and of the other, by task.
        draws: Bootstrap samples, within each task and arm.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)

    def drawn() -> float:
        return float(
            np.mean([_wins(rng.choice(ours, len(ours)), rng.choice(theirs, len(theirs))) for ours, theirs in pairs])
        )

    low, high = np.quantile([drawn() for _ in range(draws)], [0.025, 0.975])
    return Interval(value=float(np.mean([_wins(*pair) for pair in pairs])), low=float(low), high=float(high))


def _wins(ours: np.ndarray, theirs: np.ndarray) -> float:
    differences = ours[:, None] - theirs[None, :]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)


def _cell(task: str, values: np.ndarray) -> str:
    if not len(values):
        return ""
    if len(values) < 4:  # nothing that an interval could be drawn from
        return f"{', '.join(f'{value:.3g}' for value in sorted(values))}"
    return f"{stratified_bootstrap({task: values.tolist()})} of {len(values)}"


def _values(runs: Runs, arm: str, task: str, key: str) -> np.ndarray:
    return np.array([run[key] for run in runs if (run["arm"], run["task"]) == (arm, task)], dtype=np.float64)


def _tasks(runs: Runs, start: str) -> list[str]:
    there = {run["task"] for run in runs}
    return [task for task in (*PLAYED, *WRITTEN) if start in STARTS_OF[task] and task in there]


def _arms(runs: Runs, start: str) -> list[str]:
    there = {run["arm"] for run in runs}
    return [arm for arm in (*ARMS_OF[start], *FORMER) if arm in there]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def draw(runs: Runs, out: Path) -> Path:
    """Draw normalised interquartile means with intervals, a panel per task, and return where."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    there = [run for run in runs if run["start"] == "unknown"]
    tasks = _tasks(there, "unknown")
    figure, axes = plt.subplots(1, len(tasks), figsize=(2.3 * len(tasks) + 1.6, 4.6), sharey=True, squeeze=False)
    arms = list(reversed(_arms(there, "unknown")))
    for axis, task in zip(axes[0], tasks, strict=True):
        for place, arm in enumerate(arms):
            values = [TASKS[task].normalised(value) for value in _values(there, arm, task, "score")]
            if not values:
                continue
            colour = "#d55e00" if arm in CANDIDATES else "#0072b2" if arm in CONTROLS else "#555555"
            axis.plot(values, [place] * len(values), ".", color=colour, alpha=0.3, markersize=5)
            interval = stratified_bootstrap({task: values})
            axis.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2)
            axis.plot(interquartile_mean(np.array(values)), place, "o", color=colour, markersize=6)
        axis.axvline(1.0, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_title(task, fontsize=9)
        axis.set_xlim(min(-0.1, axis.get_xlim()[0]), max(1.1, axis.get_xlim()[1]))
    axes[0][0].set_yticks(range(len(arms)), arms, fontsize=8)
    scale = "normalised test score: 0 = untrained, 1 = solved; dots are runs"
    figure.supxlabel(f"{scale}; orange: the candidates, blue: what they have to beat", fontsize=9)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    return out
