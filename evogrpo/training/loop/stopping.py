"""Stop requests of a run, by call or by signal."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from evogrpo.distributed import Processes
from evogrpo.interruption import Interrupted, Stop

STOPPED = "stopped by the user"

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that stop a run: Ctrl-C, and those that schedulers send before they kill."""

PATIENCE_SECONDS = 5.0
"""Seconds after a signal until blocking code is broken off."""

RETRY_SECONDS, RETRIES = 1.0, 4
"""Interval and number of attempts to break off blocking code before the process ends."""


class RunStop(Stop):
    """Stop request of a run; a request on one rank stops all of them.

    Args:
        processes: Ranks of the run.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__(lambda: processes.interruptible)
        self._processes = processes

    def agree(self) -> bool:
        """Return True if a stop was requested on any rank, and take over its reason. A collective."""
        if self._processes.size > 1:
            requests = self._processes.all_gather(None if self.reason is None else (self.reason, self.signal))
            first = next((each for each in requests if each is not None), None)
            if first is None:  # a request since the exchange counts the next time
                return False
            self.reason, self.signal = first
        return self.reason is not None

    def check_all_ranks(self) -> None:
        """Raise `Interrupted` on all ranks if a stop was requested on any. A collective."""
        if self.agree():
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Check on all ranks, then let a signal handler interrupt the block."""
        self.check_all_ranks()
        with super().interruptible():
            yield


@contextmanager
def stopping_on_signals(stop: Stop, announce: Callable[[], None] = lambda: None) -> Iterator[Sequence[int]]:
    """Turn the first signal into a stop request, and a later Ctrl-C into an abort; yield the list of received signals.

    A scheduler's signal may arrive twice, as launchers forward signals that their processes have also received.

    User code that blocks, such as a reward function that waits, is interrupted a few seconds after the first signal,
    repeatedly. If it catches that, the process ends within ten seconds of the signal, except for Ctrl-C. Signals that
    the program handles or ignores are left alone, and so are all signals outside of the main thread.

    Args:
        stop: Receives the request.
        announce: Called at the first signal.

    Raises:
        KeyboardInterrupt: At the second Ctrl-C.
    """
    received: list[int] = []
    interrupting, over = threading.Event(), threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if interrupting.is_set():
            interrupting.clear()
            stop.interrupt()
            return
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        stop.request(stop_reason(number), number)
        announce()
        threading.Thread(target=_interrupt_user_code, args=(stop, number, interrupting, over), daemon=True).start()

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


def _interrupt_user_code(stop: Stop, number: int, interrupting: threading.Event, over: threading.Event) -> None:
    """Interrupt blocking user code from another thread, repeatedly, until the run has stopped."""
    patience = PATIENCE_SECONDS
    for _ in range(RETRIES):
        if over.wait(patience):
            return
        interrupting.set()
        if hasattr(signal, "pthread_kill"):  # only a real signal ends a wait
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        patience = RETRY_SECONDS
    if not over.wait(patience) and number != signal.SIGINT:
        with stop.still_interruptible() as blocking:
            if blocking:
                name = signal.Signals(number).name
                os.write(2, f"{name}: process ended because user code did not return.\n".encode())
                os._exit(128 + number)


def stop_reason(number: int) -> str:
    """Return the reason that the journal gives for a stop by a signal."""
    return STOPPED if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
