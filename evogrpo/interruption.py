"""Interruption of long work, and exits that user code asks for."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn


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
    """Let `check_interrupted` raise in the block once `asked()` is true. Must not surround a `yield`."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def check_interrupted() -> None:
    """Raise `Interrupted` if the surrounding work is to be abandoned; called at least once in a second or two.

    It costs less than a microsecond. What is called between two looks cannot be abandoned: a forward pass, a step of
    the user's environment.
    """
    asked = _asked.get()
    if asked is not None and asked():
        raise Interrupted


@contextmanager
def undoing_with(undo: Undo) -> Iterator[None]:
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


_answering = threading.local()
_lock = threading.Lock()
_runs = 0  # how many blocks of `intercept_exits` are open, in any thread
_needed = 0  # by how many blocks `os._exit` is replaced
_real: Callable[[int], NoReturn] = os._exit


class ExitCalled(SystemExit):
    """`os._exit` was called."""


class ProgramEndError(RuntimeError):
    """Code of the user's asked for the program's end in the middle of a run."""


@contextmanager
def intercept_exits() -> Iterator[None]:
    """Let `os._exit` raise `ExitCalled` in the block, in this thread.

    Another thread still ends the process meanwhile, but not with status 0; and so does a process that was forked off.
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
    """Let `os._exit` raise `ExitCalled` in the block, in this thread, whether or not a run has control."""
    global _needed  # noqa: PLW0603 (likewise)
    process, before = os.getpid(), getattr(_answering, "on", False)
    with _lock:
        _needed += 1
        if _needed == 1:
            os._exit = _answer_in(process)  # type: ignore[assignment]
    _answering.on = True
    try:
        yield
    finally:
        _answering.on = before
        with _lock:
            if os.getpid() == process:  # else nothing is left to take back
                _needed -= 1
                if _needed == 0:
                    os._exit = _real  # type: ignore[assignment]


def _answer_in(process: int) -> Callable[[int], NoReturn]:
    """Return what takes the place of `os._exit` in a process, and obeys in those that are forked off."""

    def answer(status: int) -> NoReturn:
        if os.getpid() != process:
            _real(status)
        if getattr(_answering, "on", False):
            raise ExitCalled(f"os._exit({status}) was called")
        if _runs and status == 0:
            os.write(2, b"error: a thread has called os._exit(0) in the middle of a run\n")
            _real(1)
        _real(status)

    return answer


def _begin_anew() -> None:
    """Answer nothing in a process that was forked off, whose other threads are gone."""
    global _runs, _needed, _lock
    _runs, _needed, _lock = 0, 0, threading.Lock()
    _answering.on = False
    os._exit = _real  # type: ignore[assignment]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def end_process(status: int) -> NoReturn:
    """End the process at once, whoever has control."""
    _real(status)


def raise_exit_error(error: SystemExit) -> NoReturn:
    """Raise what a run ends with when its user's code has asked for the program's end.

    Raises:
        SystemExit: If that was a signal handler of the program's own, which may.
        ProgramEndError: Otherwise.
    """
    if _of_a_handler(error):
        raise error
    said = str(error) if isinstance(error, ExitCalled) else f"SystemExit({error.code!r:.80}) was raised"
    raise ProgramEndError(
        f"{said} in the middle of a run, which ends by its limits, by its stop() or by a signal: raise an error instead"
    ) from error


def _of_a_handler(error: SystemExit) -> bool:
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
