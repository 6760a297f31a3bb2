"""The part of a screen that is drawn again and again: at the foot of a terminal, or below a notebook's cell."""

import importlib
import io
import time
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live

from evogrpo.training.display.console import VisibleConsole

SECONDS_BETWEEN_DRAWINGS = 0.5  # in a notebook, whose every drawing is a message


class Region(Protocol):
    """Drawn again and again while it is entered, and gone afterwards; may be entered again."""

    def __enter__(self) -> Self:
        """Begin to draw."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe it out."""
        ...

    def refresh(self) -> None:
        """Say that something has changed; it is drawn now or soon."""
        ...


class TerminalRegion:
    """At the foot of a terminal, drawn by a thread of its own; what anybody prints meanwhile goes above it.

    Args:
        console: Of the terminal.
        shown: What to draw.
    """

    def __init__(self, console: Console, shown: RenderableType) -> None:
        self._console, self._shown = console, shown
        self._live: Live | None = None

    def __enter__(self) -> Self:
        # A fresh one each time: an old one would wipe out the lines where it last stood.
        self._live = Live(self._shown, console=self._console, refresh_per_second=8, transient=True)
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        """Do nothing: the thread looks eight times a second."""


class NotebookRegion:
    """Below a notebook's cell, drawn when something has changed.

    Args:
        console: Of the notebook.
        shown: What to draw.
    """

    def __init__(self, console: Console, shown: RenderableType) -> None:
        self._console, self._shown = console, shown
        self._handle: Any = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        pages = importlib.import_module("IPython.display")  # there wherever a notebook is
        self._handle = pages.display(pages.HTML(self._html()), display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)

    def refresh(self) -> None:
        """Draw, unless that was done a moment ago."""
        if time.monotonic() - self._drawn >= SECONDS_BETWEEN_DRAWINGS:
            self._handle.update({"text/html": self._html(), "text/plain": ""}, raw=True)

    def _html(self) -> str:
        self._drawn = time.monotonic()
        page = VisibleConsole(file=io.StringIO(), record=True, width=self._console.width, force_jupyter=False)
        page.print(self._shown)
        return page.export_html(inline_styles=True, code_format=_PAGE)


_PAGE = "<pre style=\"font-family: Menlo, 'DejaVu Sans Mono', consolas, monospace; line-height: normal\">{code}</pre>"


def region(console: Console, shown: RenderableType) -> Region | None:
    """Return where something can be drawn again and again; None for a file, a pipe and a terminal that cannot."""
    if console.is_jupyter:
        return NotebookRegion(console, shown)
    return TerminalRegion(console, shown) if console.is_terminal else None
