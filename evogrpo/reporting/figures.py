"""The figure of a run: fitness by lineage above, what learning steps measured, the evolving hyperparameters below."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.history.words import processed
from evogrpo.persistence.durable import replace_file
from evogrpo.persistence.journal import read_journal
from evogrpo.reporting.panels.curves import draw_measure
from evogrpo.reporting.panels.fitness import draw_fitness, generation_ticks
from evogrpo.reporting.panels.marks import LEGEND_COLUMNS, Drawing, draw_legend, drawing, legend_entries
from evogrpo.reporting.panels.responses import draw_response
from evogrpo.reporting.panels.trajectories import draw_hyperparameter
from evogrpo.reporting.response import responses
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.text import duration_text, printable, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Draw a run's journal as `report.png` in its folder; matplotlib's global settings and backend stay as they are.

    Args:
        run_dir: The folder of the run; it may still be running.

    Returns:
        The path of the figure.

    Raises:
        ValueError: If there is no journal, or it cannot be read.
    """
    run_dir = Path(run_dir)
    path = run_dir / "report.png"
    replace_file(path, figure_png(summarise(read_journal(run_dir / "journal.jsonl"))))
    return path


def figure_png(summary: RunSummary) -> bytes:
    """Draw a run.

    Args:
        summary: The run.

    Returns:
        The figure as a PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with _styled():
        figure = _figure(drawing(summary))
        figure.set_dpi(130)
        FigureCanvasAgg(figure).print_png(buffer)  # as savefig does once it has drawn everything without showing it
    return buffer.getvalue()


def run_figure(summary: RunSummary) -> "Figure":
    """Draw a run; returns matplotlib's figure, which belongs to no window and no backend."""
    with _styled():
        return _figure(drawing(summary))


@contextmanager
def _styled() -> Iterator[None]:
    """Draw in the style of this figure, and leave matplotlib's settings as they were."""
    import matplotlib.style

    # The backend is chosen by the canvas of this one figure; pyplot, which has a global one, is never imported.
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a task may be named in any script
        yield


def _figure(run: Drawing) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    results = [result for line in run.lines for result in line.results]
    names = [
        name for name in run.summary.evolvable if any(vars(each.hyperparameters)[name] is not None for each in results)
    ]
    columns = {1: 1, 2: 2, 4: 2}.get(len(names), 3)
    rows = -(-len(names) // columns)
    curves = list(run.summary.curves) if run.lines else []
    steps = [_ROW] if curves else []
    found = {each.name: each for each in responses(run.summary) if each.gains}
    entries = legend_entries(run, births=bool(names), gains=bool(found))
    header = _HEADER + _LEGEND_ROW * max(0, -(-len(entries) // LEGEND_COLUMNS) - 2)
    height = header + _FITNESS + sum(steps) + _ROW * rows
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.005, 0.99, 0.99 - header / height), h_pad=0.06, w_pad=0.06)
    figure = Figure(figsize=(_WIDTH, height), layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + len(steps) + rows, columns, height_ratios=[_FITNESS, *steps] + [_ROW] * rows)
    draw_fitness(figure.add_subplot(grid[0, :]), run)
    if curves:
        beside = grid[1, :].subgridspec(1, len(curves))
        for position, name in enumerate(curves):
            draw_measure(figure.add_subplot(beside[0, position]), name, run)
    most = 8 if run.last_generation < 100 else 5  # of numbers below small panels
    for position, name in enumerate(names):
        cell = grid[1 + len(steps) + position // columns, position % columns]
        panels = cell.subgridspec(1, 2, width_ratios=[3, 1]) if name in found else None
        axes = figure.add_subplot(cell if panels is None else panels[0])
        shown = draw_hyperparameter(axes, name, run.summary.evolvable[name], run)
        if panels is not None:
            draw_response(figure.add_subplot(panels[1], sharey=axes), found[name], shown)
        axes.set_xlim(run.first_generation - 1.03, run.last_generation + 0.03)
        axes.set_xticks(generation_ticks(run.first_generation - 1, run.last_generation, most))
        if position + columns >= len(names):
            axes.set_xlabel("generation")
    _draw_title(figure, run.summary, height)
    draw_legend(figure, entries, y=1 - 0.62 / height)
    return figure


def _draw_title(figure: "Figure", summary: RunSummary, height: float) -> None:
    facts = summary.facts
    title = _line(summary.title, 120)
    parts = [f"population of {_fact(facts, 'population_size')}", f"seed {_fact(facts, 'seed')}"]
    parts.append(f"{_fact(facts, 'samples_per_step')} samples per member and step")
    if summary.generations:
        last = summary.generations[-1]
        parts += [processed(last, summary.words), duration_text(last.seconds)]
    look: dict[str, Any] = {"color": "#222222", "va": "top", "parse_math": False}  # a dollar sign is a dollar sign
    figure.text(0.012, 1 - 0.10 / height, title, size=13.5, weight="bold", **look)
    figure.text(0.012, 1 - 0.37 / height, " · ".join(parts), size=9.5, **look)


def _fact(facts: Mapping[str, Any], name: str) -> str:
    return _line(str(facts.get(name, "?")), 60)


def _line(text: str, limit: int) -> str:
    return shorten(printable(text).replace("\n", " "), limit)
