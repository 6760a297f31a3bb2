"""Picture of the demo for README.md: `python -m docs.generate.picture runs/demo docs/demo.png`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from evogrpo.reporting.charts import run_charts
from evogrpo.reporting.figure import draw_chart
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal

STYLE = {
    "font.size": 15,
    "axes.titlesize": 16,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def settings_of(member: Mapping[str, Any]) -> str:
    """Return what a founder is asked and rewarded for, in words."""
    settings = member["hyperparameters"]["task_settings"]
    request = "no request"
    if settings["task.request"]:
        request = '"' + " ".join(settings["task.request"].split()[:3]) + ' …"'
    rewards = ["accuracy"]
    for name, weight in settings.items():
        if name.startswith("reward_weights.") and weight:
            rewards.append(name.removeprefix("reward_weights.").replace("_", " "))
    return f"{request}: {' + '.join(rewards)}"


def picture(run: Path) -> Figure:
    """Draw fitness with the rewards of each member, and the learning rate below it."""
    events = read_journal(run / "journal.jsonl")
    charts = run_charts(summarise(events))
    figure = Figure(figsize=(7.2, 8.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    fitness, rate = figure.subplots(2, 1, height_ratios=(3, 2))
    draw_chart(fitness, charts.fitness, charts)
    fitness.set_title("right answers to validation questions")
    fitness.set_ylabel("share")
    for chart in charts.metrics:
        if chart.title == "learning rate":
            draw_chart(rate, chart, charts)
            rate.set_title("learning rate, calibrated")
    for axes in (fitness, rate):
        axes.grid(color="#e8e8e8")
        axes.set_axisbelow(True)
    colours = {line.index: line.colour for line in charts.fitness.lines}
    handles = []
    for member in events[0]["members"]:
        line = Line2D([], [], color=colours[member["index"]], linewidth=3)
        line.set_label(settings_of(member))
        handles.append(line)
    figure.legend(
        handles=handles,
        title="Four members: request before the question, and rewards",
        loc="outside upper left",
        alignment="left",
        frameon=False,
    )
    return figure


def main() -> None:
    """Draw the picture of a run."""
    parser = argparse.ArgumentParser(description="Draw fitness and learning rate of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("png", type=Path)
    chosen = parser.parse_args()
    with matplotlib.style.context(["default", STYLE]):
        picture(chosen.run).savefig(chosen.png)


if __name__ == "__main__":
    main()
