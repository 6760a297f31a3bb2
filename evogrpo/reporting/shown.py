"""`report`: a run's figure as a notebook shows it, and its page as a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from evogrpo.persistence.journal import read_journal
from evogrpo.reporting.figures import figure_png, run_figure
from evogrpo.reporting.html import write_html
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.text import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
