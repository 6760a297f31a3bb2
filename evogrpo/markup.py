"""HTML in which every value of a run is text: escaped in elements and attributes, and inert where scripts read it."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.text import number_text, printable


def escape(value: Any) -> str:
    """Return any value as text that a browser shows and never acts on."""
    return html.escape(printable(str(value)))


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]], *, caption: str = "") -> str:
    """Return a table.

    Args:
        heads: Of its columns.
        rows: A class and the cells of each; cells are escaped, unless they are `Markup`.
        caption: What it is, for those who do not see the heading above it.
    """
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f"<tr{f' class={_quoted(kind)}' if kind else ''}>{''.join(map(_cell, cells))}</tr>\n" for kind, cells in rows
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = escape(caption or f"table of {', '.join(text for text in heads if text) or 'facts'}")
    # The frame scrolls, so the keyboard must reach it.
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table>{named}'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


class Markup(str):
    """HTML that is finished: made by this package of constants and escaped values."""


def _quoted(text: str) -> str:
    return f'"{escape(text)}"'


def _cell(value: Any) -> str:
    if isinstance(value, Markup):
        return f"<td>{value}</td>"
    text = str(value)
    return f'<td class="long">{escape(text)}</td>' if len(text) > 24 else f"<td>{escape(text)}</td>"


def section(title: str, lead: str, *inside: str) -> str:
    """Return a section: its title and lead are text, what is inside is markup."""
    told = f'<p class="quiet">{escape(lead)}</p>\n' if lead else ""
    return f"<section><h2>{escape(title)}</h2>\n{told}" + "\n".join(inside) + "</section>"


def folded(summary: str, inside: str, *, opened: bool = False) -> str:
    """Return what is shown when its line is clicked; `inside` is markup, the line is text."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>\n{inside}</details>"


def embedded(values: Any) -> str:
    """Return JSON that may stand inside of a script element whatever texts it holds.

    Args:
        values: Plain JSON values; numbers must be finite.
    """
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # No tag or comment can begin or end in it, and outside of strings these characters do not occur.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def bar(parts: Sequence[tuple[float, float, str]], *, label: str, marks: Sequence[float] = ()) -> Markup:
    """Return a horizontal bar as a picture.

    Args:
        parts: From where to where, as shares of its length, and the class of each.
        label: What it says, for those who do not see it.
        marks: Shares at which a line stands across.
    """
    drawn = "".join(
        f'<rect class="{escape(kind)}" x="{100 * low:.1f}" y="4" height="8" width="{100 * (high - low):.1f}"/>'
        for low, high, kind in parts
    )
    drawn += "".join(f'<path class="mark" d="M{100 * at:.1f} 1V15"/>' for at in marks)
    return Markup(
        f'<svg class="bar" viewBox="0 0 100 16" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{drawn}</svg>"
    )


def sparkline(values: Sequence[float | None], *, label: str) -> Markup:
    """Return a small curve of numbers in a row, as a picture in the colour of the text around it.

    Args:
        values: From left to right; None and what is not finite leave a gap.
        label: What it shows, for those who do not see it.
    """
    shown = [(place, value) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not shown:
        return Markup("")
    low, high = min(value for _, value in shown), max(value for _, value in shown)
    across, up = 76 / max(len(values) - 1, 1), 12 / ((high - low) or 1.0)
    points = [(2 + across * place, 14 - up * (value - low) if high > low else 8.0) for place, value in shown]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    return Markup(
        f'<svg width="80" height="16" viewBox="0 0 80 16" role="img" aria-label="{escape(label)}">'
        f'<title>{escape(label)}</title><polyline points="{line}" fill="none" stroke="currentColor"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="currentColor"/></svg>'
    )


def card(
    title: str, facts: Sequence[Any], heads: Sequence[str] = (), rows: Iterable[Sequence[Any]] = (), best: int = -1
) -> str:
    """Return what a notebook shows of a value: a title, facts behind it, and a table; without style sheet or script.

    Args:
        title: What it is.
        facts: Beside the title; escaped, unless they are `Markup`.
        heads: Of the table's columns; none = no table.
        rows: Their cells; likewise.
        best: Number of a row that stands out.
    """
    head = "".join(f'<th style="text-align:left">{escape(text)}</th>' for text in heads)
    weight = {best: ' style="font-weight:bold"'}
    body = "".join(
        f"<tr{weight.get(number, '')}>"
        + "".join(f'<td style="text-align:left">{_finished(each)}</td>' for each in cells)
        + "</tr>"
        for number, cells in enumerate(rows)
    )
    told = " · ".join(map(_finished, facts))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if heads else ""
    return f"<div><p><strong>{escape(title)}</strong> {told}</p>{table}</div>"


@dataclass(frozen=True, kw_only=True)
class MemberRow:
    """A member in a notebook's table.

    Attributes:
        slot: Where it lives.
        index: Who it is.
        parent: Whom it was cloned from; None for a founder.
        values: Its hyperparameters by name.
        worth: Its fitness, or what became of it, in words.
        last: What stands in the last column; text, or `Markup`.
    """

    slot: int
    index: int
    parent: int | None
    values: Mapping[str, float | str | None]
    worth: str
    last: str


def members_card(
    title: str, facts: Sequence[str], rows: Sequence[MemberRow], evolving: Sequence[str], last: str, best: int | None
) -> str:
    """Return what a notebook shows of members.

    Args:
        title: What they are.
        facts: Beside the title.
        rows: One for each.
        evolving: The hyperparameters to show; where there are none, those that matter in any run.
        last: The head of the last column.
        best: Index of the member that stands out.
    """
    names = list(evolving) or ("lr", "clip_coef", "group_size")
    cells = [
        (
            row.slot,
            f"#{row.index}",
            "–" if row.parent is None else f"#{row.parent}",
            *(number_text(row.values[name]) for name in names),
            row.worth,
            row.last,
        )
        for row in rows
    ]
    place = next((number for number, row in enumerate(rows) if row.index == best), -1)
    return card(title, facts, ("slot", "member", "parent", *names, "fitness ± SE", last), cells, place)


def _finished(value: Any) -> str:
    return value if isinstance(value, Markup) else escape(value)
