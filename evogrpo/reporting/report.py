"""Report of a run: an HTML page with tables and, if plotly is installed, charts; and a figure."""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.extras import install_hint
from evogrpo.reporting.charts import BASE, BEST, Chart, Line, RunCharts, run_charts
from evogrpo.reporting.figure import figure_png, run_figure
from evogrpo.reporting.lineage import ancestors, best_member, fitness_estimate, reports_by_member
from evogrpo.reporting.records import (
    Estimate,
    Example,
    GenerationReport,
    MemberReport,
    processed,
    verdict,
)
from evogrpo.reporting.summary import (
    METRICS,
    RunSummary,
    changed_budgets,
    read_summary,
    retired_members,
)
from evogrpo.storage.atomic_files import replace_file
from evogrpo.text import (
    changes_text,
    count_text,
    duration_text,
    expand_user,
    number_text,
    pluralize,
    printable,
    score_text,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as PlotlyFigure

_MAX_TABLES = 100  # generations with a table of members
_MAX_TEXT = 4000  # characters of one prompt or completion
_MAX_TOTAL_TEXT = 100_000  # characters of all of them; with many, each is cut further
_MAX_NAMED = 60  # members; a lineage chart of more has no labels
_DRAW = """"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [name, { data, layout }] of Object.entries(charts))
  Plotly.newPlot(name, data, layout, { responsive: true, displayModeBar: false });
"""


class RunReport:
    """Report of a run that displays as a figure in a notebook.

    Args:
        run_dir: Run directory.
        summary: Content of its journal.

    Attributes:
        run_dir: Run directory.
    """

    def __init__(self, run_dir: Path, summary: RunSummary) -> None:
        self.run_dir = run_dir
        self._summary = summary

    def __repr__(self) -> str:
        title = shorten(self._summary.title, 60)
        generations = len(self._summary.generations)
        return f"RunReport({title!r}, generations={generations}, in {str(self.run_dir)!r})"

    def _repr_png_(self) -> bytes:
        return figure_png(self._summary)

    @property
    def figure(self) -> "Figure":
        """A new matplotlib figure, to be changed or saved in another format."""
        return run_figure(self._summary)

    def write(self) -> Path:
        """Write `report.html` to the run directory, and `report.png` if matplotlib is installed.

        Return the page.
        """
        if install_hint("report.png", "matplotlib") is None:
            replace_file(self.run_dir / "report.png", figure_png(self._summary))
        path = self.run_dir / "report.html"
        replace_file(path, html_page(self._summary).encode("utf-8"))
        return path


def report(run_dir: str | Path) -> RunReport:
    """Return the report of a run: fitness by lineage, metrics of learning steps, and hyperparameters.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        A report that displays as a figure in a notebook; its `write()` writes the HTML page.

    Raises:
        ValueError: If there is no journal, or it is invalid.
    """
    return RunReport(expand_user(run_dir, "run_dir"), read_summary(run_dir))


def html_page(summary: RunSummary) -> str:
    """Return the HTML page of a run.

    Args:
        summary: The run.

    Returns:
        The HTML text of a self-contained page. Values are escaped, the charts have no text of the
        run, and the content security policy allows only the page's own scripts.
    """
    title = escape(shorten(summary.title, 400))
    charts, scripts = _charts(summary)
    body = [
        f"<header><h1>{title}</h1>\n{_outcome(summary)}</header>",
        charts,
        _costs(summary),
        _ancestry(summary),
        _generations(summary),
        _completions(summary),
        _facts(summary),
    ]
    style = files("evogrpo.reporting").joinpath("page.css").read_text("utf-8")
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode()}'"
        for script in scripts
    )
    # plotly.js writes style elements, so styles cannot be listed by their hashes.
    allowed = hashes or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · evogrpo</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n"
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )


# ---- charts


def _charts(summary: RunSummary) -> tuple[str, list[str]]:
    """Return the sections of the charts and the scripts that draw them.

    Without plotly, a line on how to install it.
    """
    if not summary.generations:
        return "", []
    message = install_hint("Charts", "plotly")
    if message is not None:
        return _section("Charts", message), []
    from plotly.offline import get_plotlyjs

    # 1. Make the figures by element id: in full width, and small ones side by side.
    run = run_charts(summary)
    details = {
        (result.index, result.generation): _hover_text(
            result, history.results[0].generation, summary
        )
        for history in run.histories
        for result in history.results
    }
    whole = {"fitness": _fitness_figure(run, details), "lineage": _lineage_figure(run, details)}
    small = {
        title: {
            f"{title.split()[0]}-{number}": _chart_figure(chart, run, {})
            for number, chart in enumerate(charts)
        }
        for title, charts in (
            ("Hyperparameters", run.hyperparameters),
            ("Learning steps", run.metrics),
        )
    }
    # 2. Write the sections, with an empty element for each figure.
    lead = "Bands: ± one standard error. "
    lead += "In the lineage, a line from another slot is a birth. Hover or tap to see a member."
    parts = []
    for title, group in {"Fitness and lineage": whole, **small}.items():
        kind = "chart whole" if group is whole else "chart"
        elements = "".join(f'<div class="{kind}" id="{name}"></div>' for name in group)
        if group:
            parts.append(
                _section(
                    title, lead if group is whole else "", f'<div class="charts">{elements}</div>'
                )
            )
    # 3. Embed the figures as JSON, which the script draws into the elements.
    figures = {name: figure for group in (whole, *small.values()) for name, figure in group.items()}
    data = _embedded({name: figure.to_plotly_json() for name, figure in figures.items()})
    parts.append(f'<script type="application/json" id="charts">{data}</script>')
    without = (
        "<noscript><p>Charts need JavaScript. The tables contain the same values.</p></noscript>"
    )
    return "\n".join([without, *parts]), [get_plotlyjs(), _DRAW]


def _hover_text(result: MemberReport, first: int, summary: RunSummary) -> str:
    """Return the hover text of a result, which has numbers and names of hyperparameters but no untrusted text.

    Args:
        result: The result.
        first: First generation of the member in this run. `born` may be a generation of an earlier
            run.
        summary: The run.
    """
    values = result.hyperparameters.to_json()
    if first > 1:
        birth = f", born after generation {first - 1}"
    else:
        birth = ""
    lines = [
        f"fitness {score_text(result.fitness, result.standard_error)}",
        *(f"{name} {number_text(values[name])}" for name in summary.evolvable),
        "founder" if result.parent is None else f"child of #{result.parent}{birth}",
        (
            f"slot {result.slot}, {count_text(result.tokens)} {summary.terms.tokens},"
            f" {duration_text(result.seconds)}"
        ),
    ]
    return "<br>".join(lines)


def _fitness_figure(run: RunCharts, details: Mapping[tuple[int, int], str]) -> "PlotlyFigure":
    """Return the fitness chart with the untrained base, failures and tests."""
    figure = _chart_figure(run.fitness, run, details)
    summary = run.summary
    first, last = run.generations
    if summary.start is not None:
        base = [summary.start.mean] * 2
        words = f"{summary.terms.untrained}, {summary.split}"
        line = {"color": BASE, "dash": "dash", "width": 1.5}
        figure.add_scatter(
            x=[first - 1, last], y=base, mode="lines", line=line, name=words, hoverinfo="name+y"
        )
    if run.failures:
        marks = _points(run.failures, run.fitness, details)
        figure.add_scatter(
            **marks, mode="markers", marker={"symbol": "x", "size": 9, "color": BASE}, name="failed"
        )
    for label, colour, x, estimate in run.tests:
        marker = {"symbol": "diamond", "size": 11, "color": colour}
        error = {"type": "data", "array": [estimate.standard_error], "thickness": 1.5}
        name = f"{label} {estimate}"
        figure.add_scatter(
            x=[x],
            y=[estimate.mean],
            mode="markers",
            marker=marker,
            error_y=error,
            name=name,
            hoverinfo="name",
        )
    figure.update_layout(
        height=440,
        showlegend=True,
        legend={"orientation": "h", "y": -0.14},
        hoverlabel={"namelength": -1},
    )
    return figure


def _lineage_figure(run: RunCharts, details: Mapping[tuple[int, int], str]) -> "PlotlyFigure":
    """Return the lineage chart; births of few members are labelled."""
    figure = _chart_figure(run.lineage, run, details)
    births = run.lineage.births
    if len(births) <= _MAX_NAMED:
        points = [birth.points[0] for birth in births]
        figure.add_scatter(
            x=[point.x for point in points],
            y=[point.y for point in points],
            text=[f"#{birth.index}" for birth in births],
            mode="text",
            textposition="top right",
            hoverinfo="skip",
        )
    slots = round(run.lineage.limits[1] + 0.5)
    figure.update_layout(height=min(130 + 32 * slots, 480))
    return figure


def _chart_figure(
    chart: Chart, run: RunCharts, details: Mapping[tuple[int, int], str]
) -> "PlotlyFigure":
    """Return a chart as a plotly figure.

    `details` are hover texts of members by (index, generation).
    """
    import plotly.graph_objects as go

    figure = go.Figure(layout_template="none")
    # 1. Lines of equal colour are one trace with gaps.
    for colour in dict.fromkeys(line.colour for line in chart.lines):
        lines = [line for line in chart.lines if line.colour == colour]
        best = colour == BEST
        if chart.errors:
            shade = 0.16 if best else 0.03 if run.crowded else 0.1
            figure.add_scatter(
                **_bands(lines), fill="toself", fillcolor=colour, opacity=shade, mode="none"
            )
        width, opacity = (3.5, 1.0) if best else (1.0, 0.5) if run.crowded else (1.6, 0.9)
        figure.add_scatter(
            **_points(lines, chart, details),
            mode="lines+markers" if chart.marked else "lines",
            line={"color": colour, "width": width},
            marker={"size": 8 if best else 3 if run.crowded else 5},
            opacity=opacity,
            name=run.label(colour),
            showlegend=best or colour == chart.lines[0].colour,
        )
    # 2. Births.
    for colour in dict.fromkeys(birth.colour for birth in chart.births):
        births = [birth for birth in chart.births if birth.colour == colour]
        marker = {"color": colour, "size": 9 if colour == BEST else 3 if run.crowded else 6}
        figure.add_scatter(**_points(births, chart, details), mode="markers", marker=marker)
    # 3. Axes.
    ends = [point.x for line in chart.lines for point in (line.points[0], line.points[-1])] or [
        0,
        1,
    ]
    if max(ends) - min(ends) < 9:
        whole_numbers = {"dtick": 1}
    else:
        whole_numbers = {"nticks": 9}
    limits = [math.log10(limit) if chart.log else limit for limit in chart.limits]
    grid = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    values = chart.ticks
    if chart.log and not values:  # plotly would label 0.02 as "2"
        steps = (1, 2, 5) if limits[1] - limits[0] < 3 else (1,)
        powers = range(math.floor(limits[0]), math.ceil(limits[1]))
        values = tuple(step * 10.0**power for power in powers for step in steps)
        low, high = chart.limits
        if sum(low <= value <= high for value in values) < 2:  # a narrow range: evenly spaced ticks
            unit = 10.0 ** math.floor(math.log10(high - low))
            unit *= 1.0 if high - low >= 5 * unit else 0.5 if high - low >= 2 * unit else 0.2
            values = tuple(
                unit * number
                for number in range(math.ceil(low / unit), math.floor(high / unit) + 1)
            )
    ticks: dict[str, Any] = {"nticks": 6}
    if values:
        ticks = {
            "tickvals": values,
            "ticktext": chart.names or [number_text(value) for value in values],
        }
    figure.update_layout(
        title={"text": f"<b>{chart.title}</b> {chart.unit}", "font": {"size": 13}, "x": 0.01},
        xaxis={"title": {"text": chart.x_title, "standoff": 4}, **whole_numbers, **grid},
        yaxis={
            "range": limits,
            "type": "log" if chart.log else "linear",
            "exponentformat": "e",
            **ticks,
            **grid,
        },
        font={"size": 12, "family": "system-ui, sans-serif"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"bgcolor": "#30363d", "align": "left"},
        margin={"l": 55, "r": 15, "t": 40, "b": 45},
        height=250,
        hovermode="closest",
        dragmode=False,  # so that a finger scrolls the page
        showlegend=False,
    )
    return figure


def _points(
    lines: Iterable[Line], chart: Chart, details: Mapping[tuple[int, int], str]
) -> dict[str, Any]:
    """Return the points of lines as x, y and hover texts, with gaps between the lines."""
    x: list[float | None] = []
    y: list[float | None] = []
    texts: list[str] = []
    for line in lines:
        for point in line.points:
            if chart.names:
                value = chart.names[round(point.y)]
            else:
                value = number_text(point.y)
            details_text = details.get((line.index, point.generation), f"{chart.title} {value}")
            x.append(point.x)
            y.append(float(f"{point.y:.5g}"))
            texts.append(f"<b>#{line.index}</b> in generation {point.generation}<br>{details_text}")
        x.append(None)
        y.append(None)
        texts.append("")
    return {"x": x, "y": y, "hovertext": texts, "hoverinfo": "text"}


def _bands(lines: Iterable[Line]) -> dict[str, Any]:
    """Return the outlines of ± one standard error around lines."""
    x: list[float | None] = []
    y: list[float | None] = []
    for line in lines:
        x += [point.x for point in (*line.points, *reversed(line.points))]
        y += [point.y + point.error for point in line.points]
        y += [point.y - point.error for point in reversed(line.points)]
        x.append(None)
        y.append(None)
    return {"x": x, "y": y, "hoverinfo": "skip", "showlegend": False}


def _embedded(values: Any) -> str:
    """Return JSON that is safe inside a script element; numbers must be finite."""
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # No tag or comment can start or end in it; these characters occur in JSON strings only.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---- markup: every value of a run is escaped text


def escape(value: Any) -> str:
    """Return a value as escaped HTML text."""
    return html.escape(printable(str(value)))


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return a table of headings and rows; a row is a CSS class and its cells."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr class="{kind}">{"".join(map(_cell, cells))}</tr>\n' for kind, cells in rows
    )
    label = escape(f"table of {', '.join(text for text in heads if text) or 'facts'}")
    # The frame scrolls, so it must be focusable by keyboard.
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any) -> str:
    text = str(value)
    if len(text) > 24:
        return f'<td class="long">{escape(text)}</td>'
    return f"<td>{escape(text)}</td>"


def _section(title: str, lead: str, *inside: str) -> str:
    """Return a section; title and lead are text, the content is markup."""
    if lead:
        words = f'<p class="quiet">{escape(lead)}</p>\n'
    else:
        words = ""
    return f"<section><h2>{escape(title)}</h2>\n{words}" + "\n".join(inside) + "</section>"


def _folded(summary: str, inside: str, *, opened: bool) -> str:
    """Return a collapsible block; the summary is text, `inside` is markup."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>\n{inside}</details>"


# ---- tables


def _outcome(summary: RunSummary) -> str:
    """Return the summary line and the table of the main results."""
    # 1. Write the summary line.
    terms = summary.terms
    lead = "No generation has finished yet."
    if summary.generations:
        last = summary.generations[-1]
        count = pluralize(len(summary.generations), "generation")
        lead = f"{count}, {processed(last, terms)}, {duration_text(last.seconds)}."
    if summary.resumes:
        lead += f" Resumed {pluralize(summary.resumes, 'time')}."
    if summary.changed_data:
        lead += (
            " Questions, rewards or environment changed during the run (see below), so fitness"
            " before and after "
        )
        lead += "cannot be compared."
    lead += f" Fitness: {summary.fitness_text}. End: {summary.ending}."
    # 2. Collect the rows of the table; the test adds its verdict to the summary line.
    baseline = summary.baseline
    test = summary.test
    best = best_member(summary.generations)
    rows: list[tuple[str, str, Estimate | None, int]] = []
    if baseline is not None:
        rows.append(
            (f"{terms.untrained}, {summary.split}", "", baseline.fitness, baseline.questions)
        )
    if best is not None:
        words = f"member #{best.index} after generation {best.generation}, {summary.split}"
        rows.append(
            (
                words,
                "best",
                fitness_estimate(best),
                best.questions or (baseline.questions if baseline else 0),
            )
        )
    if test is not None:
        rows.append((f"{terms.untrained}, test", "", test.before, test.questions))
        rows.append((f"member #{test.index}, test", "best", test.after, test.questions))
        rows.append(("paired difference, test", "", test.gain, test.questions))
        warning = verdict(test, terms)
        lead += f" {warning}" if warning else ""
    cells = [
        (kind, [name, estimate, questions])
        for name, kind, estimate, questions in rows
        if estimate is not None
    ]
    return f'<p class="quiet">{escape(lead)}</p>\n{_table(["", "fitness ± SE", terms.questions], cells)}'


def _costs(summary: RunSummary) -> str:
    """Return the table of time and tokens by kind of work: phases of learning steps, evaluations and the test."""
    if not summary.generations:
        return ""
    last = summary.generations[-1]
    terms = summary.terms
    test = summary.test
    steps = [step for step in summary.steps if step.step < last.step]
    seconds = {
        name: math.fsum(step.phases.get(name) or 0.0 for step in steps)
        for name in ("sampling", "scoring", "learning")
    }
    learning = math.fsum(seconds.values())
    if last.timesteps is None:
        tokens = {"learning": last.tokens}
    else:
        tokens = {"sampling": last.timesteps}
    for name, cost in {
        "evaluations": last.evaluation,
        **({"test": test.cost} if test else {}),
    }.items():
        seconds[name], tokens[name] = cost.seconds, cost.tokens
    whole = math.fsum(seconds.values()) or 1.0
    rows = []
    for name, spent in seconds.items():
        share = 100 * spent / whole
        if 0 < share < 0.5:
            share_text = "< 1 %"
        else:
            share_text = f"{share:.0f} %"
        rows.append(("", [name, duration_text(spent), share_text, count_text(tokens.get(name))]))
    if learning:
        lead = f"{count_text(last.tokens / learning)} {terms.tokens} per second of learning steps."
    else:
        lead = ""
    if last.timesteps is None:
        lead += f" The {terms.tokens} of learning include those of sampling."
    if last.timesteps is not None:
        unit = "environment steps"
    else:
        unit = terms.tokens
    return _section("Costs", lead, _table(["work", "time", "share of time", unit], rows))


def _ancestry(summary: RunSummary) -> str:
    """Return the table of the best member's ancestors; empty before the first evaluation."""
    best = best_member(summary.generations)
    if best is None:
        return ""
    reports = reports_by_member(summary.generations)
    rows = [
        ("best" if ancestor.index == best.index else "",
         [f"#{ancestor.index}", _parent_text(ancestor.parent),
          f"{reports[ancestor.index][0].generation} to {ancestor.generation}",
          changes_text(ancestor.changes) or "–", *_values(ancestor, summary),
          score_text(ancestor.fitness, ancestor.standard_error), ancestor.reason])
        for ancestor in ancestors(summary, best)
    ]  # fmt: skip
    heads = [
        "member",
        "parent",
        "generations",
        "changed at birth",
        *summary.evolvable,
        "fitness at the end",
        "reason",
    ]
    return _section(f"Lineage of member #{best.index}", "", _table(heads, rows))


def _generations(summary: RunSummary) -> str:
    """Return the table of generations, and tables of the members of the latest."""
    if not summary.generations:
        return ""
    shown = summary.generations[-_MAX_TABLES:]
    tables = [_generation_table(summary, each) for each in shown]
    if len(shown) < len(summary.generations):
        lead = f"Members are listed for the last {len(shown)} generations."
    else:
        lead = ""
    heads = ["", "best", "fitness ± SE", "mean", "retired", "new budgets", "time so far"]
    rows = []
    for generation in summary.generations:
        best = generation.best
        scores = [member.fitness for member in generation.members if member.fitness is not None]
        cells = [
            generation.generation,
            f"#{best.index}",
            score_text(best.fitness, best.standard_error),
            score_text(sum(scores) / len(scores), None) if scores else "–",
            ", ".join(f"#{index}" for index in retired_members(generation).values()),
            ", ".join(changed_budgets(generation.plan)),
            duration_text(generation.seconds),
        ]
        rows.append(("", cells))
    return _section(
        "Generations", lead, _folded("All generations", _table(heads, rows), opened=True), *tables
    )


def _generation_table(summary: RunSummary, generation: GenerationReport) -> str:
    """Return the collapsible table of one generation's members."""
    terms = summary.terms
    best = generation.best
    measures = sorted(
        {name for each in generation.members for name in each.measured if len(each.measured) > 1}
    )
    rows = []
    for member in generation.members:
        if member.fitness is None:
            kind = "failed"
        elif member.index == best.index:
            kind = "best"
        else:
            kind = ""
        cells = [
            member.slot,
            f"#{member.index}",
            _parent_text(member.parent),
            *_values(member, summary),
            *(number_text(member.metrics.get(name)) for name in summary.metrics),
            (
                f"failed: {member.failed}"
                if member.failed
                else score_text(member.fitness, member.standard_error)
            ),
            *(member.measured.get(name, "–") for name in measures),
            count_text(member.tokens),
            count_text(member.evaluation.tokens),
            duration_text(member.seconds),
            member.reason,
        ]
        rows.append((kind, cells))
    heads = [
        "slot",
        "member",
        "parent",
        *summary.evolvable,
        *(METRICS[name][0] for name in summary.metrics),
    ]
    heads += ["fitness ± SE", *measures, terms.tokens, "evaluation", "time", "reason of birth"]
    words = (
        f"Generation {generation.generation}: best #{best.index},"
        f" {score_text(best.fitness, best.standard_error)}"
    )
    budgets = ", ".join(changed_budgets(generation.plan))
    words += f"; then {budgets}" if budgets else ""
    return _folded(words, _table(heads, rows), opened=generation is summary.generations[-1])


def _values(result: MemberReport, summary: RunSummary) -> Iterator[str]:
    """Yield the evolving hyperparameters of a member."""
    return (number_text(getattr(result.hyperparameters, name)) for name in summary.evolvable)


def _parent_text(parent: int | None) -> str:
    return "founder" if parent is None else f"#{parent}"


def _facts(summary: RunSummary) -> str:
    """Return the table of run facts: version, seed, task, schedule and so on."""
    rows = []
    for name, value in summary.facts.items():
        if name == "time" and isinstance(value, int | float) and 0 <= value < 1e11:
            rows.append(
                ("", ["started", f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"])
            )
        elif name not in ("time", "members", "lineage"):  # members have their own tables
            if isinstance(value, str):
                text = value
            else:
                text = json.dumps(value, ensure_ascii=False)
            rows.append(("", [name.replace("_", " "), shorten(text, 2000)]))
    rows += [("", ["changed data", shorten(change, 2000)]) for change in summary.changed_data]
    return _section("Run", "", _table(["", ""], rows))


def _completions(summary: RunSummary) -> str:
    """Return one completion of each generation's best member, and of all members of the last.

    Empty without any.
    """
    examples_by_generation: dict[int, Sequence[Example]] = {}
    for generation in summary.generations:
        best = [
            example for example in generation.examples if example.index == generation.best.index
        ]
        last = generation is summary.generations[-1]
        if last:
            chosen = generation.examples
        else:
            chosen = tuple(best) or generation.examples[:1]
        if chosen:
            examples_by_generation[generation.generation] = chosen
    if not examples_by_generation:
        return ""
    texts = 2 * sum(map(len, examples_by_generation.values()))
    limit = max(200, min(_MAX_TEXT, _MAX_TOTAL_TEXT // texts))
    parts = []
    for number, examples in examples_by_generation.items():
        blocks = "".join(_example_block(example, limit) for example in examples)
        parts.append(
            _folded(f"Generation {number}", blocks, opened=number == max(examples_by_generation))
        )
    lead = (
        "One completion of each generation's best member, and of all members of the last one. Texts"
        " are untrusted."
    )
    return _section("Sample completions", lead, *parts)


def _example_block(example: Example, limit: int) -> str:
    """Return the markup of one completion with its prompt, reward and advantage."""
    prompt, completion = (
        escape(shorten(text, limit)) for text in (example.prompt, example.completion)
    )
    score = f"reward {number_text(example.reward)}, advantage {number_text(example.advantage)}"
    suffix = ", truncated" if example.truncated else ""
    # Browsers drop a newline right after <pre>.
    return (
        f'<p class="quiet">member #{example.index}, prompt</p><pre>\n{prompt}</pre>'
        f'<p class="quiet">completion, {escape(score)}{suffix}</p><pre>\n{completion}</pre><hr>'
    )
