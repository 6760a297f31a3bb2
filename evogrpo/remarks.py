"""Warnings, laid at the door of whoever called the library."""

import sys
import warnings
from types import FrameType

from evogrpo.processes import speaks


def remark(message: str, *, together: bool = True) -> None:
    """Warn, as if by the line of the program that called into the library, however deep this is called.

    Args:
        message: One sentence or more, for the user.
        together: Whether all processes that train together come to this, so that one of them tells; otherwise whoever
            finds it does.
    """
    if together and not speaks():
        return
    caller, level = 1, 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None:
        if _ours(str(frame.f_globals.get("__name__", ""))):  # others may lie between, such as torch's decorators
            caller = level + 1
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=caller)


def _ours(module: str) -> bool:
    return module.startswith("evogrpo.") and not module.startswith("evogrpo.cli")
