"""Interactive charts of the page: traces and layouts as plain data, which plotly.js draws."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from html import escape
from typing import Any

from evogrpo.reporting.charts import BASE, BEST, Chart, Line, RunCharts, by_colour, run_charts
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.setting_effects import SettingEffect, setting_effects
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import count_text, duration_text, pluralize

Plot = dict[str, Any]
"""A chart as plotly.js reads it: `data`, a list of traces, and `layout`."""
Details = Mapping[tuple[int, int], str]
"""Hover texts of members, by index and generation."""

# Maximum number of generations of a lineage chart with labels of members; with more, the labels
# would cover each other on a phone.
_MAX_NAMED = 10
# Height of a label above its line, in slots.
_LABEL_HEIGHT = 0.12
_GRID = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
_LAYOUT: Plot = {
    "font": {"size": 12, "family": "system-ui, sans-serif"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hoverlabel": {"bgcolor": "#30363d", "align": "left", "namelength": -1},
    "margin": {"l": 55, "r": 15, "t": 40, "b": 45},
    "height": 250,
    "hovermode": "closest",
    # So that a finger scrolls the page.
    "dragmode": False,
    "showlegend": False,
}


# Plotly reads a few HTML tags and entities in texts, but not that of a quotation mark.
_escaped = partial(escape, quote=False)


def page_charts(summary: RunSummary) -> dict[str, dict[str, Plot]]:
    """Return the charts of the page by section and by the id of their element.

    They have numbers and constants. Names and labels of settings, which are untrusted, are escaped.
    """
    run = run_charts(summary)
    details = {}
    for result in summary.members:
        details[result.index, result.generation] = _hover_text(result, summary)
    sections = {"Fitness": {"fitness": _fitness_plot(run, details)}}
    # One agent has no lineage.
    if len(summary.histories) > 1:
        lineage = {"lineage": _lineage_plot(run, details)}
        sections = {"Fitness and lineage": sections["Fitness"] | lineage}
    effects = setting_effects(summary, summary.task_settings)
    compared = [effect for effect in effects if len(effect.values) > 1]
    if compared:
        plots = {f"Effects-{number}": _effect_plot(each) for number, each in enumerate(compared)}
        sections["Task settings"] = plots
    for title, charts in (
        ("Settings over generations", run.hyperparameters),
        ("Learning steps", run.metrics),
    ):
        name = title.split()[0]
        plots = {f"{name}-{number}": _plot(chart, run) for number, chart in enumerate(charts)}
        if plots:
            sections[title] = plots
    return sections


def _hover_text(result: MemberReport, summary: RunSummary) -> str:
    """Return the hover text of a result: fitness, evolving hyperparameters, origin and cost."""
    get = result.hyperparameters.get
    values = [summary.labels.named(name, get(name)) for name in summary.shown_names]
    birth = "founder"
    if result.parent is not None:
        birth = f"child of #{result.parent}"
        # `born` may be a generation of an earlier run.
        first = summary.histories[result.index].results[0].generation
        if first > 1:
            birth += f", born after generation {first - 1}"
    tokens = f"{count_text(result.tokens)} {summary.terms.tokens}"
    lines = [
        f"fitness {result.estimate or '–'}",
        *map(_escaped, values),
        birth,
        f"slot {result.slot}, {tokens}, {duration_text(result.seconds)}",
    ]
    return "<br>".join(lines)


def _fitness_plot(run: RunCharts, details: Details) -> Plot:
    """Return the fitness chart with the untrained base and failures."""
    plot = _plot(run.fitness, run, details)
    traces = plot["data"]
    summary = run.summary
    # 1. The untrained base.
    if summary.start is not None:
        first, last = run.generations
        traces.append(
            {
                "x": [first - 1, last],
                "y": [summary.start.mean] * 2,
                "mode": "lines",
                "line": {"color": BASE, "dash": "dash", "width": 1.5},
                "name": f"{summary.terms.untrained}, {summary.split}",
                "hoverinfo": "name+y",
            }
        )
    # 2. Failures.
    if run.failures:
        marker = {"symbol": "x", "size": 9, "color": BASE}
        points = _points(run.failures, run.fitness, details)
        traces.append({**points, "mode": "markers", "marker": marker, "name": "failed"})
    legend = {"orientation": "h", "y": -0.14}
    plot["layout"] |= {"height": 440, "showlegend": True, "legend": legend}
    return plot


def _lineage_plot(run: RunCharts, details: Details) -> Plot:
    """Return the lineage chart; births of few generations are labelled."""
    chart = run.lineage
    plot = _plot(chart, run, details)
    if len(run.summary.generations) <= _MAX_NAMED and chart.names:
        points = [birth.points[0] for birth in chart.births]
        plot["data"].append(
            {
                "x": [point.x for point in points],
                "y": [point.y + _LABEL_HEIGHT for point in points],
                "text": [f" #{birth.index}" for birth in chart.births],
                "mode": "text",
                "textposition": "top right",
                "hoverinfo": "skip",
            }
        )
    # One row for each slot, up to a height.
    slots = chart.limits[1] + 0.5
    plot["layout"]["height"] = min(130 + 32 * slots, 480)
    return plot


def _effect_plot(effect: SettingEffect) -> Plot:
    """Return fitness by value of a setting: the mean of lineages, and a small point for each."""
    # 1. Small points of lineages, and the means with their errors.
    lineages: Plot = {"x": [], "y": []}
    means: Plot = {"x": [], "y": []}
    errors = []
    ticks = []
    for position, value in enumerate(effect.values):
        lineages["x"] += value.lineage_means
        lineages["y"] += [position] * value.lineages
        means["x"].append(value.fitness)
        means["y"].append(position)
        errors.append(value.standard_error or 0.0)
        counts = pluralize(value.members, "member")
        # Members of one lineage are no independent evidence.
        if value.lineages != value.members:
            counts += f" of {pluralize(value.lineages, 'lineage')}"
        ticks.append(f"{_escaped(value.value)}<br>{counts}")
    shared = {"mode": "markers", "hoverinfo": "x"}
    small = {"color": BASE, "size": 5, "opacity": 0.7}
    bars = {"array": errors, "thickness": 2, "color": BEST}
    traces = [
        {**lineages, **shared, "marker": small},
        {**means, **shared, "marker": {"color": BEST, "size": 11}, "error_x": bars},
    ]
    # 2. Axes. The first value is at the top.
    x_title = {"text": "relative fitness", "standoff": 4}
    x_axis = {**_GRID, "title": x_title, "zeroline": True, "zerolinecolor": BASE}
    x_axis |= {"nticks": 4, "tickangle": 0}
    y_axis: Plot = {"tickvals": means["y"], "ticktext": ticks, "automargin": True}
    y_axis |= {"range": [len(ticks) - 0.5, -0.5], "showgrid": False, "zeroline": False}
    text = f"<b>{_escaped(short_name(effect.name))}</b>"
    title = {"text": text, "font": {"size": 13}, "x": 0.01}
    layout = {**_LAYOUT, "title": title, "xaxis": x_axis, "yaxis": y_axis}
    return {"data": traces, "layout": {**layout, "height": 95 + 45 * len(ticks)}}


def _plot(chart: Chart, run: RunCharts, details: Details | None = None) -> Plot:
    """Return the traces and the layout of a chart."""
    traces: list[Plot] = []
    # 1. Lines and their bands. The best member and the first of the other slots are in the legend.
    for number, (colour, lines) in enumerate(by_colour(chart.lines).items()):
        style = run.style(colour)
        if chart.errors:
            traces.append({**_bands(lines), "fillcolor": colour, "opacity": style.shade})
        line = {
            "mode": "lines+markers" if chart.marked else "lines",
            "line": {"color": colour, "width": style.width},
            "marker": {"size": style.marker},
            "opacity": style.opacity,
            "name": run.label(colour),
            "showlegend": number == 0 or colour == BEST,
        }
        traces.append(_points(lines, chart, details) | line)
    # 2. Births.
    for colour, births in by_colour(chart.births).items():
        marker = {"color": colour, "size": run.style(colour).birth}
        points = _points(births, chart, details)
        traces.append({**points, "mode": "markers", "marker": marker})
    # 3. Axes. Few generations or steps have one tick each.
    firsts = [line.points[0].x for line in chart.lines]
    lasts = [line.points[-1].x for line in chart.lines]
    start = min(firsts, default=0)
    end = max(lasts, default=1)
    length = end - start
    x_axis: Plot = {"title": {"text": chart.x_title, "standoff": 4}, **_GRID}
    # Space for points and labels at both ends.
    space = max(length, 1)
    x_axis["range"] = [start - 0.03 * space, end + 0.06 * space]
    if length < 9:
        x_axis["dtick"] = 1
    else:
        x_axis["nticks"] = 9
    # The limits of a logarithmic axis are exponents of ten.
    y_axis: Plot = {"type": "linear", "range": chart.limits, **_GRID}
    if chart.log:
        exponents = [math.log10(limit) for limit in chart.limits]
        y_axis |= {"type": "log", "range": exponents}
    # plotly would label 0.02 as "2".
    if chart.ticks:
        texts = [_escaped(chart.value_text(tick)) for tick in chart.ticks]
        # Names may be wider than the margin.
        y_axis |= {"tickvals": chart.ticks, "ticktext": texts, "automargin": bool(chart.names)}
    else:
        y_axis |= {"nticks": 6, "exponentformat": "e"}
    text = f"<b>{_escaped(chart.title)}</b> {chart.unit}"
    title = {"text": text, "font": {"size": 13}, "x": 0.01}
    layout = {**_LAYOUT, "title": title, "xaxis": x_axis, "yaxis": y_axis}
    return {"data": traces, "layout": layout}


def _points(lines: Iterable[Line], chart: Chart, details: Details | None) -> Plot:
    """Return the points of lines as x, y and hover texts, with gaps between the lines."""
    x: list[float | None] = []
    y: list[float | None] = []
    texts: list[str] = []
    for line in lines:
        for point in line.points:
            x.append(point.x)
            y.append(float(f"{point.y:.5g}"))
            text = _escaped(f"{chart.title} {chart.value_text(point.y)}")
            if details is not None:
                text = details.get((line.index, point.generation), text)
            texts.append(f"<b>#{line.index}</b> in generation {point.generation}<br>{text}")
        # A gap ends the line.
        x.append(None)
        y.append(None)
        texts.append("")
    return {"x": x, "y": y, "hovertext": texts, "hoverinfo": "text"}


def _bands(lines: Iterable[Line]) -> Plot:
    """Return the areas of ± one standard error around lines."""
    x: list[float | None] = []
    y: list[float | None] = []
    for line in lines:
        # The outline runs along the upper edge, and back along the lower one.
        back = line.points[::-1]
        x += [point.x for point in line.points + back] + [None]
        y += [point.y + point.error for point in line.points]
        y += [point.y - point.error for point in back] + [None]
    return {
        "x": x,
        "y": y,
        "fill": "toself",
        "mode": "none",
        "hoverinfo": "skip",
        "showlegend": False,
    }
