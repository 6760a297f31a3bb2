"""RewardRunner: calls reward functions in an event loop, in worker processes or in this thread."""

import asyncio
import contextlib
import pickle  # noqa: TID251 (sent to our own child process; replies are JSON)
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from evogrpo.distributed import cores_per_rank
from evogrpo.envs.text.reward_functions import Reward
from evogrpo.envs.text.reward_worker import RewardHandler, decoded
from evogrpo.envs.text.user_functions import (
    Call,
    CallFailedError,
    Function,
    call_async,
    call_sync,
    is_async,
    own_list,
    timeout_error,
)
from evogrpo.envs.worker_process import WorkerError, WorkerProcess, pack_code
from evogrpo.interruption import NEVER, Stop
from evogrpo.text import class_name, escaped_prints, one_line
from evogrpo.validation import finite_number, whole_number

GRACE_SECONDS = 1.0  # between the time limit of a coroutine and the end of its event loop
MAX_WORKERS = 1024  # largest number of worker processes
DEFAULT_WORKERS = 8  # worker processes by default, if there are as many cores
START_SECONDS = 120.0  # time limit for a worker to load the reward functions

Outcome = Future[Any]
"""The result of a call, or the exception that it raised, once it is done."""
_Task = tuple[Outcome, bytes]
"""A call in the queue of worker processes: its outcome and its request."""


class RewardRunner:
    """Calls reward functions.

    Async functions run in an event loop of this process. Others run in worker processes, or one
    after the other in the calling thread.

    Args:
        rewards: The reward functions.
        timeout: Time limit of one call, in seconds; None = no limit.
        workers: Number of worker processes for functions that are not async; 0 = none. None = one
            per core, at most 8, if there is a time limit, otherwise 0.

    Raises:
        ValueError: If a number is out of range, a timeout needs worker processes, or a function
            cannot be sent to one.
    """

    def __init__(
        self, rewards: Sequence[Reward], timeout: float | None = None, workers: int | None = 0
    ) -> None:
        check_worker_limits(timeout, workers)
        self._functions = {reward.name: reward.function for reward in rewards}
        synchronous = {
            name: function for name, function in self._functions.items() if not is_async(function)
        }
        # A time limit needs processes; without one they are used on request only.
        if workers is None:
            workers = 0 if timeout is None else min(DEFAULT_WORKERS, cores_per_rank())
        # Only worker processes can stop a function that is not async.
        if timeout is not None and synchronous and not workers:
            raise ValueError(
                f"reward_timeout requires reward_workers of at least 1 for {min(synchronous)!r}"
                " (not async)."
            )
        self._event_loop = _EventLoop(timeout)
        self.pool: WorkerPool | None = None
        # Async functions never need a process: the event loop can cancel them.
        if synchronous and workers:
            self.pool = WorkerPool(synchronous, workers=workers, timeout=timeout)

    def in_worker(self, name: str) -> bool:
        """Return True if a function runs in worker processes."""
        return self.pool is not None and not is_async(self._functions[name])

    def in_background(self, name: str) -> bool:
        """Return True if a function runs while this thread does other work."""
        return self.in_worker(name) or is_async(self._functions[name])

    def submit(self, name: str, call: Call, stop: Stop = NEVER) -> Outcome:
        """Start a call in the background, or make it before returning."""
        function = self._functions[name]
        if is_async(function):
            return self._event_loop.submit(function, call)
        if self.pool is not None:
            return self.pool.submit(name, call)
        stop.check()
        outcome = Outcome()
        # A copy of the result: a function may return the same list from every call.
        outcome.set_result(own_list(call_sync(function, call)))
        return outcome

    def cancel_overdue(self) -> None:
        """Cancel calls of async functions that block their event loop beyond the time limit."""
        self._event_loop.cancel_overdue()

    def cancel(self, outcomes: Collection[Outcome]) -> None:
        """Cancel the unfinished calls among these.

        Call it also when all are done, to restore the output streams.
        """
        self._event_loop.cancel(outcomes)
        if self.pool is not None:
            self.pool.cancel(outcomes)

    def close(self) -> None:
        """Cancel all calls and stop event loop and processes. The next call starts new ones."""
        self._event_loop.close()
        if self.pool is not None:
            self.pool.close()


def check_worker_limits(timeout: float | None, workers: int | None) -> None:
    """Raise ValueError if a time limit or number of worker processes is out of range."""
    if timeout is not None and finite_number("reward_timeout", timeout) <= 0:
        raise ValueError(f"reward_timeout must be above 0 seconds, or None, got {timeout}.")
    if workers is not None and not 0 <= whole_number("reward_workers", workers) <= MAX_WORKERS:
        raise ValueError(f"reward_workers must be in [0, {MAX_WORKERS}], or None, got {workers}.")


class _EventLoop:
    """An event loop for async functions, in a thread of its own, so that it works in notebooks.

    It stays open between calls, so that a client opened in one call serves the next.

    Args:
        timeout: Time limit of one call, in seconds; None = no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        # Escapes what calls print, while any call is unfinished.
        self._prints = contextlib.ExitStack()
        self._started: dict[Outcome, float] = {}  # time of the start of unfinished calls

    def submit(self, function: Function, call: Call) -> Outcome:
        """Start a call."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon thread never keeps the program from ending.
            threading.Thread(
                target=self._loop.run_forever, name="evogrpo async rewards", daemon=True
            ).start()
        # Output is escaped while a call may print, also between `submit` and the wait for it.
        if not self._started:
            self._prints.enter_context(escaped_prints())
        coroutine = call_async(function, call, self._timeout)
        outcome = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        # Kept until `cancel`, which every caller ends with.
        self._started[outcome] = time.monotonic()
        return outcome

    def cancel_overdue(self) -> None:
        """Leave an event loop that is blocked: its calls have not ended at their time limit."""
        if self._timeout is None:
            return
        latest = time.monotonic() - self._timeout - GRACE_SECONDS
        # `call_async` applies the limit, so a call beyond it blocks the event loop.
        if any(start < latest and not each.done() for each, start in self._started.items()):
            self.close()

    def cancel(self, outcomes: Collection[Outcome]) -> None:
        """Cancel the unfinished calls among these."""
        for outcome in outcomes:
            if self._started.pop(outcome, None) is not None:
                outcome.cancel()
        if not self._started:
            self._prints.close()

    def close(self) -> None:
        """Cancel unfinished calls and stop the event loop."""
        for outcome in self._started:
            outcome.cancel()
        self._started.clear()
        # A blocked loop stops once its call returns; meanwhile the next call gets a new loop.
        loop = self._loop
        self._loop = None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_shut_down(), loop)


async def _shut_down() -> None:
    """Cancel all other tasks of this event loop, give them time to end, and stop the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    asyncio.get_running_loop().stop()


class WorkerPool:
    """Runs reward functions in worker processes.

    A worker that exceeds the time limit is killed with its child processes, and replaced. So is a
    worker that dies. Worker processes protect the run against crashes; they are no sandbox against
    hostile code.

    Args:
        functions: Reward functions by name.
        workers: Number of processes. They start with their first call.
        timeout: Time limit of one call, in seconds; None = no limit.

    Raises:
        ValueError: If a function cannot be pickled, or the first worker cannot load the functions.
    """

    def __init__(
        self, functions: Mapping[str, Function], *, workers: int, timeout: float | None
    ) -> None:
        packed = {}
        for name, function in functions.items():
            advice = "Define it at the top level of a module."
            packed[name] = pack_code(function, f"Reward function {name!r}", advice)
        handler = RewardHandler(packed)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self.workers = [_Worker(handler, self._tasks, timeout) for _ in range(workers)]
        # Runs at the end of the program, or when the pool is garbage collected.
        weakref.finalize(self, _end, self._tasks, self.workers, final=True)
        # An empty request raises ValueError if a worker process cannot load the functions.
        outcome = Outcome()
        self._tasks.put((outcome, b""))
        outcome.result()

    def submit(self, name: str, call: Call) -> Outcome:
        """Queue a call."""
        outcome = Outcome()
        try:
            request = pickle.dumps((name, call))
        except Exception as error:  # noqa: BLE001 (datasets may contain objects of any class)
            reason = f"{class_name(error)}: {one_line(error, 400)}"
            outcome.set_result(CallFailedError(f"cannot be sent its arguments, {reason}"))
            return outcome
        self._tasks.put((outcome, request))
        return outcome

    def cancel(self, outcomes: Collection[Outcome]) -> None:
        """Remove queued calls, and kill the processes of running ones."""
        running = set()
        for outcome in outcomes:
            # `cancel` removes a queued call, and returns False for a running or finished one.
            if not outcome.cancel() and not outcome.done():
                running.add(outcome)
        if not running:
            return
        for worker in self.workers:
            # Under the lock the worker cannot begin another call.
            with worker.lock:
                if worker.outcome in running and worker.process is not None:
                    worker.process.kill()

    def close(self) -> None:
        """Cancel all calls and kill all processes. The next call starts new ones."""
        _end(self._tasks, self.workers)


class _Worker:
    """A thread that sends queued calls to its own process, which it starts again if it has ended.

    Args:
        handler: Answers requests in the process.
        tasks: Queue of calls, shared by all workers; None ends the thread.
        timeout: Time limit of one call, in seconds; None = no limit.

    Attributes:
        process: The process; None before the first call.
        outcome: The running call; None while idle.
        lock: Held while `outcome` changes, so that only the process of a cancelled call is killed.
    """

    def __init__(
        self, handler: RewardHandler, tasks: "SimpleQueue[_Task | None]", timeout: float | None
    ) -> None:
        self._handler = handler
        self._tasks = tasks
        self._timeout = timeout
        self.process: WorkerProcess | None = None
        self.outcome: Outcome | None = None
        self.lock = threading.Lock()
        # Daemon threads never keep the program from ending.
        threading.Thread(target=self._run, name="evogrpo rewards", daemon=True).start()

    def _run(self) -> None:
        """Do tasks until the queue returns None; the body of the thread."""
        while (task := self._tasks.get()) is not None:
            outcome, request = task
            with self.lock:
                # False for a call that was cancelled in the queue.
                if not outcome.set_running_or_notify_cancel():
                    continue
                self.outcome = outcome
            try:
                outcome.set_result(self._call(request))
            except Exception as error:  # noqa: BLE001 (raised again in the caller's thread)
                outcome.set_exception(error)
            with self.lock:
                self.outcome = None
        if self.process is not None:
            self.process.close()

    def _call(self, request: bytes) -> Any:
        """Return the result of a call, or its failure.

        Raises:
            ValueError: If the process cannot load the functions.
        """
        if self.process is None or not self.process.running:
            # Close the pipes of the process that has ended.
            if self.process is not None:
                self.process.close()
            self.process = WorkerProcess(self._handler, escape_output=True)
            # An empty request loads the functions, with a time limit of its own.
            failure = self._answer(b"", START_SECONDS)
            if failure is not None:
                raise ValueError(f"A worker process cannot load the reward functions: {failure}")
        return self._answer(request, self._timeout)

    def _answer(self, request: bytes, limit: float | None) -> Any:
        """Return the result of a request, or the error of one that failed."""
        assert self.process is not None
        try:
            return decoded(self.process.call(request, limit))
        except TimeoutError:
            assert limit is not None
            return timeout_error(limit)
        except WorkerError as error:
            return CallFailedError(f"failed: its worker process {error}")


def _end(
    tasks: "SimpleQueue[_Task | None]", workers: Sequence[_Worker], *, final: bool = False
) -> None:
    """Cancel queued calls and kill the processes; with `final`, end the threads too."""
    with contextlib.suppress(Empty):
        while (task := tasks.get_nowait()) is not None:
            outcome, _ = task
            outcome.cancel()
    for worker in workers:
        # One end mark for each thread.
        if final:
            tasks.put(None)
        if worker.process is not None:
            worker.process.kill()
