"""Figure of a run, drawn by matplotlib: fitness, learning steps and hyperparameters."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evogrpo.extras import require
from evogrpo.reporting.charts import BASE, BEST, Chart, Line, Point, RunCharts, run_charts
from evogrpo.reporting.records import processed
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import duration_text, number_text, printable, score_text, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
}
# inches
_WIDTH = 11.0
_HEADER_HEIGHT = 1.2
_FITNESS_HEIGHT = 4.8
_ROW_HEIGHT = 2.35


def figure_png(summary: RunSummary) -> bytes:
    """Return the figure of a run as PNG bytes."""
    buffer = io.BytesIO()
    with _styled():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = _figure(run_charts(summary))
        figure.set_dpi(130)
        FigureCanvasAgg(figure).print_png(buffer)  # savefig would draw everything twice
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
    """Lay out the panels and draw them: fitness above, then learning steps in one row, then hyperparameters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # 1. Choose the rows and their heights. At most three panels share a row; four fill two rows of
    #    two.
    count = len(run.hyperparameters)
    columns = {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = [
        run.metrics,
        *(run.hyperparameters[start : start + columns] for start in range(0, count, columns)),
    ]
    rows = [row for row in rows if row]
    heights = [_HEADER_HEIGHT + _FITNESS_HEIGHT, *(_ROW_HEIGHT for _ in rows)]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    # 2. Draw the panels.
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    axes = figure.add_subplot(grid[0])
    _draw_fitness(axes, run)
    for number, charts in enumerate(rows, start=1):
        # Charts in a last row that is not full are as wide as those above.
        cells = grid[number].subgridspec(1, len(charts) if charts is run.metrics else columns)
        for column, chart in enumerate(charts):
            draw_chart(figure.add_subplot(cells[0, column]), chart, run)
    # 3. Add title and legend. `parse_math=False` shows dollar signs in texts of the run as they
    #    are.
    figure.suptitle(
        _one_line(run.summary.title, 120),
        x=0.01,
        ha="left",
        size=13.5,
        weight="bold",
        parse_math=False,
    )
    legend = axes.legend(
        # without them, matplotlib warns about a run without generations
        *axes.get_legend_handles_labels(),
        title=_facts(run.summary), alignment="left", loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4,
        frameon=False, fontsize=8.8, title_fontsize=9.5,
    )  # fmt: skip
    legend.get_title().set_parse_math(False)
    return figure


def draw_chart(axes: "Axes", chart: Chart, run: RunCharts) -> None:
    """Plot the lines of a chart; the lineage of the best member is highlighted."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    # 1. Lines of equal colour are plotted as one line with gaps, because thousands of lines take
    #    minutes.
    for colour in dict.fromkeys(line.colour for line in chart.lines):
        lines = [line for line in chart.lines if line.colour == colour]
        x, y, errors = _joined(lines)
        best = colour == BEST
        width, alpha = (3.0, 1.0) if best else (0.8, 0.5) if run.crowded else (1.4, 0.9)
        if chart.marked:
            style: dict[str, Any] = {"marker": "o", "markersize": 6 if best else 3}
        else:
            style = {}
        if best or colour == chart.lines[0].colour:
            label = run.label(colour)
        else:
            label = None
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=width,
            alpha=alpha,
            zorder=3 if best else 2,
            label=label,
            **style,
        )
        if chart.errors:
            low = [mean - error for mean, error in zip(y, errors, strict=True)]
            high = [mean + error for mean, error in zip(y, errors, strict=True)]
            shade = 0.16 if best else 0.03 if run.crowded else 0.1
            axes.fill_between(x, low, high, color=colour, alpha=shade, linewidth=0)
    # 2. Births.
    for colour in dict.fromkeys(birth.colour for birth in chart.births):
        x, y, _ = _joined([birth for birth in chart.births if birth.colour == colour])
        if colour == BEST:
            size = 6.5
        elif run.crowded:
            size = 2.5
        else:
            size = 4.5
        axes.plot(
            x,
            y,
            "o",
            color=colour,
            markersize=size,
            mec="white",
            mew=0.7,
            zorder=4 if colour == BEST else 2.5,
        )
    # 3. Axes.
    if chart.log:
        axes.set_yscale("log")
    axes.set_ylim(*chart.limits)
    if chart.ticks:
        axes.yaxis.set_major_locator(FixedLocator(list(chart.ticks)))
    elif chart.log:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.yaxis.set_major_locator(
            MaxNLocator(8 if chart is run.fitness else 5, steps=[1, 2, 2.5, 5, 10])
        )
    names = dict(enumerate(chart.names))
    axes.yaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: names.get(round(value), "") if names else number_text(float(value))
        )
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(
        MaxNLocator(12 if chart is run.fitness else 5, integer=True, min_n_ticks=1)
    )
    axes.set_title(chart.title)
    axes.set_ylabel(chart.unit)
    axes.set_xlabel(chart.x_title)


def _joined(lines: Sequence[Line]) -> tuple[list[float], list[float], list[float]]:
    """Return x, y and error of the points of all lines, with gaps between the lines."""
    gap = Point(math.nan, math.nan, 0, math.nan)
    points = [point for line in lines for point in (*line.points, gap)]
    return (
        [point.x for point in points],
        [point.y for point in points],
        [point.error for point in points],
    )


def _draw_fitness(axes: "Axes", run: RunCharts) -> None:
    """Plot the fitness of every member, failures, the untrained base and the test scores."""
    summary = run.summary
    first, last = run.generations
    draw_chart(axes, run.fitness, run)
    axes.set_title("")
    axes.set_ylabel(f"fitness ({run.fitness.unit})")
    if summary.start is not None:
        words = f"{summary.terms.untrained}, {summary.split}"
        axes.axhline(
            summary.start.mean,
            color=BASE,
            linestyle=(0, (6, 4)),
            linewidth=1.4,
            zorder=1.5,
            label=words,
        )
    for label, colour, x, estimate in run.tests:
        axes.errorbar(
            [x], [estimate.mean], yerr=[estimate.standard_error], fmt="D", color=colour, markersize=8, capsize=4,
            zorder=6, label=f"{label} {score_text(estimate.mean, None)}",
        )  # fmt: skip
    if run.failures:
        generations, heights, _ = _joined(run.failures)
        axes.plot(generations, heights, "x", color=BASE, mew=2, label="failed")
    if any(chart.births for chart in run.hyperparameters):
        # Without points: only an entry in the legend.
        axes.plot([], [], "o", color="#999999", markersize=4.5, label="birth")
    width = last - first + 1
    axes.set_xlim(first - 1 - 0.03 * width, last + (0.14 if summary.test else 0.07) * width)
    best = [line.points[-1] for line in run.fitness.lines if line.colour == BEST]
    if best:
        end = max(best, key=lambda point: point.x)
        axes.annotate(
            f"#{run.best}", end[:2], (8, 4), textcoords="offset points", color=BEST, weight="bold"
        )
    if not run.fitness.lines:
        if run.histories:
            words = "no member has a fitness yet"
        else:
            words = "no generation has finished yet"
        axes.text(0.5, 0.7, words, transform=axes.transAxes, ha="center", color="#777777", size=12)


def _facts(summary: RunSummary) -> str:
    """Return a line of facts about the run."""
    size, seed, samples = (
        summary.facts.get(name, "?") for name in ("population_size", "seed", "samples_per_step")
    )
    parts = [_one_line(f"population of {size} · seed {seed} · samples_per_step {samples}", 180)]
    if summary.generations:
        last = summary.generations[-1]
        parts += [processed(last, summary.terms), duration_text(last.seconds)]
    return " · ".join(parts)


def _one_line(text: str, limit: int) -> str:
    return shorten(printable(text).replace("\n", " "), limit)
