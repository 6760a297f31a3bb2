"""HTML fragments in which every value of a run is escaped text."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from evogrpo.text import printable


def escape(value: Any) -> str:
    """Return a value as escaped HTML text."""
    return html.escape(printable(str(value)))


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return a table.

    Args:
        heads: Column headings.
        rows: CSS class and cells of each row; cells are escaped, unless they are `Markup`.
    """
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f"<tr{f' class={_quoted(kind)}' if kind else ''}>{''.join(map(_cell, cells))}</tr>\n" for kind, cells in rows
    )
    label = escape(f"table of {', '.join(text for text in heads if text) or 'facts'}")
    # The frame scrolls, so it must be focusable by keyboard.
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


class Markup(str):
    """HTML made of constants and escaped values; it is not escaped again."""


def _quoted(text: str) -> str:
    return f'"{escape(text)}"'


def _cell(value: Any) -> str:
    if isinstance(value, Markup):
        return f"<td>{value}</td>"
    text = str(value)
    return f'<td class="long">{escape(text)}</td>' if len(text) > 24 else f"<td>{escape(text)}</td>"


def section(title: str, lead: str, *inside: str) -> str:
    """Return a section; title and lead are text, the content is markup."""
    told = f'<p class="quiet">{escape(lead)}</p>\n' if lead else ""
    return f"<section><h2>{escape(title)}</h2>\n{told}" + "\n".join(inside) + "</section>"


def folded(summary: str, inside: str, *, opened: bool = False) -> str:
    """Return a collapsible block; the summary is text, `inside` is markup."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>\n{inside}</details>"


def embedded(values: Any) -> str:
    """Return JSON that is safe inside a script element.

    Args:
        values: Plain JSON values; numbers must be finite.
    """
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # No tag or comment can start or end in it; these characters occur in JSON strings only.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def bar(parts: Sequence[tuple[float, float, str]], *, label: str) -> Markup:
    """Return a horizontal bar as a picture.

    Args:
        parts: Start and end as fractions of the length, and the CSS class of each part.
        label: Text for screen readers.
    """
    drawn = "".join(
        f'<rect class="{escape(kind)}" x="{100 * low:.1f}" y="4" height="8" width="{100 * (high - low):.1f}"/>'
        for low, high, kind in parts
    )
    return Markup(
        f'<svg class="bar" viewBox="0 0 100 16" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{drawn}</svg>"
    )
