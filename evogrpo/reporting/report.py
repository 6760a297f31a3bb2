"""Report of a run: a page in one HTML file, and a figure."""

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from evogrpo.markup import embedded, escape
from evogrpo.reporting import page_tables as charts
from evogrpo.reporting import page_tables as lives
from evogrpo.reporting import page_tables as outcome
from evogrpo.reporting.figure import draw_report, figure_png, run_figure
from evogrpo.reporting.figure_data import page_data
from evogrpo.reporting.figure_panels import figure_data
from evogrpo.reporting.page_tables import completions
from evogrpo.reporting.response import responses
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.storage.atomic_files import replace_file
from evogrpo.storage.journal import read_journal
from evogrpo.text import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILES = ("page.css", "lineage.js", "page.js")


def write_html(run_dir: Path | str) -> Path:
    """Write a run's journal as `report.html` in its folder, and the figure as `report.png` beside it.

    Args:
        run_dir: The folder of the run; it may still be running.

    Returns:
        The path of the page, a single file that can be moved or sent.

    Raises:
        ValueError: If there is no journal, or it cannot be read.
    """
    run_dir = Path(run_dir)
    draw_report(run_dir)
    page = html_page(summarise(read_journal(run_dir / "journal.jsonl")))
    path = run_dir / "report.html"
    replace_file(path, page.encode("utf-8"))
    return path


def html_page(summary: RunSummary) -> str:
    """Write the page: its tables tell the run by themselves, and its script draws charts above them.

    Args:
        summary: The run.

    Returns:
        The HTML text. The values of the run are escaped; the browser is told to run no script but the page's own, which
        shows them as text.
    """
    title = escape(shorten(summary.title, 400))
    found = responses(summary)
    style, *scripts = (files("evogrpo.reporting.page").joinpath(name).read_text("utf-8") for name in _FILES)
    body = [
        f"<header><h1>{title}</h1>\n{outcome.outcome(summary)}</header>",
        charts.fitness(summary),
        charts.hyperparameters(summary),
        charts.response(summary, found),
        outcome.costs(summary),
        outcome.finalists(summary),
        lives.ancestry(summary),
        lives.members(summary),
        lives.generations(summary),
        charts.steps(summary),
        completions(summary),
        outcome.facts(summary),
    ]
    allowed = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src {allowed}; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · evogrpo</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in body if section)
        + '\n</main>\n<aside id="shown" role="status" hidden></aside>\n'
        f'<script type="application/json" id="run">{embedded(page_data(figure_data(summary), found))}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    """Return how a Content-Security-Policy names an inline element with exactly this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


class RunReport:
    """A run as a figure: the last expression of a notebook's cell shows it.

    Args:
        run_dir: The folder of the run.
        summary: What its journal says.

    Attributes:
        run_dir: As given.
    """

    def __init__(self, run_dir: Path, summary: RunSummary) -> None:
        self.run_dir, self._summary = run_dir, summary

    def __repr__(self) -> str:
        title, generations = shorten(self._summary.title, 60), len(self._summary.generations)
        return f"RunReport({title!r}, generations={generations}, in {str(self.run_dir)!r})"

    def _repr_png_(self) -> bytes:
        return figure_png(self._summary)

    @property
    def figure(self) -> "Figure":
        """The figure as matplotlib's, to be changed or saved in another format; a new one each time."""
        return run_figure(self._summary)

    def write(self) -> Path:
        """Write `report.html` and `report.png` into the run's folder; returns the path of the page."""
        return write_html(self.run_dir)


def report(run_dir: str | Path) -> RunReport:
    """Read a run's journal and draw it: fitness by lineage, what learning steps measured, and what evolved.

    Args:
        run_dir: The folder of the run; it may still be running.

    Returns:
        What shows itself as a figure in a notebook; `report(run_dir).write()` leaves the page as a file.

    Raises:
        ValueError: If there is no journal, or it cannot be read.
    """
    run_dir = Path(run_dir)
    return RunReport(run_dir, summarise(read_journal(run_dir / "journal.jsonl")))
