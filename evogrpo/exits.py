"""Ends of the program that the user's code asks for: in the middle of a run they are answered, not obeyed.

`sys.exit()` in a reward function or an environment is an error like any other. `os._exit()` would end the process at
once: nothing saved, nothing said, and with status 0 it would look like success. While a run has control it raises
instead. What ends a process behind Python's back, such as C's `exit`, nobody in it can answer; the journal then lacks
its last event.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_answering = threading.local()
_lock = threading.Lock()
_open = 0
_real: Callable[[int], NoReturn] = os._exit


class ExitCalled(SystemExit):
    """`os._exit` was called."""


class ProgramEndError(RuntimeError):
    """Code of the user's asked for the program's end in the middle of a run."""


@contextmanager
def exits_answered() -> Iterator[None]:
    """Let `os._exit` raise `ExitCalled` in the block, in this thread and those that `answer_here` names.

    Another thread still ends the process, but not with status 0; and so does a process that was forked off.
    """
    global _open  # noqa: PLW0603 (os._exit is one for the whole process)
    process, before = os.getpid(), getattr(_answering, "on", False)

    def answer(status: int) -> NoReturn:
        if os.getpid() == process:
            if getattr(_answering, "on", False):
                raise ExitCalled(f"os._exit({status}) was called")
            if status == 0:
                os.write(2, b"error: a thread has called os._exit(0) in the middle of a run\n")
        _real(status or int(os.getpid() == process))

    with _lock:
        _open += 1
        if _open == 1:
            os._exit = answer
    _answering.on = True
    try:
        yield
    finally:
        _answering.on = before
        with _lock:
            _open -= 1
            if _open == 0:
                os._exit = _real  # type: ignore[assignment]


def end_process(status: int) -> NoReturn:
    """End the process at once, whoever has control."""
    _real(status)


def answer_here() -> None:
    """Let `os._exit` raise in this thread from now on, wherever a run has control."""
    _answering.on = True


def refuse_end(error: SystemExit) -> NoReturn:
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
