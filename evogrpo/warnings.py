"""Warnings that point at the user's line, and are recorded by a run."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from evogrpo.distributed import is_rank_zero
from evogrpo.text import printable

_LITERAL_NEWLINE = re.compile(r"^\\n|\\n(?![a-z])")
"""A backslash and an n. Within a text, LaTeX such as `\\nabla` is left out."""
_record: ContextVar[Callable[[str], object] | None] = ContextVar("record", default=None)
"""Function that is called with each warning; None outside of runs."""


@contextmanager
def recorded_by(record: Callable[[str], object]) -> Iterator[None]:
    """Call `record` with the text of each warning of the block."""
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


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
    record = _record.get()
    if record is not None:
        record(message)
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
