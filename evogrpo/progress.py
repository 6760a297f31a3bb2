"""Progress of the work under way: reported by the code that computes, received by the display."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Activity = Literal["writing", "playing", "rewarding", "scoring", "learning"]


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """Progress of one piece of work.

    Attributes:
        activity: Kind of work.
        count: Total number of items.
        noun: Name of the items: "completions", "episodes" or "actions".
        part: Fraction that is done, from 0 to 1.
    """

    activity: Activity
    count: int
    noun: str
    part: float


Listener = Callable[[ProgressUpdate], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("evogrpo progress listener", default=None)


class ProgressCounter:
    """Counter of one piece of work, which reports to the listener of this context, if there is one.

    Args:
        activity: Kind of work.
        count: Total number of items.
        noun: Name of the items.
    """

    def __init__(self, activity: Activity, count: int, noun: str) -> None:
        self._activity, self._count, self._noun, self._listener = activity, count, noun, _LISTENER.get()
        self._done = 0.0
        self.set(0.0)

    def add(self, amount: float) -> None:
        """Add an amount; the sum is capped at the total, as work may be repeated after running out of memory."""
        self.set(self._done + amount)

    def set(self, amount: float) -> None:
        """Set the amount that is done."""
        if self._listener is not None:
            self._done = min(amount, self._count)
            part = self._done / self._count if self._count else 1.0
            self._listener(ProgressUpdate(self._activity, self._count, self._noun, part))


@contextmanager
def progress_listener(listener: Listener) -> Iterator[None]:
    """Call a listener for all progress in the block, in this thread. It must be fast and raise nothing."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
