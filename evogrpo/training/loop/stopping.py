"""Stopping a run in time: it abandons what it is doing, and is left as it was after its last learning step."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from evogrpo.distributed import Processes, is_rank_zero
from evogrpo.interruption import Interrupted, end_process, interruptible

STOPPED = "stopped by the user"

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""What asks a run to stop: Ctrl-C, and what schedulers send before they kill."""

PATIENCE_SECONDS = 5.0
"""How long work may take that cannot be interrupted, and how long a user's code may go on before it is broken off."""

TURN_SECONDS, TURNS = 1.0, 4
"""How long after each other, and how often, it is broken off before the process ends: soon it would be killed."""


class Stopping:
    """Whether a run has been asked to stop.

    Args:
        processes: Who trains together: a stop that one of them is asked for is one for all.

    Attributes:
        reason: Why; None while nobody has asked.
        signal: The number of the signal that asked; None if it was none.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        self.reason: str | None = None
        self.signal: int | None = None
        self._abandonable, self._leaving = False, threading.Lock()
        self._processes = processes or Processes()

    def ask(self, reason: str, number: int | None = None) -> None:
        """Ask the run to stop, perhaps because a signal of that number came; the first reason counts."""
        if self.reason is None:
            self.reason, self.signal = reason, number

    def agreed(self) -> str | None:
        """Return why the run is to stop, the same in all processes; None if none of them has been asked."""
        if self._processes.size == 1:
            return self.reason
        own = None if self.reason is None else (self.reason, self.signal)
        asked = next((each for each in self._processes.all_gather(own) if each is not None), None)
        if asked is None:  # whoever was asked meanwhile, as by a signal, tells it the next time
            return None
        self.reason, self.signal = asked
        return self.reason

    def check(self) -> None:
        """Raise `Interrupted` if the run has been asked to stop, in all processes alike."""
        if self.agreed() is not None:
            raise Interrupted

    @contextmanager
    def abandonable(self, deadline: float) -> Iterator[None]:
        """Let the block be abandoned half-way: before its end it changes nothing that the caller would not undo.

        Args:
            deadline: When it is abandoned if nobody asks before, by `time.monotonic()`.
        """
        self.check()
        with interruptible(
            lambda: (
                self._abandonable
                and self._processes.interruptible
                and (self.reason is not None or time.monotonic() > deadline)
            )
        ):
            self._abandonable = True
            try:
                yield
            finally:
                with self._leaving:
                    self._abandonable = False

    def settle(self) -> None:
        """Abandon what is being done no more: it is about to change what nobody would undo, and to end."""
        with self._leaving:
            self._abandonable = False

    def insist(self) -> None:
        """Raise `Interrupted` right here, wherever that is, if what is being done may be abandoned."""
        if self._abandonable and self.reason is not None and self._processes.interruptible:
            raise Interrupted

    def end_process(self, number: int) -> None:
        """End the process, from any thread, if what is being done may be abandoned and yet goes on and on.

        Nothing is saved: the newest checkpoint is what the run goes on from.
        """
        with self._leaving:
            if self._abandonable:
                os.write(2, f"{signal.Signals(number).name}: ended, as the code under way does not end\n".encode())
                end_process(128 + number)


@contextmanager
def stopping_on_signals(stopping: Stopping, announce: Callable[[], None] = lambda: None) -> Iterator[Sequence[int]]:
    """Let the first signal ask for a stop, and a Ctrl-C after it abort; yields the signals that came.

    A scheduler's signal may come more than once, as launchers pass on what their processes have got already.

    Code that does not look whether it shall stop, such as a reward function that waits, is broken off a few seconds
    after the first signal, again and again. Where it catches even that, the process ends before ten seconds are over,
    unless it was Ctrl-C that asked. Signals that somebody handles already or wants ignored are left alone, and so are
    all of them outside the main thread, where none arrives.

    Args:
        stopping: What is asked.
        announce: Called at the first signal, in the middle of whatever is being done.

    Raises:
        KeyboardInterrupt: Wherever the run is, if it is to abort.
    """
    received: list[int] = []
    insisting, over = threading.Event(), threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if insisting.is_set():
            insisting.clear()
            stopping.insist()
            return
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        stopping.ask(stop_reason(number), number)
        announce()
        threading.Thread(target=_press, args=(stopping, number, insisting, over), daemon=True).start()

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


def _press(stopping: Stopping, number: int, insisting: threading.Event, over: threading.Event) -> None:
    """Break off, from another thread, what does not look whether it shall stop, until it is over."""
    patience = PATIENCE_SECONDS
    for _ in range(TURNS):
        if over.wait(patience):
            return
        insisting.set()
        if hasattr(signal, "pthread_kill"):  # only a real signal ends a wait
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        patience = TURN_SECONDS
    if not over.wait(patience) and number != signal.SIGINT:
        stopping.end_process(number)


def stop_reason(number: int) -> str:
    """Return what the journal says of a run that a signal has stopped."""
    return STOPPED if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def leave(number: int, said: str) -> NoReturn:
    """Leave the program after a stop by a signal, once everything is saved.

    Raises:
        KeyboardInterrupt: For Ctrl-C, with the message. Python ends with status 130 unless the caller catches it.
        SystemExit: For any other signal, with status 128 + `number`: the run has not finished.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt(said)
    if is_rank_zero():
        sys.stderr.write(f"{said}\n")
    raise SystemExit(128 + number)
