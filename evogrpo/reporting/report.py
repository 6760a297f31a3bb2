"""Report of a run: an HTML page with the data of its charts, and a figure."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.markup import embedded, escape
from evogrpo.reporting import page_tables
from evogrpo.reporting.figure import draw_report, figure_png, run_figure
from evogrpo.reporting.figure_panels import MEANINGS, FigureData, figure_data
from evogrpo.reporting.lineage import MemberHistory
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.summary import MEASURES, RunSummary, summarise
from evogrpo.storage.atomic_files import replace_file
from evogrpo.storage.journal import read_journal
from evogrpo.text import changes_text, origin_text, printable, score_text, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILES = ("page.css", "lineage.js", "page.js")


def write_html(run_dir: Path | str) -> Path:
    """Write `report.html` and `report.png` to a run directory.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        The path of the page, a self-contained file.

    Raises:
        ValueError: If there is no journal, or it is invalid.
    """
    run_dir = Path(run_dir)
    draw_report(run_dir)
    page = html_page(summarise(read_journal(run_dir / "journal.jsonl")))
    path = run_dir / "report.html"
    replace_file(path, page.encode("utf-8"))
    return path


def html_page(summary: RunSummary) -> str:
    """Return the HTML page of a run: tables, and charts that its script draws.

    Args:
        summary: The run.

    Returns:
        The HTML text. Values are escaped, and the content security policy allows only the page's own scripts.
    """
    title = escape(shorten(summary.title, 400))
    style, *scripts = (files("evogrpo.reporting.page").joinpath(name).read_text("utf-8") for name in _FILES)
    body = [
        f"<header><h1>{title}</h1>\n{page_tables.outcome(summary)}</header>",
        page_tables.fitness(summary),
        page_tables.hyperparameters(summary),
        page_tables.costs(summary),
        page_tables.finalists(summary),
        page_tables.ancestry(summary),
        page_tables.members(summary),
        page_tables.generations(summary),
        page_tables.steps(summary),
        page_tables.completions(summary),
        page_tables.facts(summary),
    ]
    data = embedded(page_data(figure_data(summary)))
    allowed = " ".join(f"'{_csp_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src {allowed}; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · evogrpo</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in body if section)
        + '\n</main>\n<aside id="shown" role="status" hidden></aside>\n'
        f'<script type="application/json" id="run">{data}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )


def _csp_hash(text: str) -> str:
    """Return the Content-Security-Policy hash of an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


class RunReport:
    """Report of a run that displays as a figure in a notebook.

    Args:
        run_dir: Run directory.
        summary: Content of its journal.

    Attributes:
        run_dir: Run directory.
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
        """A new matplotlib figure, to be changed or saved in another format."""
        return run_figure(self._summary)

    def write(self) -> Path:
        """Write `report.html` and `report.png` to the run directory; returns the path of the page."""
        return write_html(self.run_dir)


def report(run_dir: str | Path) -> RunReport:
    """Return the report of a run: fitness by lineage, metrics of learning steps, and hyperparameters.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        A report that displays as a figure in a notebook; its `write()` writes the HTML page.

    Raises:
        ValueError: If there is no journal, or it is invalid.
    """
    run_dir = Path(run_dir)
    return RunReport(run_dir, summarise(read_journal(run_dir / "journal.jsonl")))


_MAX_POINTS = 6000
"""Maximum points per metric of learning steps; above it, neighbouring steps are averaged."""


def page_data(run: FigureData) -> dict[str, Any]:
    """Return the data of the page's charts as plain JSON values with printable texts."""
    summary, names = run.summary, list(run.summary.evolvable)
    test = summary.test
    return {
        "terms": {
            "fitness": summary.fitness_words,
            "tokens": summary.terms.tokens,
            "base": summary.terms.untrained,
            "split": summary.split,
        },
        "floor": _rounded(run.fitness_edge),
        "first": run.first_generation - 1,
        "last": run.last_generation,
        "best": run.best,
        "crowded": run.crowded,
        "parameters": [_parameter(name, summary.evolvable[name]) for name in names],
        "members": [_member(history, names, run) for history in run.histories],
        "base": None if summary.start is None else _rounded(summary.start.mean),
        "test": None if test is None else [_rounded(test.before.mean), _rounded(test.after.mean), test.index],
        "retired": [[item.generation, index] for item in summary.decisions for index in item.retired.values()],
        "curves": [
            {
                "title": MEASURES[name][0],
                "unit": MEASURES[name][1],
                "lines": [[item.index, _thinned(item.points, curves)] for item in curves],
            }
            for name, curves in summary.curves.items()
        ],
    }


def _parameter(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, meaning and axis of a hyperparameter."""
    choices = fields.get("choices")
    choices = choices if isinstance(choices, list) else []
    numbers = sorted({float(choice) for choice in choices if isinstance(choice, (int, float))})
    # Choices of equal ratios, such as 4, 8, 16, are evenly spaced on a log axis.
    ratios = [after / before for before, after in pairwise(numbers) if before > 0]
    geometric = len(ratios) > 1 and len(ratios) == len(numbers) - 1 and max(ratios) < 1.01 * min(ratios)
    return {
        "name": printable(name),
        "meaning": MEANINGS.get(name, "value"),
        "log": fields.get("scale") == "log" or geometric,
        "ladder": numbers if len(numbers) <= 8 else [],
        "names": [printable(shorten(choice, 24)) for choice in choices if isinstance(choice, str)],
    }


def _member(history: MemberHistory, names: Sequence[str], run: FigureData) -> dict[str, Any]:
    """Return the data of one member for the charts."""
    first = history.results[0]
    origin = history.origin
    return {
        "i": history.index,
        "slot": first.slot,
        "colour": run.slots.index(first.slot),
        "parent": first.parent,
        "born": first.born,
        "from": None if origin is None else [origin.index, origin.generation, _rounded(origin.fitness)],
        "until": run.lineage.get(history.index),
        "values": [_json_value(getattr(first.hyperparameters, name)) for name in names],
        "changes": printable(changes_text(first.changes)),
        "reason": printable(shorten(first.reason, 300)),
        "source": origin_text(first.parent),
        "failed": {
            str(result.generation): printable(shorten(result.failed, 300))
            for result in history.results
            if result.failed is not None
        },
        "results": [
            [
                result.generation,
                _rounded(result.fitness),
                _rounded(result.standard_error),
                result.tokens,
                _rounded(result.seconds),
                result.evaluation.tokens,
                _other_measures(result),
            ]
            for result in history.results
        ],
    }


def _other_measures(result: MemberReport) -> str:
    """Return the other measures of a member; empty where fitness is the only one."""
    # Members without validation have the fitness of their training rewards.
    has_others = len(result.measured) > 1 or result.questions == 0
    measures = result.measured.items() if has_others else ()
    return ", ".join(
        f"{measure} {score_text(estimate.mean, estimate.standard_error)}" for measure, estimate in measures
    )


def _thinned(points: Sequence[tuple[int, int, float]], curves: Sequence[Any]) -> list[list[Any]]:
    """Return a curve's points (step, generation, value), averaged over neighbours above the maximum."""
    stride = -(-sum(len(curve.points) for curve in curves) // _MAX_POINTS)
    thinned = []
    for start in range(0, len(points), stride):
        window = points[start : start + stride]
        mean = sum(value for _, _, value in window) / len(window)
        thinned.append([window[-1][0], window[-1][1], _rounded(mean)])
    return thinned


def _rounded(value: float | None) -> float | None:
    """Round a number to five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def _json_value(value: float | str | None) -> float | str | None:
    return printable(shorten(value, 24)) if isinstance(value, str) else _rounded(value)
