"""Warnings of a run, laid at the door of whoever runs it."""

import sys
import warnings

from evogrpo.processes import processes


def remark(message: str) -> None:
    """Warn, as if by the line of the caller's program that iterates over the run, however deep this is called.

    Of several processes that train together, which all have come to this, one does.
    """
    if not processes().leads:
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _ours(str(frame.f_globals.get("__name__", ""))):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _ours(module: str) -> bool:
    return module.startswith("evogrpo.") and not module.startswith("evogrpo.cli")
