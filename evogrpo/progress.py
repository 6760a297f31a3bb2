"""How far the work under way has come: told by whoever computes, heard by whoever shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Activity = Literal["writing", "playing", "rewarding", "scoring", "learning"]


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work, as far as it has come.

    Attributes:
        doing: What is being done.
        count: With how many.
        noun: Of what; "completions", "episodes" or "actions".
        part: Which part of it is done, from 0 to 1.
    """

    doing: Activity
    count: int
    noun: str
    part: float


Listener = Callable[[Work], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("evogrpo progress listener", default=None)


class ProgressCounter:
    """Counts one piece of work, and tells the listener of this context; where nobody listens, nothing is counted.

    Args:
        doing: What is being done.
        count: With how many.
        noun: Of what.
    """

    def __init__(self, doing: Activity, count: int, noun: str) -> None:
        self._doing, self._count, self._noun, self._listener = doing, count, noun, _LISTENER.get()
        self._done = 0.0
        self.reach(0.0)

    def add(self, amount: float) -> None:
        """Count a further amount; work that memory made begin anew never counts for more than all of it."""
        self.reach(self._done + amount)

    def reach(self, amount: float) -> None:
        """Set how much is done."""
        if self._listener is not None:
            self._done = min(amount, self._count)
            part = self._done / self._count if self._count else 1.0
            self._listener(Work(self._doing, self._count, self._noun, part))


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Let a listener hear of all work inside the block, in this thread; it must be quick and raise nothing."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
