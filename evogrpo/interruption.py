"""Abandoning work that takes long: whoever can undo it lets it be interrupted, and its loops look now and then.

What it changes is copied before, or changed last of all, when it is not abandoned any more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Interrupted(BaseException):
    """Work was abandoned half-way, because whoever asked for it wants to stop."""


class Undo:
    """How the changes of work that is abandoned half-way are undone.

    Args:
        keep: Makes a copy of what there is.
        settle: Sees to it that the work is not abandoned any more.

    Attributes:
        settle: As given.
    """

    def __init__(self, keep: Callable[[], None], settle: Callable[[], None]) -> None:
        self._keep, self.settle, self._kept = keep, settle, False

    @property
    def kept(self) -> bool:
        """Whether there is a copy."""
        return self._kept

    def keep(self) -> None:
        """Make the copy, if there is none."""
        if not self._kept:
            self._keep()
            self._kept = True


_asked: ContextVar[Callable[[], bool] | None] = ContextVar("asked", default=None)
_undo: ContextVar[Undo | None] = ContextVar("undo", default=None)


@contextmanager
def interruptible(asked: Callable[[], bool]) -> Iterator[None]:
    """Let `give_way` raise in the block as soon as `asked()` is true; never around a `yield` of a generator."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def give_way() -> None:
    """Raise `Interrupted` if the surrounding work is to be abandoned; called at least once in a second or two.

    It costs less than a microsecond. What is called between two looks cannot be abandoned: a forward pass, a step of
    the user's environment.
    """
    asked = _asked.get()
    if asked is not None and asked():
        raise Interrupted


@contextmanager
def undone_by(undo: Undo) -> Iterator[None]:
    """Let `before_changes` know how changes in the block would be undone."""
    token = _undo.set(undo)
    try:
        yield
    finally:
        _undo.reset(token)


def before_changes(*, last: bool) -> Callable[[], None] | None:
    """Be called by whoever is about to change what abandoned work leaves as it was.

    Args:
        last: Whether these are the work's last changes, and can all be made at its end, in no time.

    Returns:
        None if changes may be made from here on: nobody undoes them, or there is a copy. Otherwise what has to be
        called right before them, once all is done that can be abandoned; that costs no copy.
    """
    undo = _undo.get()
    if undo is None:
        return None
    if last and not undo.kept:
        return undo.settle
    undo.keep()
    return None
