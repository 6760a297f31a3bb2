"""Consoles for output, errors and warnings."""

import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from evogrpo.distributed import processes
from evogrpo.text import printable, relative_path, shown

# Characters per line of a log file.
LOG_WIDTH = 120
# Characters per line below a notebook cell that fit without scrolling.
NOTEBOOK_WIDTH = 92


class VisibleConsole(Console):
    """Console that prints untrusted text literally: no markup, and control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            highlight=False, markup=False, emoji=False, legacy_windows=False, **options
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to a text with escaped control characters."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render a renderable with control characters escaped."""
        for segment in super().render(renderable, options):
            # Control segments are rich's own, such as movements of the cursor.
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))


def make_console(stream: TextIO | None = None, *, all_ranks: bool = False) -> Console:
    """Return a console on a stream, stdout by default.

    Colours and control codes only on a terminal.

    Only rank 0 prints, unless `all_ranks` is True.
    """
    stream = stream or sys.stdout
    # Terminals that cannot move the cursor name themselves "dumb".
    terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    width: int | None = LOG_WIDTH
    columns = os.environ.get("COLUMNS")
    # With 0, which programs without a window set, rich would print nothing.
    if columns != "0" and (columns is not None or stream.isatty()):
        width = None  # rich finds it
    quiet = not (all_ranks or processes().is_rank_zero)
    # `force_terminal` overrides the environment variables by which rich would treat a file as a
    # terminal.
    return VisibleConsole(file=stream, force_terminal=terminal, width=width, quiet=quiet)


def console_for(progress: bool | None) -> Console | None:
    """Return the console that shows the progress of a run, or None.

    Args:
        progress: Show it; None = on a terminal and in a notebook.

    Raises:
        ValueError: If it is neither True, False nor None.
    """
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(
            f"progress must be True, False or None (shown on a terminal), got {shown(progress)}."
        )
    # A program without a console has no stdout; of several ranks, one shows progress.
    if progress is False or sys.stdout is None or not processes().is_rank_zero:
        return None
    width: int | None = NOTEBOOK_WIDTH
    if "JUPYTER_COLUMNS" in os.environ:
        width = None  # rich reads it from this variable
    notebook = VisibleConsole(width=width)
    if notebook.is_jupyter:
        return notebook
    if progress or sys.stdout.isatty():
        # A terminal may be closed during a run.
        stream: Any = _ErrorIgnoringStream(sys.stdout, quiet_pipe=True)
        return make_console(stream)
    return None


@contextmanager
def spinner(console: Console, activity: str) -> Iterator[None]:
    """Show a spinner with the activity, and warnings above it; a log gets the warnings only."""
    if not console.is_terminal:
        yield
        return
    with console.status(f"{activity}…", spinner="dots"), clean_warnings(console):
        yield


def command(*words: str | Path) -> str:
    """Return an evogrpo command line, quoted for the shell."""
    # `evogrpo` is on the path only if its virtual environment is activated.
    program = f"{shlex.quote(sys.executable)} -m evogrpo"
    if shutil.which("evogrpo"):
        program = "evogrpo"
    texts = [relative_path(word) if isinstance(word, Path) else word for word in words]
    return f"{program} {shlex.join(texts)}"


def show_command(console: Console, name: str, line: str) -> None:
    """Print a command and its purpose."""
    # Without line breaks of its own, so that the command can be copied.
    text = Text.assemble((f"{name:<14} ", "dim"), (printable(line), "cyan"))
    console.print(text, soft_wrap=True)


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """Print names and values: as a grid on a terminal, as lines in a log."""
    # A log has no width: one line per name.
    if not console.is_terminal:
        width = max([18, *map(len, rows)])
        for name, value in rows.items():
            line = Text.assemble((f"{name:<{width}} ", "dim"), printable(value))
            console.print(line, soft_wrap=True)
        return
    # Long values are folded within their column.
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=18)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    console.print(table)


# Some libraries colour their warnings.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def print_error(message: str) -> None:
    """Print an error without traceback."""
    console = make_console(sys.stderr, all_ranks=True)
    console.print(
        Text.assemble(("error: ", "bold red"), printable(message)),
        soft_wrap=not console.is_terminal,
    )


def print_warning(message: str, console: Console | None = None) -> None:
    """Print a warning."""
    console = console or make_console(sys.stderr)
    console.print(
        Text.assemble(("warning: ", "bold yellow"), printable(message)),
        soft_wrap=not console.is_terminal,
    )


class _ErrorIgnoringStream:
    """Stream that discards output after the first error of the wrapped stream."""

    def __init__(self, stream: TextIO, *, quiet_pipe: bool) -> None:
        self._stream = stream
        self._quiet_pipe = quiet_pipe
        self.failure = ""
        self.lost = False  # output was discarded, and not because the reader closed its pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self.failure:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:  # a closed pipe, a full disk, a closed stream
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self.failure:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Discard all further output, and warn if stdout was lost."""
        self.failure = str(getattr(error, "strerror", None) or error)
        closed_pipe = isinstance(error, BrokenPipeError)
        self.lost = not closed_pipe
        # At exit Python flushes its buffer, which would fail again.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if closed_pipe and self._quiet_pipe:
            return
        # Warn, on stderr, if this is stdout: the original one, or one that has replaced it.
        if self._stream is sys.__stdout__ or getattr(sys.stdout, "failure", None):
            print_warning(f"Output stopped, because it cannot be written: {self.failure}")


@contextmanager
def ignore_output_errors(*, quiet_pipe: bool) -> Iterator[Callable[[], bool]]:
    """Ignore errors of writing to stdout and stderr, such as a closed pipe or a full disk.

    Yield a function that returns True once output to stdout was lost for another reason than a
    closed pipe.

    Args:
        quiet_pipe: Do not warn of a closed pipe.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    output = _ErrorIgnoringStream(stdout, quiet_pipe=quiet_pipe)
    sys.stdout = output
    sys.stderr = _ErrorIgnoringStream(stderr, quiet_pipe=True)

    def lost() -> bool:
        output.flush()  # a short output has not been written yet
        return output.lost

    try:
        yield lost
    finally:
        sys.stdout = stdout
        sys.stderr = stderr


@contextmanager
def clean_warnings(console: Console | None = None) -> Iterator[None]:
    """Print warnings of evogrpo and of user files as lines; hide those of other libraries."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print_warning(_COLOURS.sub("", str(message)), console)

    with warnings.catch_warnings():
        # The filter that is added last is tried first.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"evogrpo([._]|$)")
        warnings.showwarning = show
        yield
