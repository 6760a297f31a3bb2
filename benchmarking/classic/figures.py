"""The learning curves as a figure: one column per task, against environment steps above and time below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from intervals import stratified_bootstrap
from results import Budget, Run, amount, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with every kind of colour vision.
COLOURS = {"grpo-8": "#D55E00", "grpo": "#E69F00", "sb3-ppo": "#0072B2", "cleanrl-ppo": "#009E73"}
POINTS = 60


def draw(runs: Sequence[Run], labels: dict[str, str], path: Path, seconds_label: str) -> None:
    """Draw the interquartile mean over seeds of every contestant, with its 95 % bootstrap interval.

    Args:
        runs: At least one.
        labels: What to call each contestant.
        path: PNG file to write.
        seconds_label: What the time axis shows.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = grouped(runs)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    figure = Figure(figsize=(max(3.6 * len(tasks), 5.5), 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(tasks), squeeze=False)
    handles = {}
    for column, task in enumerate(tasks):
        own = {name: group for (of, name), group in groups.items() if of == task}
        for line, budget in enumerate(("steps", "seconds")):
            axes = grid[line, column]
            handles |= _panel(axes, own, budget)
            axes.set_xlabel("environment steps" if budget == "steps" else seconds_label)
        grid[0, column].set_title(task)
    grid[0, 0].set_ylabel("return")
    grid[1, 0].set_ylabel("return")
    figure.legend(
        handles.values(),
        [labels[name] for name in handles],
        loc="outside lower center",
        ncols=min(len(handles), 2 * len(tasks)),
        frameon=False,
    )
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, groups: dict[str, list[Run]], budget: Budget) -> dict[str, object]:
    from matplotlib.ticker import NullFormatter

    task = next(iter(groups.values()))[0].task
    spent = amount(task, budget)
    start = min(run.budgets(budget)[1] for group in groups.values() for run in group)
    ticks = np.geomspace(max(start, spent / 1000), spent, POINTS)
    handles = {}
    for name, group in groups.items():
        bands = [stratified_bootstrap({name: [run.score_at(budget, x) for run in group]}, draws=300) for x in ticks]
        (handles[name],) = axes.plot(ticks, [band.value for band in bands], color=COLOURS[name], linewidth=1.8)
        low, high = [band.low for band in bands], [band.high for band in bands]
        axes.fill_between(ticks, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.axhline(task.solved, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    return handles
