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
from evogrpo.reporting.figure_panels import MEANINGS, FigureData, figure_data, lower_edge
from evogrpo.reporting.lineage import MemberHistory
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.response import Response, responses
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
    found = responses(summary)
    style, *scripts = (files("evogrpo.reporting.page").joinpath(name).read_text("utf-8") for name in _FILES)
    body = [
        f"<header><h1>{title}</h1>\n{page_tables.outcome(summary)}</header>",
        page_tables.fitness(summary),
        page_tables.hyperparameters(summary),
        page_tables.response(summary, found),
        page_tables.costs(summary),
        page_tables.finalists(summary),
        page_tables.ancestry(summary),
        page_tables.members(summary),
        page_tables.generations(summary),
        page_tables.steps(summary),
        page_tables.completions(summary),
        page_tables.facts(summary),
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


_MOST_POINTS = 6000
"""Maximum points per metric of learning steps; above it, neighbouring steps are averaged."""
_MOST_GAINS = 1200


def page_data(run: FigureData, found: Sequence[Response]) -> dict[str, Any]:
    """Return the data of the page's charts as plain JSON values with printable texts.

    Args:
        run: The run.
        found: Response of gains to each hyperparameter.
    """
    summary, names = run.summary, list(run.summary.evolvable)
    test = summary.test
    return {
        "terms": {
            "fitness": summary.fitness_words,
            "tokens": summary.terms.tokens,
            "base": summary.terms.untrained,
            "split": summary.split,
        },
        "floor": _score(run.fitness_edge),
        "first": run.first_generation - 1,
        "last": run.last_generation,
        "best": run.best,
        "crowded": run.crowded,
        "parameters": [_parameter(name, summary.evolvable[name]) for name in names],
        "members": [_member(line, names, run) for line in run.lines],
        "base": None if summary.start is None else _score(summary.start.mean),
        "test": None if test is None else [_score(test.before.mean), _score(test.after.mean), test.index],
        "retired": [[each.generation, index] for each in summary.decisions for index in each.retired.values()],
        "curves": [
            {
                "title": MEASURES[name][0],
                "unit": MEASURES[name][1],
                "lines": [[each.index, _thinned(each.points, curves)] for each in curves],
            }
            for name, curves in summary.curves.items()
        ],
        "responses": [_response(each, summary.evolvable[each.name]) for each in found if each.gains],
    }


def _parameter(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": printable(name), "meaning": MEANINGS.get(name, "value"), **_axis(fields)}


def _axis(fields: Mapping[str, Any]) -> dict[str, Any]:
    choices = fields.get("choices")
    choices = choices if isinstance(choices, list) else []
    ladder = sorted({float(each) for each in choices if isinstance(each, (int, float))})
    # A ladder of equal ratios, such as 4, 8, 16, is evenly spaced on a log axis.
    ratios = [after / before for before, after in pairwise(ladder) if before > 0]
    even = len(ratios) > 1 and len(ratios) == len(ladder) - 1 and max(ratios) < 1.01 * min(ratios)
    return {
        "log": fields.get("scale") == "log" or even,
        "ladder": ladder if len(ladder) <= 8 else [],
        "names": [printable(shorten(each, 24)) for each in choices if isinstance(each, str)],
    }


def _member(line: MemberHistory, names: Sequence[str], run: FigureData) -> dict[str, Any]:
    first = line.results[0]
    origin = line.origin
    return {
        "i": line.index,
        "slot": first.slot,
        "colour": run.slots.index(first.slot),
        "parent": first.parent,
        "born": first.born,
        "from": None if origin is None else [origin.index, origin.generation, _score(origin.fitness)],
        "until": run.lineage.get(line.index),
        "values": [_value(getattr(first.hyperparameters, name)) for name in names],
        "changes": printable(changes_text(first.changes)),
        "reason": printable(shorten(first.reason, 300)),
        "source": origin_text(first.parent, first.back_to),
        "failed": {
            str(each.generation): printable(shorten(each.failed, 300))
            for each in line.results
            if each.failed is not None
        },
        "results": [
            [
                each.generation,
                _score(each.fitness),
                _score(each.standard_error),
                each.tokens,
                _score(each.seconds),
                each.evaluation.tokens,
                _otherwise(each),
            ]
            for each in line.results
        ],
    }


def _otherwise(result: MemberReport) -> str:
    """Return the other measures of a member; empty where fitness is the only one."""
    # Members without validation have the fitness of their training rewards.
    has_others = len(result.measured) > 1 or result.questions == 0
    ways = result.measured.items() if has_others else ()
    return ", ".join(f"{way} {score_text(each.mean, each.standard_error)}" for way, each in ways)


def _response(response: Response, fields: Mapping[str, Any]) -> dict[str, Any]:
    every = -(-len(response.gains) // _MOST_GAINS)
    return {
        "name": printable(response.name),
        **_axis(fields),
        "floor": _score(lower_edge([each.gain for each in response.gains])),
        "gains": [
            [each.index, each.generation, _value(each.value), _score(each.gain)] for each in response.gains[::every]
        ],
        "levels": [
            [_value(each.low), _value(each.high), _score(each.mean), _score(each.standard_error)]
            for each in response.levels
        ],
    }


def _thinned(points: Sequence[tuple[int, int, float]], curves: Sequence[Any]) -> list[list[Any]]:
    """Return a curve's points (step, generation, value), averaged over neighbours above the maximum."""
    every = -(-sum(len(curve.points) for curve in curves) // _MOST_POINTS)
    thinned = []
    for start in range(0, len(points), every):
        some = points[start : start + every]
        mean = sum(value for _, _, value in some) / len(some)
        thinned.append([some[-1][0], some[-1][1], _score(mean)])
    return thinned


def _score(value: float | None) -> float | None:
    """Round a number to five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def _value(value: float | str | None) -> float | str | None:
    return printable(shorten(value, 24)) if isinstance(value, str) else _score(value)
