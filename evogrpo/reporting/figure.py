"""Figure of a run: fitness, learning curves and hyperparameters."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.reporting.figure_panels import (
    BEST,
    LEGEND_COLUMNS,
    FigureData,
    draw_fitness,
    draw_hyperparameter,
    draw_legend,
    draw_segments,
    figure_data,
    generation_ticks,
    legend_entries,
)
from evogrpo.reporting.results import processed
from evogrpo.reporting.summary import MEASURES, RunSummary, summarise
from evogrpo.storage.atomic_files import replace_file
from evogrpo.storage.journal import read_journal
from evogrpo.text import duration_text, printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_measure(axes: "Axes", name: str, run: FigureData) -> None:
    """Plot one metric of every member over the learning steps; the best member's lineage is highlighted.

    Args:
        axes: Target.
        name: The metric.
        run: The run.
    """
    from matplotlib.ticker import MaxNLocator

    title, unit = MEASURES[name]
    others: dict[str, list[Sequence[tuple[float, float]]]] = {}
    for curve in run.summary.curves[name]:
        last_best = run.lineage.get(curve.index, 0)
        points = [(float(step), value) for step, _, value in curve.points]
        inherited = sum(generation <= last_best for _, generation, _ in curve.points)
        others_points = points[max(0, inherited - 1) :]  # starts at the last point of the best lineage
        if len(others_points) > 1 or not inherited:
            others.setdefault(run.colour(curve.slot), []).append(others_points)
        if inherited:
            _draw_curves(axes, [points[:inherited]], color=BEST, linewidth=1.8, zorder=3)
    width, alpha = (0.6, 0.4) if run.crowded else (1.0, 0.7)
    for colour, segments in others.items():
        _draw_curves(axes, segments, color=colour, linewidth=width, alpha=alpha, zorder=2)
    axes.set_title(title, loc="left", size=10.5, weight="bold", color="#222222")
    axes.set_ylabel(unit, size=8.5)
    axes.set_xlabel("learning step", size=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.tick_params(labelsize=8.5)


def _draw_curves(axes: "Axes", segments: Sequence[Sequence[tuple[float, float]]], **style: Any) -> None:
    """Plot segments as lines, and single points as markers."""
    draw_segments(axes, [segment for segment in segments if len(segment) > 1], **style)
    single_points = [segment[0] for segment in segments if len(segment) == 1]  # a lone point has no line
    if single_points:
        axes.plot(
            [x for x, _ in single_points], [y for _, y in single_points], "o", markersize=3, **style | {"linewidth": 0}
        )


_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
}
_WIDTH, _HEADER, _LEGEND_ROW, _FITNESS, _ROW = 11.0, 1.15, 0.2, 4.8, 2.35  # inches; two rows fit into the header


def draw_report(run_dir: Path | str) -> Path:
    """Write `report.png` to a run directory, without changing matplotlib's global settings or backend.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        The path of the figure.

    Raises:
        ValueError: If there is no journal, or it is invalid.
    """
    run_dir = Path(run_dir)
    path = run_dir / "report.png"
    replace_file(path, figure_png(summarise(read_journal(run_dir / "journal.jsonl"))))
    return path


def figure_png(summary: RunSummary) -> bytes:
    """Return the figure of a run as PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with _styled():
        figure = _figure(figure_data(summary))
        figure.set_dpi(130)
        FigureCanvasAgg(figure).print_png(buffer)  # savefig would draw everything twice
    return buffer.getvalue()


def run_figure(summary: RunSummary) -> "Figure":
    """Return the matplotlib figure of a run, without window or backend."""
    with _styled():
        return _figure(figure_data(summary))


@contextmanager
def _styled() -> Iterator[None]:
    """Apply the style of this figure temporarily."""
    import matplotlib.style

    # The figure has its own canvas; pyplot and its global backend are never imported.
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _figure(run: FigureData) -> "Figure":
    """Lay out the panels and draw the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    results = [result for history in run.histories for result in history.results]
    names = [
        name for name in run.summary.evolvable if any(vars(item.hyperparameters)[name] is not None for item in results)
    ]
    columns = {1: 1, 2: 2, 4: 2}.get(len(names), 3)
    rows = -(-len(names) // columns)
    curves = list(run.summary.curves) if run.histories else []
    steps = [_ROW] if curves else []
    entries = legend_entries(run, births=bool(names))
    header = _HEADER + _LEGEND_ROW * max(0, -(-len(entries) // LEGEND_COLUMNS) - 2)
    height = header + _FITNESS + sum(steps) + _ROW * rows
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.005, 0.99, 0.99 - header / height), h_pad=0.06, w_pad=0.06)
    figure = Figure(figsize=(_WIDTH, height), layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + len(steps) + rows, columns, height_ratios=[_FITNESS, *steps] + [_ROW] * rows)
    draw_fitness(figure.add_subplot(grid[0, :]), run)
    if curves:
        curve_grid = grid[1, :].subgridspec(1, len(curves))
        for position, name in enumerate(curves):
            draw_measure(figure.add_subplot(curve_grid[0, position]), name, run)
    max_ticks = 8 if run.last_generation < 100 else 5  # ticks of small panels
    for position, name in enumerate(names):
        cell = grid[1 + len(steps) + position // columns, position % columns]
        axes = figure.add_subplot(cell)
        draw_hyperparameter(axes, name, run.summary.evolvable[name], run)
        axes.set_xlim(run.first_generation - 1.03, run.last_generation + 0.03)
        axes.set_xticks(generation_ticks(run.first_generation - 1, run.last_generation, max_ticks))
        if position + columns >= len(names):
            axes.set_xlabel("generation")
    _draw_title(figure, run.summary, height)
    draw_legend(figure, entries, y=1 - 0.62 / height)
    return figure


def _draw_title(figure: "Figure", summary: RunSummary, height: float) -> None:
    """Draw the title and a line of facts about the run."""
    facts = summary.facts
    title = _one_line(summary.title, 120)
    parts = [f"population of {_fact(facts, 'population_size')}", f"seed {_fact(facts, 'seed')}"]
    parts.append(f"{_fact(facts, 'samples_per_step')} samples per member and step")
    if summary.generations:
        last = summary.generations[-1]
        parts += [processed(last, summary.terms), duration_text(last.seconds)]
    style: dict[str, Any] = {"color": "#222222", "va": "top", "parse_math": False}  # show dollar signs as they are
    figure.text(0.012, 1 - 0.10 / height, title, size=13.5, weight="bold", **style)
    figure.text(0.012, 1 - 0.37 / height, " · ".join(parts), size=9.5, **style)


def _fact(facts: Mapping[str, Any], name: str) -> str:
    return _one_line(str(facts.get(name, "?")), 60)


def _one_line(text: str, limit: int) -> str:
    return shorten(printable(text).replace("\n", " "), limit)
