"""Stop requests, by a call or a signal, and progress of long work."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Literal

Activity = Literal["writing", "playing", "rewarding", "scoring", "learning"]


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """Progress of one piece of work.

    Attributes:
        activity: Kind of work.
        count: Total number of items.
        noun: Name of the items: "completions", "episodes" or "actions".
        fraction: Fraction that is done, from 0 to 1.
    """

    activity: Activity
    count: int
    noun: str
    fraction: float


class Interrupted(BaseException):
    """Work was abandoned because a stop was requested."""


class Stop:
    """Stop request of a run, passed as an argument to everything that takes long.

    Long work calls `check` at least once a second, and reports its progress with `progress`. A
    request may come from a signal handler or another thread.

    Args:
        may_interrupt: Returns True while this process may abandon its work, by default always; with
            several ranks only inside `Processes.shared_errors`.

    Attributes:
        reason: Reason of the stop; None without a request.
        signal: Number of the signal that requested it; None if none did.
        listener: Called with the progress of the work, in the thread of the work; must be fast and
            not raise. None = no listener.
    """

    def __init__(self, may_interrupt: Callable[[], bool] = lambda: True) -> None:
        self.reason: str | None = None
        self.signal: int | None = None
        self.listener: Callable[[ProgressUpdate], None] | None = None
        self._may_interrupt = may_interrupt
        # While another thread holds the lock, the main thread cannot leave an `interruptible`
        # block.
        self._interruptible = False
        self._exit_lock = threading.Lock()

    def request(self, reason: str, number: int | None = None) -> None:
        """Request a stop; only the first request counts.

        Args:
            reason: Reason of the stop.
            number: Number of the signal that caused it; None if none did.
        """
        if self.reason is None:
            self.reason = reason
            self.signal = number

    def check(self) -> None:
        """Raise `Interrupted` if a stop was requested.

        Takes less than a microsecond without a request.
        """
        if self.reason is not None and self._may_interrupt():
            raise Interrupted

    def progress(self, activity: Activity, count: int, noun: str) -> "ProgressCounter":
        """Return a counter that reports to the listener; see `ProgressUpdate`."""
        return ProgressCounter(self.listener, activity, count, noun)

    def __reduce__(self) -> tuple[type["Stop"], tuple[()]]:
        """Pickle as a stop that is never requested: ranks that receive rows have their own stop."""
        return Stop, ()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow `interrupt` to interrupt the block, even while user code blocks."""
        self._interruptible = True
        try:
            yield
        finally:
            with self._exit_lock:
                self._interruptible = False

    def interrupt(self) -> None:
        """Raise `Interrupted` if a stop was requested and the work may be abandoned.

        Called by a signal handler.
        """
        if self._interruptible:
            self.check()


NEVER = Stop()
"""Stop for work outside of a run, which is never requested."""


class ProgressCounter:
    """Counter of one piece of work; see `Stop.progress`."""

    def __init__(
        self,
        listener: Callable[[ProgressUpdate], None] | None,
        activity: Activity,
        count: int,
        noun: str,
    ) -> None:
        self._listener = listener
        self._activity = activity
        self._count = count
        self._noun = noun
        self._done = 0.0
        self.set(0.0)

    def add(self, amount: float) -> None:
        """Add an amount.

        The sum stays at the total, as work that is repeated after running out of memory is added
        twice.
        """
        self.set(self._done + amount)

    def set(self, amount: float) -> None:
        """Set the amount that is done."""
        if self._listener is not None:
            self._done = min(amount, self._count)
            fraction = self._done / self._count if self._count else 1.0
            self._listener(ProgressUpdate(self._activity, self._count, self._noun, fraction))


# ---- stop requests by signal

STOPPED = "stopped by the user"

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""Signals that stop a run: Ctrl-C, and those that schedulers send before they kill."""

PATIENCE_SECONDS = 5.0
"""Seconds after a signal until blocking user code is interrupted."""

RETRY_SECONDS, RETRIES = 1.0, 4
"""Interval and number of attempts to interrupt blocking user code before the process is ended."""


@contextmanager
def stopping_on_signals(
    stop: Stop, announce: Callable[[], None] = lambda: None
) -> Iterator[Sequence[int]]:
    """Turn the first signal into a stop request, and a later Ctrl-C into an abort.

    Yield the list of received signals.

    Further signals of a scheduler are only counted: launchers forward signals that their processes
    have also received.

    User code that blocks, such as a reward function that waits, is interrupted a few seconds after
    the first signal, repeatedly. If it catches that, the process ends within ten seconds of the
    signal, except for Ctrl-C. Signals that the program handles or ignores are left alone, and so
    are all signals outside of the main thread.

    Args:
        stop: Receives the request.
        announce: Called at the first signal.

    Raises:
        KeyboardInterrupt: At a Ctrl-C after the first signal.
    """
    received: list[int] = []
    interrupting = threading.Event()
    over = threading.Event()

    # 1. Count signals, and request a stop at the first one. Python calls this function in the main
    #    thread, between two instructions.
    def handle(number: int, _: FrameType | None) -> None:
        """Request a stop at the first signal; raise KeyboardInterrupt at a second Ctrl-C."""
        if interrupting.is_set():  # this signal comes from `_interrupt_user_code`
            interrupting.clear()
            stop.interrupt()
            return
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        if number == signal.SIGINT:
            reason = STOPPED
        else:
            reason = f"stopped by {signal.Signals(number).name}"
        stop.request(reason, number)
        announce()
        threading.Thread(
            target=_interrupt_user_code, args=(stop, number, interrupting, over), daemon=True
        ).start()

    # 2. Handle the signals that the program itself neither handles nor ignores. Python allows this
    #    in the main thread only.
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        # 3. End the thread that interrupts user code, and restore the handlers.
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt_user_code(
    stop: Stop, number: int, interrupting: threading.Event, over: threading.Event
) -> None:
    """Interrupt blocking user code from another thread, repeatedly, until the run has stopped.

    If it does not stop, end the process, except after Ctrl-C.
    """
    patience = PATIENCE_SECONDS
    for _ in range(RETRIES):
        if over.wait(patience):
            return
        interrupting.set()
        # A signal to the main thread also ends a blocking system call.
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        patience = RETRY_SECONDS
    if not over.wait(patience) and number != signal.SIGINT:
        with stop._exit_lock:  # meanwhile the main thread cannot leave an interruptible block
            if stop._interruptible:
                name = signal.Signals(number).name
                write_to_stderr(f"{name}: process ended because user code did not return.\n")
                os._exit(128 + number)


def write_to_stderr(text: str) -> None:
    """Write at once, also from a signal handler; nothing if the terminal is closed."""
    with suppress(OSError):
        os.write(2, text.encode())
