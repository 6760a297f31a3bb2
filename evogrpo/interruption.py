"""Interruption of long work, undo of its changes, and interception of exits from user code."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn


class Interrupted(BaseException):
    """Work was abandoned because a stop was requested."""


class Undo:
    """Snapshot that restores the state if work is interrupted.

    Args:
        keep: Takes the snapshot.
        settle: Makes the work uninterruptible from here on.

    Attributes:
        settle: As given.
        kept: True once the snapshot was taken.
    """

    def __init__(self, keep: Callable[[], None], settle: Callable[[], None]) -> None:
        self._keep, self.settle, self.kept = keep, settle, False

    def keep(self) -> None:
        """Take the snapshot unless there is one."""
        if not self.kept:
            self._keep()
            self.kept = True


_asked: ContextVar[Callable[[], bool] | None] = ContextVar("asked", default=None)
_undo: ContextVar[Undo | None] = ContextVar("undo", default=None)


@contextmanager
def interruptible(asked: Callable[[], bool]) -> Iterator[None]:
    """Let `check_interrupted` raise in the block once `asked()` is true. Must not surround a `yield`."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def check_interrupted() -> None:
    """Raise `Interrupted` if a stop was requested. Long work calls this every second or more often.

    A call takes less than a microsecond. Work between two calls, such as a forward pass, cannot be interrupted.
    """
    asked = _asked.get()
    if asked is not None and asked():
        raise Interrupted


@contextmanager
def undoing_with(undo: Undo) -> Iterator[None]:
    """Set the snapshot that `before_changes` uses in the block."""
    token = _undo.set(undo)
    try:
        yield
    finally:
        _undo.reset(token)


def before_changes(*, last: bool) -> Callable[[], None] | None:
    """Prepare changes that an interruption must undo. Called before the first of them.

    Args:
        last: These are the last changes of the work, and they are made at once at its end.

    Returns:
        None if changes may be made now: nothing undoes them, or the snapshot was taken. Otherwise a function to call
        right before the changes, which makes the work uninterruptible and so needs no snapshot.
    """
    undo = _undo.get()
    if undo is None:
        return None
    if last and not undo.kept:
        return undo.settle
    undo.keep()
    return None


_intercepting = threading.local()
_lock = threading.Lock()
_runs = 0  # how many blocks of `intercept_exits` are open, in any thread
_needed = 0  # by how many blocks `os._exit` is replaced
_real: Callable[[int], NoReturn] = os._exit


class ExitCalled(SystemExit):
    """`os._exit` was called."""


class ProgramEndError(RuntimeError):
    """User code asked the program to exit during a run."""


@contextmanager
def intercept_exits() -> Iterator[None]:
    """Make `os._exit` raise `ExitCalled` in the block, in this thread.

    In other threads it still ends the process, but with status 1 instead of 0. Forked processes are not affected.
    """
    global _runs  # noqa: PLW0603 (one for the whole process, as `os._exit` is)
    with intercept_exits_in_thread():
        with _lock:
            _runs += 1
        process = os.getpid()
        try:
            yield
        finally:
            with _lock:
                _runs -= os.getpid() == process


@contextmanager
def intercept_exits_in_thread() -> Iterator[None]:
    """Make `os._exit` raise `ExitCalled` in the block, in this thread, also outside of a run."""
    global _needed  # noqa: PLW0603 (as above)
    process, before = os.getpid(), getattr(_intercepting, "on", False)
    with _lock:
        _needed += 1
        if _needed == 1:
            os._exit = _exit_replacement(process)  # type: ignore[assignment]
    _intercepting.on = True
    try:
        yield
    finally:
        _intercepting.on = before
        with _lock:
            if os.getpid() == process:  # a fork has reset this already
                _needed -= 1
                if _needed == 0:
                    os._exit = _real  # type: ignore[assignment]


def _exit_replacement(process: int) -> Callable[[int], NoReturn]:
    """Return a replacement of `os._exit` that only acts in this process, not in forked ones."""

    def exit_or_raise(status: int) -> NoReturn:
        if os.getpid() != process:
            _real(status)
        if getattr(_intercepting, "on", False):
            raise ExitCalled(f"os._exit({status}) was called")
        if _runs and status == 0:
            os.write(2, b"error: a thread called os._exit(0) during a run\n")
            _real(1)
        _real(status)

    return exit_or_raise


def _reset_after_fork() -> None:
    """Restore `os._exit` in a forked process."""
    global _runs, _needed, _lock
    _runs, _needed, _lock = 0, 0, threading.Lock()
    _intercepting.on = False
    os._exit = _real  # type: ignore[assignment]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def end_process(status: int) -> NoReturn:
    """End the process at once."""
    _real(status)


def raise_exit_error(error: SystemExit) -> NoReturn:
    """Raise the error for an exit that user code asked for during a run.

    Raises:
        SystemExit: If a signal handler of the program asked for it.
        ProgramEndError: Otherwise.
    """
    if _from_signal_handler(error):
        raise error
    reason = str(error) if isinstance(error, ExitCalled) else f"SystemExit({error.code!r:.80}) was raised"
    raise ProgramEndError(f"{reason} during a run. Raise an error instead, or call the run's stop().") from error


def _from_signal_handler(error: SystemExit) -> bool:
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
