"""Stop requests of a run, by call or by signal; work is abandoned and the state after the last step is kept."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from evogrpo.distributed import Processes
from evogrpo.interruption import Interrupted, end_process, interruptible

STOPPED = "stopped by the user"

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that stop a run: Ctrl-C, and those that schedulers send before they kill."""

PATIENCE_SECONDS = 5.0
"""Seconds that uninterruptible work may take, and after which user code is broken off."""

RETRY_SECONDS, RETRIES = 1.0, 4
"""Interval and number of further attempts to break off user code before the process ends."""


class Stopping:
    """Stop request of a run.

    Args:
        processes: Ranks of the run; a request on one rank stops all of them.

    Attributes:
        reason: Reason of the stop; None without a request.
        signal: Number of the signal that requested it; None if none did.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        self.reason: str | None = None
        self.signal: int | None = None
        self._interruptible, self._leaving = False, threading.Lock()
        self._processes = processes or Processes()

    def ask(self, reason: str, number: int | None = None) -> None:
        """Request a stop, perhaps because of a signal; the first request counts."""
        if self.reason is None:
            self.reason, self.signal = reason, number

    def agreed(self) -> str | None:
        """Return the reason of the stop, the same on all ranks; None without a request. A collective."""
        if self._processes.size == 1:
            return self.reason
        own = None if self.reason is None else (self.reason, self.signal)
        asked = next((each for each in self._processes.all_gather(own) if each is not None), None)
        if asked is None:  # a request since the exchange counts the next time
            return None
        self.reason, self.signal = asked
        return self.reason

    def check(self) -> None:
        """Raise `Interrupted` on all ranks if a stop was requested on any."""
        if self.agreed() is not None:
            raise Interrupted

    @contextmanager
    def interruptible(self, deadline: float) -> Iterator[None]:
        """Make the block interruptible. It must change nothing before its end that the caller cannot undo.

        Args:
            deadline: Time by `time.monotonic()` at which the block is interrupted in any case.
        """
        self.check()
        with interruptible(
            lambda: (
                self._interruptible
                and self._processes.interruptible
                and (self.reason is not None or time.monotonic() > deadline)
            )
        ):
            self._interruptible = True
            try:
                yield
            finally:
                with self._leaving:
                    self._interruptible = False

    def settle(self) -> None:
        """Make the block uninterruptible until its end, as it is about to change what cannot be undone."""
        with self._leaving:
            self._interruptible = False

    def break_off(self) -> None:
        """Raise `Interrupted`, from a signal handler, if a stop was requested and the work is interruptible."""
        if self._interruptible and self.reason is not None and self._processes.interruptible:
            raise Interrupted

    def end_process(self, number: int) -> None:
        """End the process from any thread if interruptible work does not end. Nothing more is saved."""
        with self._leaving:
            if self._interruptible:
                os.write(2, f"{signal.Signals(number).name}: process ended, as user code does not return\n".encode())
                end_process(128 + number)


@contextmanager
def stopping_on_signals(stopping: Stopping, announce: Callable[[], None] = lambda: None) -> Iterator[Sequence[int]]:
    """Turn the first signal into a stop request, and a later Ctrl-C into an abort; yield the list of received signals.

    A scheduler's signal may arrive twice, as launchers forward signals that their processes have also received.

    User code that blocks, such as a reward function that waits, is broken off a few seconds after the first signal,
    repeatedly. If it catches that, the process ends within ten seconds of the signal, except for Ctrl-C. Signals that
    the program handles or ignores are left alone, and so are all signals outside of the main thread.

    Args:
        stopping: Receives the request.
        announce: Called at the first signal.

    Raises:
        KeyboardInterrupt: At the second Ctrl-C.
    """
    received: list[int] = []
    breaking_off, over = threading.Event(), threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if breaking_off.is_set():
            breaking_off.clear()
            stopping.break_off()
            return
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        stopping.ask(stop_reason(number), number)
        announce()
        threading.Thread(target=_break_off, args=(stopping, number, breaking_off, over), daemon=True).start()

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _break_off(stopping: Stopping, number: int, breaking_off: threading.Event, over: threading.Event) -> None:
    """Break off blocking user code from another thread until the run has stopped."""
    patience = PATIENCE_SECONDS
    for _ in range(RETRIES):
        if over.wait(patience):
            return
        breaking_off.set()
        if hasattr(signal, "pthread_kill"):  # only a real signal ends a wait
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        patience = RETRY_SECONDS
    if not over.wait(patience) and number != signal.SIGINT:
        stopping.end_process(number)


def stop_reason(number: int) -> str:
    """Return the reason that the journal gives for a stop by a signal."""
    return STOPPED if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
