"""How far the work under way has come: told by whoever computes, heard by whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, float], None]
"""(what is being done, in words; which part of it is done, from 0 to 1)."""

_LISTENER: ContextVar[Listener | None] = ContextVar("evogrpo tally listener", default=None)


class Tally:
    """Counts one piece of work, and tells the listener of this context; where nobody listens, nothing is counted.

    Args:
        what: What is being done, in words, such as "writing 64 completions".
        total: How much of it there is, in any unit.
    """

    def __init__(self, what: str, total: float) -> None:
        self._what, self._total, self._done, self._listener = what, total, 0.0, _LISTENER.get()
        self.reach(0.0)

    def add(self, amount: float) -> None:
        """Count a further amount; work that memory made begin anew never counts for more than all of it."""
        if self._listener is not None:
            self.reach(self._done + amount)

    def reach(self, amount: float) -> None:
        """Set how much is done."""
        if self._listener is not None:
            self._done = min(amount, self._total)
            self._listener(self._what, self._done / self._total if self._total else 1.0)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Let a listener hear of all work inside the block, in this thread; it must be quick and raise nothing."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
