"""Calls of reward functions in this process: concurrent, with time limits, with printed text escaped."""

import asyncio
import contextlib
import inspect
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any, TextIO

from evogrpo.interruption import NEVER, Interrupted, Stop
from evogrpo.text import printable

MAX_LINE_LENGTH = 2**16  # characters of another process's output that are kept in memory


class EscapingStream(io.TextIOBase):
    """A text stream that escapes control characters before it writes to another stream.

    Args:
        target: A terminal, a file, or a live display.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    def write(self, text: str) -> int:
        """Write escaped text."""
        escaped = printable(text.replace("\r\n", "\n").replace("\r", "\n"))
        try:
            self._target.write(escaped)
        except UnicodeEncodeError:
            self._target.write(escaped.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """Flush the target."""
        self._target.flush()

    def fileno(self) -> int:
        """Return the target's file descriptor, for child processes."""
        return self._target.fileno()


@contextlib.contextmanager
def escaped_prints() -> Iterator[None]:
    """Escape control characters in text that user code prints."""
    with contextlib.ExitStack() as stack:
        # Programs without a console have no streams.
        if sys.stdout is not None and not isinstance(sys.stdout, EscapingStream):
            stack.enter_context(contextlib.redirect_stdout(EscapingStream(sys.stdout)))
        if sys.stderr is not None and not isinstance(sys.stderr, EscapingStream):
            stack.enter_context(contextlib.redirect_stderr(EscapingStream(sys.stderr)))
        yield


def forward_output(pipe: IO[bytes]) -> None:
    """Copy another process's output to standard error until it ends, line by line."""
    with io.TextIOWrapper(pipe, "utf-8", "replace") as lines:
        while text := lines.readline(MAX_LINE_LENGTH):
            if sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    EscapingStream(sys.stderr).write(text)
                    sys.stderr.flush()


Function = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

GRACE_SECONDS = 1.0  # between cancelling a coroutine and abandoning its event loop


class CallFailedError(Exception):
    """A call without a result. The message completes a sentence that starts with the function's name."""


def timeout_error(seconds: float) -> CallFailedError:
    """Return the error of a call that exceeded the time limit."""
    return CallFailedError(f"took longer than {seconds:g} s and was stopped")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Calls of one reward function that run together.

    Attributes:
        name: Name of the function.
        rows: Indices of the completions.
        calls: One call for all rows, or one per row. Only async functions have several.
        batched: True if one call takes all rows.
    """

    name: str
    rows: tuple[int, ...]
    calls: tuple[Call, ...]
    batched: bool


Results = list[Any]
"""A value or exception for each call of a job."""


def is_async(function: Function) -> bool:
    """Return True for `async def` functions and objects with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_sync(function: Function, call: Call) -> Any:
    """Return the result of a call, or the exception that it raised."""
    args, keywords = call
    try:
        return function(*args, **keywords)
    except (KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:  # noqa: BLE001 (user code may raise anything)
        return error


async def call_async(function: Function, calls: Sequence[Call], timeout: float | None) -> Results:
    """Make calls concurrently, each within `timeout` seconds; return a value or exception for each."""

    async def call(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await function(*args, **keywords)
        except BaseException as error:  # noqa: BLE001 (an exception that leaves a task could end the event loop)
            return timeout_error(timeout) if timeout is not None and limit.expired() else error

    return await asyncio.gather(*(call(*each) for each in calls))


class InProcessRunner:
    """Runs reward functions in this process: async functions in an event loop, others in the calling thread.

    The event loop has its own thread, so that it works in notebooks. It stays open between calls, so that a client
    opened in one call serves the next.

    Args:
        functions: Reward functions by name.
        timeout: Time limit of one call of an async function, in seconds. Other functions cannot be stopped.
    """

    in_process = True  # functions run in this process
    num_workers = 1  # jobs that run in parallel

    def __init__(self, functions: Mapping[str, Function], timeout: float | None = None) -> None:
        self._functions, self._timeout = dict(functions), timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prints = contextlib.ExitStack()
        self._running: set[Future[Results]] = set()

    def runs_in_background(self, name: str) -> bool:
        """Return True for async functions: they run while this thread does other work."""
        return is_async(self._functions[name])

    def submit(self, job: Job, stop: Stop = NEVER) -> "Future[Results]":
        """Start the calls of an async function, or make the calls of another function before returning.

        Failures inside the function are results.
        """
        function = self._functions[job.name]
        if not is_async(function):
            stop.check()
            done: Future[Results] = Future()
            done.set_result([call_sync(function, call) for call in job.calls])
            return done
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="evogrpo async rewards", daemon=True).start()
        if not self._running:
            self._prints.enter_context(escaped_prints())
        future = asyncio.run_coroutine_threadsafe(call_async(function, job.calls, self._timeout), self._loop)
        self._running.add(future)
        if self._timeout is not None:
            # call_async applies the limit; this is for blocking code in the loop.
            timer = threading.Timer(self._timeout + GRACE_SECONDS, self._abandon, [future])
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def _abandon(self, future: "Future[Results]") -> None:
        """Give up a job that does not end, and its event loop."""
        if future.cancel():
            self.close()

    def cancel(self, futures: Sequence["Future[Results]"]) -> None:
        """Cancel the unfinished ones of these jobs. Must be called once all of them are done, too."""
        for future in futures:
            future.cancel()
        self._running.difference_update(futures)
        if not self._running:
            self._prints.close()

    def close(self) -> None:
        """Stop the event loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
