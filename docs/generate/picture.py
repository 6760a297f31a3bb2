"""Picture of a run for README.md: `python -m docs.generate.picture runs/demo docs/demo.png`."""

import argparse
from pathlib import Path

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evogrpo.reporting.charts import BEST, run_charts
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


def picture(run: Path) -> Figure:
    """Draw fitness, and the learning rate below it."""
    charts = run_charts(summarise(read_journal(run / "journal.jsonl")))
    figure = Figure(figsize=(7.2, 7.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    fitness, rate = figure.subplots(2, 1, height_ratios=(3, 2))
    draw_chart(fitness, charts.fitness, charts)
    fitness.set_title("fitness on validation questions")
    fitness.set_ylabel("mean reward")
    for chart in charts.metrics:
        if chart.title == "learning rate":
            draw_chart(rate, chart, charts)
            rate.set_title("learning rate, calibrated")
    for axes in (fitness, rate):
        axes.grid(color="#e8e8e8")
        axes.set_axisbelow(True)
    fitness.plot([], [], color=BEST, linewidth=3, label="best member and its ancestors")
    fitness.legend(
        *[[each[-1]] for each in fitness.get_legend_handles_labels()],
        loc="upper left",
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
