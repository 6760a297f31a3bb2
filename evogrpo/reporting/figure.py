"""Figure of a run, drawn by matplotlib: fitness, learning steps and hyperparameters."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evogrpo.extras import require
from evogrpo.reporting.charts import (
    BASE,
    BEST,
    Chart,
    Line,
    Point,
    RunCharts,
    by_colour,
    run_charts,
)
from evogrpo.reporting.records import processed
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import duration_text, printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#333333",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
}
# Sizes in inches.
_WIDTH = 11.0
_HEADER_HEIGHT = 1.5
_FITNESS_HEIGHT = 4.8
_ROW_HEIGHT = 2.35


def figure_png(summary: RunSummary) -> bytes:
    """Return the figure of a run as PNG bytes."""
    buffer = io.BytesIO()
    with _styled():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = _figure(run_charts(summary))
        figure.set_dpi(130)
        # Savefig would draw everything twice.
        FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def run_figure(summary: RunSummary) -> "Figure":
    """Return the matplotlib figure of a run. pyplot and its backends are not used."""
    with _styled():
        return _figure(run_charts(summary))


@contextmanager
def _styled() -> Iterator[None]:
    """Apply the style of this figure temporarily."""
    require("The figure", "matplotlib")
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _figure(run: RunCharts) -> "Figure":
    """Draw fitness above, then learning steps in one row, then hyperparameters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # 1. Rows of panels. At most three share a row; four fill two rows of two.
    rows = []
    for small in (run.metrics, run.hyperparameters):
        columns = {1: 1, 2: 2, 4: 2}.get(len(small), 3)
        # Panels in a last row that is not full are as wide as those above.
        starts = range(0, len(small), columns)
        rows += [(small[start : start + columns], columns) for start in starts]
    heights = [_HEADER_HEIGHT + _FITNESS_HEIGHT, *(_ROW_HEIGHT for _ in rows)]
    # 2. Draw the panels.
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    axes = figure.add_subplot(grid[0])
    _draw_fitness(axes, run)
    for number, (charts, width) in enumerate(rows, start=1):
        cells = grid[number].subgridspec(1, width)
        for column, chart in enumerate(charts):
            draw_chart(figure.add_subplot(cells[0, column]), chart, run)
    # 3. Add the result in large type, and the legend. `parse_math=False` shows dollar signs in
    #    texts of the run as they are.
    title = _one_line(run.summary.title, 100)
    headline = run.summary.headline
    if headline is not None:
        title += f"\n{headline.before} → {headline.after}"
    figure.suptitle(title, x=0.01, ha="left", size=16, weight="bold", parse_math=False)
    legend = axes.legend(
        # Without handles and labels, matplotlib warns about a run without generations.
        *axes.get_legend_handles_labels(),
        title=_facts(run.summary),
        alignment="left",
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=4,
        frameon=False,
        fontsize=8.8,
        title_fontsize=9.5,
    )
    legend.get_title().set_parse_math(False)
    return figure


def draw_chart(axes: "Axes", chart: Chart, run: RunCharts) -> None:
    """Plot the lines of a chart; the lineage of the best member is highlighted."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    # 1. Lines. The best member and the first of the other slots are in the legend.
    for number, (colour, lines) in enumerate(by_colour(chart.lines).items()):
        style = run.style(colour)
        label = None
        if number == 0 or colour == BEST:
            label = run.label(colour)
        x, y, error = _joined(lines)
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=style.width,
            alpha=style.opacity,
            marker="o",
            markersize=style.marker * chart.marked,
            label=label,
        )
        if chart.errors:
            band = (y - error, y + error)
            axes.fill_between(x, *band, color=colour, alpha=style.shade, linewidth=0)
    # 2. Births, above the lines.
    for colour, births in by_colour(chart.births).items():
        x, y, _ = _joined(births)
        size = run.style(colour).birth
        axes.plot(x, y, "o", color=colour, markersize=size, mec="white", mew=0.7, zorder=3)
    # 3. Axes. The fitness chart is large and has more ticks.
    x_bins = 5
    y_bins = 5
    if chart is run.fitness:
        x_bins = 12
        y_bins = 8
    if chart.log:
        axes.set_yscale("log")
    axes.set_ylim(*chart.limits)
    if chart.ticks:
        axes.yaxis.set_major_locator(FixedLocator(list(chart.ticks)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(y_bins, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: _without_math(chart.value_text(value)))
    )
    # Minor ticks of a logarithmic axis would have labels too.
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(x_bins, integer=True, min_n_ticks=1))
    axes.set_title(_without_math(chart.title))
    axes.set_ylabel(chart.unit)
    axes.set_xlabel(chart.x_title)


def _without_math(text: str) -> str:
    """Return text that matplotlib shows as it is, also between dollar signs."""
    return text.replace("$", r"\$")


def _joined(lines: Sequence[Line]) -> tuple[Array, Array, Array]:
    """Return x, y and error of the points of all lines, with gaps between the lines."""
    gap = Point(math.nan, math.nan, 0, math.nan)
    points = list[Point]()
    for line in lines:
        points += [*line.points, gap]
    x = np.array([point.x for point in points])
    y = np.array([point.y for point in points])
    error = np.array([point.error for point in points])
    return x, y, error


def _draw_fitness(axes: "Axes", run: RunCharts) -> None:
    """Plot the fitness of every member, failures and the untrained base."""
    summary = run.summary
    # 1. Members, with the index of the best one at its end.
    draw_chart(axes, run.fitness, run)
    axes.set_title("")
    axes.set_ylabel(f"fitness ({run.fitness.unit})")
    best = summary.best
    if best is not None and best.fitness is not None and not summary.is_alone:
        end = (best.generation, best.fitness)
        axes.annotate(
            f"#{best.index}", end, (8, 4), textcoords="offset points", color=BEST, weight="bold"
        )
    # 2. The untrained base.
    if summary.start is not None:
        name = f"{summary.terms.untrained}, {summary.split}"
        base = summary.start.mean
        axes.axhline(base, color=BASE, linestyle="--", linewidth=1.4, zorder=1.5, label=name)
    # 3. Failures, and an entry in the legend for the births in the charts of hyperparameters.
    if run.failures:
        generations, heights, _ = _joined(run.failures)
        axes.plot(generations, heights, "x", color=BASE, mew=2, label="failed")
    if any(chart.births for chart in run.hyperparameters):
        axes.plot([], [], "o", color="#999999", markersize=4.5, label="birth")
    # 4. Space for the index of the best member; words if there are no lines.
    first, last = run.generations
    width = last - first + 1
    left = first - 1 - 0.03 * width
    right = last + 0.05 * width
    axes.set_xlim(left, right)
    if not run.fitness.lines:
        words = "no member has a fitness yet"
        if not summary.generations:
            words = "no generation has finished yet"
        axes.text(0.5, 0.7, words, transform=axes.transAxes, ha="center", color="#777777", size=12)


def _facts(summary: RunSummary) -> str:
    """Return what the result was measured on, and a line of facts about the run."""
    size = summary.facts.get("population_size", "?")
    seed = summary.facts.get("seed", "?")
    samples = summary.facts.get("samples_per_step", "?")
    agents = "one agent" if size == 1 else f"population of {size}"
    parts = [_one_line(f"{agents} · seed {seed} · samples_per_step {samples}", 180)]
    if summary.generations:
        last = summary.generations[-1]
        parts += [processed(last, summary.terms), duration_text(last.seconds)]
    facts = " · ".join(parts)
    if summary.headline is None:
        return facts
    return f"{summary.headline.text}\n{facts}"


def _one_line(text: str, limit: int) -> str:
    return shorten(printable(text).replace("\n", " "), limit)
