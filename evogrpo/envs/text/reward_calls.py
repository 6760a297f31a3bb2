"""Calls of reward functions: concurrent, with a time limit, their prints and errors captured."""

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

from evogrpo.interruption import Interrupted, check_interrupted, intercept_exits, intercept_exits_in_thread

MAX_LINE_LENGTH = 2**16  # characters that wait for their end


def visible(text: str) -> str:
    r"""Return a text in which what a terminal would act on is spelled out, such as `\x1b`; lines stay lines."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text.replace("\r\n", "\n").replace("\r", "\n")
    )


class EscapingStream(io.TextIOBase):
    """A text stream that passes on what can be seen, and spells out the rest.

    Args:
        target: Where it goes: a terminal, a file, or a display that makes room for it.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the target."""
        return getattr(self._target, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        """Say yes."""
        return True

    def write(self, text: str) -> int:
        """Pass a text on."""
        shown = visible(text)
        try:
            self._target.write(shown)
        except UnicodeEncodeError:
            self._target.write(shown.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """Pass it on."""
        self._target.flush()

    def fileno(self) -> int:
        """Return the target's, for child processes."""
        return self._target.fileno()


@contextlib.contextmanager
def escaped_prints() -> Iterator[None]:
    """Let whatever is printed inside a `with` be seen and do nothing else."""
    with contextlib.ExitStack() as stack:
        # A program without a console has no streams.
        if sys.stdout is not None and not isinstance(sys.stdout, EscapingStream):
            stack.enter_context(contextlib.redirect_stdout(EscapingStream(sys.stdout)))
        if sys.stderr is not None and not isinstance(sys.stderr, EscapingStream):
            stack.enter_context(contextlib.redirect_stderr(EscapingStream(sys.stderr)))
        yield


def forward_output(pipe: IO[bytes]) -> None:
    """Pass what another process prints on to this one's standard error until it ends, line by line."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    with contextlib.suppress(OSError, ValueError), pipe:
        while new := pipe.read(65536):
            whole, newline, rest = (rest + decoder.decode(new)).rpartition("\n")
            _show(whole + newline)
            if len(rest) > MAX_LINE_LENGTH:
                _show(rest)
                rest = ""
    _show(rest)


def _show(text: str) -> None:
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            EscapingStream(sys.stderr).write(text)
            sys.stderr.flush()


Function = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

GRACE_SECONDS = 1.0  # between asking a call to end and giving up on what does not listen


@contextlib.contextmanager
def restored_torch_settings() -> Iterator[None]:
    """Restore torch's default data type and device, and whether gradients are computed, after user code."""
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
    """A call that ended without a value; the message says how, and fits after the function's name."""


class CallTimeoutError(CallFailedError):
    """A call that took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"took longer than {seconds:g} s and was stopped")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Calls of one reward function that are made together.

    Attributes:
        name: Of the function.
        rows: Completions that they reward.
        calls: One for all rows, or one per row.
    """

    name: str
    rows: tuple[int, ...]
    calls: tuple[Call, ...]


Outcome = list[Any] | CallFailedError | None
"""Of a job: a value, or the exception in its place, per call; or why none has one; None = not run."""


@dataclass(eq=False)
class PendingJob:
    """A job that was handed to a runner.

    Attributes:
        job: As given.
        outcome: What has come of it.
        done: Whether anything has.
        future: Brings the outcome of async functions.
    """

    job: Job
    outcome: Outcome = None
    done: bool = False
    future: "concurrent.futures.Future[list[Any]] | None" = None

    def ended(self, outcome: Outcome) -> None:
        """Note what has come of it."""
        self.outcome, self.done = outcome, True

    @property
    def failed(self) -> bool:
        """Whether something went wrong in it."""
        if isinstance(self.outcome, list):
            return any(isinstance(value, BaseException) for value in self.outcome)
        return isinstance(self.outcome, CallFailedError)


class RewardRunner(Protocol):
    """Runs jobs; whatever happens inside a function, it comes back as an outcome and in a bounded time."""

    @property
    def here(self) -> bool:
        """Whether functions run in this process."""

    @property
    def shares(self) -> int:
        """Into how many jobs the completions of one reward function are best divided."""

    def runs_in_background(self, name: str) -> bool:
        """Whether calls of a function that are begun are made beside whatever this thread does then."""

    def begin(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """Begin jobs, as far as that does not keep this thread busy."""

    def proceed(self) -> None:
        """Go on with what was begun and still waits for others, likewise."""

    def finish(self, begun: Sequence[PendingJob], *, stop_at_first: bool) -> list[Outcome]:
        """Return the jobs' outcomes once all are done; with `stop_at_first` some may not be run once one has failed."""

    def abandon(self, begun: Sequence[PendingJob]) -> None:
        """Give up what is not done of these jobs."""

    def close(self) -> None:
        """Let go of whatever the runner holds."""


def is_async(function: Function) -> bool:
    """Tell whether a function, or an object's call, is an `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_sync(function: Function, calls: Sequence[Call], *, stop_at_first: bool = False) -> list[Any]:
    """Return a value or an exception per call, one call after another."""
    values: list[Any] = []
    for args, keywords in calls:
        check_interrupted()
        try:
            values.append(function(*args, **keywords))
        except (KeyboardInterrupt, Interrupted):
            raise
        except BaseException as error:  # noqa: BLE001 (the user's code: anything may come out of it)
            values.append(error)
            if stop_at_first:
                break
    return values


async def call_async(function: Function, calls: Sequence[Call], timeout: float | None) -> list[Any]:
    """Return a value or an exception per call, all calls at once, each within `timeout` seconds."""

    async def call(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        try:
            return await function(*args, **keywords)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (as above; a real Ctrl-C is not
            # delivered to tasks, and what is let through here would end the event loop)
            return error

    tasks = [asyncio.ensure_future(call(args, keywords)) for args, keywords in calls]
    try:
        await asyncio.wait(tasks, timeout=timeout)
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()  # and not waited for: it may refuse
    values: list[Any] = []
    for task in tasks:
        if task in late:
            assert timeout is not None  # else none of them is
            values.append(CallTimeoutError(timeout))
        elif task.cancelled():
            values.append(CallFailedError("was cancelled"))
        else:
            values.append(task.exception() or task.result())
    return values


def shown(value: object) -> str:
    """Return a value's repr, whatever its class does when it is asked for one, in at most 240 characters."""
    try:
        return f"{value!r:.240}"
    except Exception:  # noqa: BLE001 (a user's class: anything may come out of it)
        return f"<{type(value).__name__}, which cannot be shown>"


def said(error: BaseException) -> str:
    """Return an exception's message, whatever its class does when it is asked for it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (likewise)
        return "a message that cannot be shown"


class EventLoop:
    """An event loop in a thread of its own, which works inside a notebook's loop as well.

    The loop stays between calls, so a client that was opened in one of them serves the next.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, work: Coroutine[Any, Any, list[Any]]) -> "concurrent.futures.Future[list[Any]]":
        """Start a coroutine."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="evogrpo async rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, future: "concurrent.futures.Future[list[Any]]", timeout: float | None) -> Outcome:
        """Wait for a coroutine; when it is late because something blocks the loop, the loop is given up."""
        patience = math.inf if timeout is None else timeout + GRACE_SECONDS
        # In short turns, so that Ctrl-C is heard on every system.
        while not concurrent.futures.wait([future], timeout=0.2).done:
            check_interrupted()
            patience -= 0.2
            if self._loop is None or patience < 0:
                self.close()
                return CallFailedError(
                    f"blocked the event loop, or shared it with one that did, for over {timeout:g} s"
                )
        return future.result()

    def close(self) -> None:
        """Have the loop stop once everything in it is cancelled, or leave it behind if it does not listen."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(), self._loop)
            self._loop = None


async def _end() -> None:
    """Cancel whatever is under way in this loop, wait a moment for it, and stop the loop."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_SECONDS)
    asyncio.get_running_loop().stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with intercept_exits_in_thread():  # as long as it lives: calls may outlast the run that has given them up
        loop.run_forever()


class InProcessRunner:
    """Runs reward functions in this process: plain ones in the calling thread, async ones in an event loop meanwhile.

    Args:
        functions: By name.
        timeout: Seconds that one call of an async function may take; plain functions cannot be stopped.
    """

    here = True
    shares = 1

    def __init__(self, functions: Mapping[str, Function], timeout: float | None = None) -> None:
        self._functions, self._timeout = dict(functions), timeout
        self._loop = EventLoop()
        self._prints = contextlib.ExitStack()
        self._under_way: set[PendingJob] = set()

    def runs_in_background(self, name: str) -> bool:
        """Return whether a function is async; see `RewardRunner.runs_in_background`."""
        return is_async(self._functions[name])

    def begin(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """Submit the calls of async functions; see `RewardRunner.begin`."""
        if not self._under_way:
            self._prints.enter_context(escaped_prints())
        begun = [PendingJob(job) for job in jobs]
        self._under_way.update(begun)
        for each in begun:
            if self.runs_in_background(each.job.name):
                calls = call_async(self._functions[each.job.name], each.job.calls, self._timeout)
                each.future = self._loop.submit(calls)
        return begun

    def proceed(self) -> None:
        """Do nothing: async functions wait for nobody."""

    def finish(self, begun: Sequence[PendingJob], *, stop_at_first: bool) -> list[Outcome]:
        """Make the calls of plain functions, and wait for the others; see `RewardRunner.finish`."""
        try:
            with intercept_exits(), restored_torch_settings():
                for each in sorted(begun, key=lambda each: each.future is not None):
                    each.ended(self._outcome(each, stop_at_first=stop_at_first))
                    if stop_at_first and each.failed:
                        break
            return [each.outcome for each in begun]
        finally:
            self.abandon(begun)

    def _outcome(self, begun: PendingJob, *, stop_at_first: bool) -> Outcome:
        if begun.future is not None:
            return self._loop.result(begun.future, self._timeout)
        return call_sync(self._functions[begun.job.name], begun.job.calls, stop_at_first=stop_at_first)

    def abandon(self, begun: Sequence[PendingJob]) -> None:
        """Cancel what is not done of these jobs; see `RewardRunner.abandon`."""
        for each in begun:
            if each.future is not None:
                each.future.cancel()
        self._under_way.difference_update(begun)
        if not self._under_way:
            self._prints.close()

    def close(self) -> None:
        """Stop the event loop."""
        self._loop.close()
