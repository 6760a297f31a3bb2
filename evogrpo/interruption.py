"""Abandoning work that takes long: whoever can undo it lets it be interrupted, and its loops look now and then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Interrupted(BaseException):
    """Work was abandoned half-way, because whoever asked for it wants to stop."""


_asked: ContextVar[Callable[[], bool] | None] = ContextVar("asked", default=None)


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
