"""Interruption of long work by a stop request, and exits that user code asks for during a run."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class Interrupted(BaseException):
    """Work was abandoned because a stop was requested."""


class Stop:
    """Stop request of a run, passed as an argument to everything that takes long.

    Long work calls `check` every second or more often. A request may come from a signal handler or another thread.

    Args:
        may_interrupt: Returns True where this process may abandon its work; always, by default. With several ranks this
            is inside `Processes.run_section` only.

    Attributes:
        reason: Reason of the stop; None without a request.
        signal: Number of the signal that requested it; None if none did.
    """

    def __init__(self, may_interrupt: Callable[[], bool] = lambda: True) -> None:
        self.reason: str | None = None
        self.signal: int | None = None
        self._may_interrupt = may_interrupt
        self._interruptible, self._leaving = False, threading.Lock()

    def request(self, reason: str, number: int | None = None) -> None:
        """Request a stop, perhaps because of a signal; the first request counts."""
        if self.reason is None:
            self.reason, self.signal = reason, number

    def check(self) -> None:
        """Raise `Interrupted` if a stop was requested. Takes less than a microsecond without a request."""
        if self.reason is not None and self._may_interrupt():
            raise Interrupted

    def __reduce__(self) -> tuple[type["Stop"], tuple[()]]:
        """Copy as a stop that is never requested: rows are sent to other ranks, each of which has its own stop."""
        return Stop, ()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal handler break off the block, even while user code blocks; see `break_off`."""
        self._interruptible = True
        try:
            yield
        finally:
            with self._leaving:
                self._interruptible = False

    def break_off(self) -> None:
        """Raise `Interrupted`, from a signal handler, if a stop was requested and the work may be abandoned."""
        if self._interruptible:
            self.check()

    @contextmanager
    def still_interruptible(self) -> Iterator[bool]:
        """Yield True if the main thread is in an interruptible block, which it cannot leave inside this block."""
        with self._leaving:
            yield self._interruptible


NEVER = Stop()
"""Stop of work outside of a run: it is never requested."""


class ProgramEndError(RuntimeError):
    """User code asked the program to exit during a run."""


def raise_exit_error(error: SystemExit) -> NoReturn:
    """Raise the error for an exit that user code asked for during a run.

    Raises:
        SystemExit: If a signal handler of the program asked for it.
        ProgramEndError: Otherwise.
    """
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers]
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error
    reason = f"SystemExit({error.code!r:.80}) was raised"
    raise ProgramEndError(f"{reason} during a run. Raise an error instead, or call the run's stop().") from error
