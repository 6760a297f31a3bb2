"""Warnings that point at the user's line, and are recorded by a run."""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from evogrpo.distributed import is_rank_zero
from evogrpo.text import printable

_LITERAL_NEWLINE = re.compile(r"^\\n|\\n(?![a-z])")
"""A backslash and an n. Within a text, LaTeX such as `\\nabla` is left out."""
_logger = logging.getLogger("evogrpo.warnings")
"""Gets each warning too, for the records of runs. Python's `warnings` show it."""
_logger.propagate = False
_logger.setLevel(logging.WARNING)
_logger.addHandler(logging.NullHandler())


class _Recorder(logging.Handler):
    """Calls a function with the text of each warning."""

    def __init__(self, record: Callable[[str], object]) -> None:
        super().__init__()
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        """Call the function."""
        self._record(record.getMessage())


@contextmanager
def recorded_by(record: Callable[[str], object]) -> Iterator[None]:
    """Call `record` with the text of each warning of the block."""
    recorder = _Recorder(record)
    # logging.config disables loggers that it does not know.
    _logger.disabled = False
    _logger.addHandler(recorder)
    try:
        yield
    finally:
        _logger.removeHandler(recorder)


def warn(
    message: str, *, category: type[Warning] = UserWarning, rank_zero_only: bool = True
) -> None:
    """Issue a warning that points at the user's line, not at this library.

    Args:
        message: Text of the warning.
        category: FutureWarning for a deprecated name; see CONTRIBUTING.md.
        rank_zero_only: Warn on rank 0 only. Set to False if a single rank may reach the call.
    """
    if rank_zero_only and not is_rank_zero():
        return
    _logger.warning("%s", message)
    # Point at the caller of the outermost frame of this library; frames of torch may lie between
    # its frames. The command line counts as the user's program.
    stacklevel = 1
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("evogrpo.") and not module.startswith("evogrpo.cli"):
            stacklevel = level + 1
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=stacklevel)


def warn_of_literal_newline(what: str, text: str) -> None:
    r"""Warn of a text with a backslash and an n, as YAML reads '\n' in single quotes.

    Args:
        what: Name of the setting.
        text: Its value.
    """
    match = _LITERAL_NEWLINE.search(text)
    if match is not None:
        found = printable(text[match.start() :][:20])
        warn(
            f"{what}: '{found}' begins with a backslash and an n, which are no line break. In YAML"
            " write the text in double quotes."
        )
