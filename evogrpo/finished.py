"""Completions that are finished while others are being written: told by whoever writes, heard by whoever goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[Sequence[int], Sequence[Sequence[int]]], None]
"""Takes numbers of rows, and the tokens of their completions."""

_LISTENER: ContextVar[Listener | None] = ContextVar("evogrpo finished listener", default=None)


def listened() -> bool:
    """Return whether anybody in this context wants to hear of finished completions."""
    return _LISTENER.get() is not None


def tell(rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
    """Tell the listener of this context which rows are finished; where nobody listens, nothing happens.

    Whoever tells anything tells every row once, and never writes it anew. Told now and then although none is finished,
    the listener can go on with those it has.

    Args:
        rows: Their numbers among the rows that the listener's sampler was given.
        completions: Their token ids without padding; a final EOS is included.
    """
    listener = _LISTENER.get()
    if listener is None:
        return
    with heard_by(None):  # whoever goes on with a completion may have others written for that
        listener(rows, completions)


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Let a listener, or nobody, hear what is finished inside the block, in this thread."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
