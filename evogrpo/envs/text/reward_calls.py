"""Calls of reward functions in this process: concurrent, with time limits, with printed text escaped."""

import asyncio
import codecs
import concurrent.futures
import contextlib
import inspect
import io
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol, TextIO

from evogrpo.interruption import NEVER, Interrupted, Stop
from evogrpo.text import printable

MAX_LINE_LENGTH = 2**16  # characters kept while a line is incomplete


class EscapingStream(io.TextIOBase):
    """A text stream that escapes control characters before it writes to another stream.

    Args:
        target: A terminal, a file, or a live display.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the target."""
        return getattr(self._target, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        """Return True."""
        return True

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

    def show(text: str) -> None:
        if text and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # standard error is closed
                EscapingStream(sys.stderr).write(text)
                sys.stderr.flush()

    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    with contextlib.suppress(OSError, ValueError), pipe:
        while new := pipe.read(65536):
            lines, newline, rest = (rest + decoder.decode(new)).rpartition("\n")
            show(lines + newline)
            if len(rest) > MAX_LINE_LENGTH:
                show(rest)
                rest = ""
    show(rest)


Function = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

GRACE_SECONDS = 1.0  # between cancelling a coroutine and abandoning its event loop


@contextlib.contextmanager
def restored_torch_settings() -> Iterator[None]:
    """Restore torch's default dtype, default device and gradient mode after user code."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(grad)


class CallFailedError(Exception):
    """A call without a result. The message completes a sentence that starts with the function's name."""


class CallTimeoutError(CallFailedError):
    """A call that exceeded the time limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"took longer than {seconds:g} s and was stopped")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Calls of one reward function that run together.

    Attributes:
        name: Name of the function.
        rows: Indices of the completions.
        calls: One call for all rows, or one per row.
    """

    name: str
    rows: tuple[int, ...]
    calls: tuple[Call, ...]


Outcome = list[Any] | CallFailedError | None
"""Result of a job: a value or exception per call; the error of the whole job; None = not run."""


@dataclass(eq=False)
class PendingJob:
    """A submitted job.

    Attributes:
        job: The job.
        outcome: Its result.
        done: True once there is a result.
        future: Result of an async function, in this process.
    """

    job: Job
    outcome: Outcome = None
    done: bool = False
    future: "concurrent.futures.Future[list[Any]] | None" = None

    def finish(self, outcome: Outcome) -> None:
        """Set the result."""
        self.outcome, self.done = outcome, True

    @property
    def failed(self) -> bool:
        """True if any call of the job failed."""
        if isinstance(self.outcome, list):
            return any(isinstance(value, BaseException) for value in self.outcome)
        return isinstance(self.outcome, CallFailedError)


class RewardRunner(Protocol):
    """Runs jobs. Failures inside reward functions are returned as outcomes; with a time limit, none blocks."""

    @property
    def in_process(self) -> bool:
        """True if functions run in this process."""

    @property
    def num_workers(self) -> int:
        """Number of jobs that run in parallel."""

    def runs_in_background(self, name: str) -> bool:
        """Return True if submitted calls of a function run while this thread does other work."""

    def submit(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """Start jobs without blocking."""

    def poll(self) -> None:
        """Start queued jobs where workers have become free, without blocking."""

    def wait(self, pending: Sequence[PendingJob], *, stop_at_first: bool, stop: Stop = NEVER) -> list[Outcome]:
        """Return the results of jobs. With `stop_at_first`, the others may not run once one has failed.

        `stop` is checked before each call in this process and a few times a second.
        """

    def cancel(self, pending: Sequence[PendingJob]) -> None:
        """Cancel the unfinished ones of these jobs."""

    def close(self) -> None:
        """Release all resources."""


def is_async(function: Function) -> bool:
    """Return True for `async def` functions and objects with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_sync(
    function: Function, calls: Sequence[Call], *, stop_at_first: bool = False, stop: Stop = NEVER
) -> list[Any]:
    """Make calls one after another; return a value or exception for each."""
    values: list[Any] = []
    for args, keywords in calls:
        stop.check()
        try:
            values.append(function(*args, **keywords))
        except (KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:  # noqa: BLE001 (user code may raise anything)
            values.append(error)
            if stop_at_first:
                break
    return values


async def call_async(function: Function, calls: Sequence[Call], timeout: float | None) -> list[Any]:
    """Make calls concurrently, each within `timeout` seconds; return a value or exception for each."""

    async def call(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        try:
            return await function(*args, **keywords)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (Ctrl-C is not delivered to tasks;
            # an exception that leaves a task would end the event loop)
            return error

    tasks = [asyncio.ensure_future(call(args, keywords)) for args, keywords in calls]
    try:
        await asyncio.wait(tasks, timeout=timeout)
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()  # without waiting: it may suppress the cancellation
    values: list[Any] = []
    for task in tasks:
        if task in late:
            assert timeout is not None
            values.append(CallTimeoutError(timeout))
        elif task.cancelled():
            values.append(CallFailedError("was cancelled"))
        else:
            values.append(task.exception() or task.result())
    return values


def safe_repr(value: object) -> str:
    """Return a repr of at most 240 characters, even if the class's `__repr__` fails."""
    try:
        return f"{value!r:.240}"
    except Exception:  # noqa: BLE001 (user code may raise anything)
        return f"<{type(value).__name__} without a repr>"


def safe_str(error: BaseException) -> str:
    """Return an exception's message, even if the class's `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (user code may raise anything)
        return f"<{type(error).__name__} without a message>"


class BackgroundLoop:
    """An event loop in a thread, usable inside a notebook's own loop.

    The loop stays open between calls, so that a client opened in one call serves the next.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, work: Coroutine[Any, Any, list[Any]]) -> "concurrent.futures.Future[list[Any]]":
        """Start a coroutine."""
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()

            threading.Thread(target=loop.run_forever, name="evogrpo async rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, future: "concurrent.futures.Future[list[Any]]", timeout: float | None, stop: Stop) -> Outcome:
        """Wait for a coroutine. If blocking code in the loop makes it late, abandon the loop."""
        remaining = math.inf if timeout is None else timeout + GRACE_SECONDS
        # Short waits, so that Ctrl-C works on every system.
        while not concurrent.futures.wait([future], timeout=0.2).done:
            stop.check()
            remaining -= 0.2
            if self._loop is None or remaining < 0:
                self.close()
                return CallFailedError(f"blocked its event loop, or shared a blocked one, for over {timeout:g} s")
        return future.result()

    def close(self) -> None:
        """Cancel all tasks, then stop the loop; abandon it if it is blocked."""

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=GRACE_SECONDS)
            asyncio.get_running_loop().stop()

        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(end(), self._loop)
            self._loop = None


class InProcessRunner:
    """Runs reward functions in this process: async functions in an event loop, others in the calling thread.

    Args:
        functions: Reward functions by name.
        timeout: Time limit of one call of an async function, in seconds. Other functions cannot be stopped.
    """

    in_process = True
    num_workers = 1

    def __init__(self, functions: Mapping[str, Function], timeout: float | None = None) -> None:
        self._functions, self._timeout = dict(functions), timeout
        self._loop = BackgroundLoop()
        self._prints = contextlib.ExitStack()
        self._unfinished: set[PendingJob] = set()

    def runs_in_background(self, name: str) -> bool:
        """Return True for async functions."""
        return is_async(self._functions[name])

    def submit(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """Start the calls of async functions; see `RewardRunner.submit`."""
        if not self._unfinished:
            self._prints.enter_context(escaped_prints())
        pending = [PendingJob(job) for job in jobs]
        self._unfinished.update(pending)
        for pending_job in pending:
            function = self._functions[pending_job.job.name]
            if is_async(function):
                pending_job.future = self._loop.submit(call_async(function, pending_job.job.calls, self._timeout))
        return pending

    def poll(self) -> None:
        """Do nothing: async functions are started at once."""

    def wait(self, pending: Sequence[PendingJob], *, stop_at_first: bool, stop: Stop = NEVER) -> list[Outcome]:
        """Call functions that are not async, then wait for the others; see `RewardRunner.wait`."""
        try:
            with restored_torch_settings():
                for pending_job in sorted(pending, key=lambda pending_job: pending_job.future is not None):
                    if pending_job.future is not None:
                        pending_job.finish(self._loop.result(pending_job.future, self._timeout, stop))
                    else:
                        function = self._functions[pending_job.job.name]
                        pending_job.finish(
                            call_sync(function, pending_job.job.calls, stop_at_first=stop_at_first, stop=stop)
                        )
                    if stop_at_first and pending_job.failed:
                        break
            return [pending_job.outcome for pending_job in pending]
        finally:
            self.cancel(pending)

    def cancel(self, pending: Sequence[PendingJob]) -> None:
        """Cancel the unfinished ones of these jobs; see `RewardRunner.cancel`."""
        for pending_job in pending:
            if pending_job.future is not None:
                pending_job.future.cancel()
        self._unfinished.difference_update(pending)
        if not self._unfinished:
            self._prints.close()

    def close(self) -> None:
        """Stop the event loop."""
        self._loop.close()
