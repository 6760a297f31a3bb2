"""Completions that are finished while others are being written: told by whoever writes, heard by whoever goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[Sequence[int], Sequence[Sequence[int]]], None]
"""Takes numbers of rows, and the tokens of their completions."""

_LISTENER: ContextVar[tuple[object, Listener] | None] = ContextVar("evogrpo finished listener", default=None)


def listened(rows: object) -> bool:
    """Return whether anybody in this context wants to hear of these very rows.

    Whoever writes some of them on behalf of another, numbered otherwise then, has others and tells nothing.
    """
    heard = _LISTENER.get()
    return heard is not None and heard[0] is rows


def tell(rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
    """Tell the listener of this context which rows are finished; where nobody listens, nothing happens.

    Whoever is `listened` to tells every row once, and never writes it anew. Told now and then although none is
    finished, the listener can go on with those it has.

    Args:
        rows: Their numbers among the rows that the listener's sampler was given.
        completions: Their token ids without padding; a final EOS is included.
    """
    heard = _LISTENER.get()
    if heard is not None:
        heard[1](rows, completions)


@contextmanager
def heard_by(listener: Listener, rows: object) -> Iterator[None]:
    """Let a listener hear what of these rows is finished inside the block, in this thread."""
    token = _LISTENER.set((rows, listener))
    try:
        yield
    finally:
        _LISTENER.reset(token)
