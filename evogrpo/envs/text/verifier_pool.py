"""Verifier workers: a pool of processes that run reward functions with a time limit."""

import contextlib
import io
import json
import os
import pickle  # noqa: TID251 (sent to our own child process; replies are JSON)
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import cloudpickle

from evogrpo.distributed import cores_per_rank
from evogrpo.envs.text.reward_functions import (
    GRACE_SECONDS,
    Call,
    CallFailedError,
    Function,
    InProcessRunner,
    Results,
    Reward,
    StepRewards,
    is_async,
    timeout_error,
)
from evogrpo.interruption import NEVER, Stop
from evogrpo.text import USER_MODULE_PREFIX, EscapingStream, class_name, one_line, printable
from evogrpo.validation import finite_number, whole_number

SCRIPT = Path(__file__).with_name("verifier_worker.py")
WORKER_VARIABLE = "EVOGRPO_VERIFIER"  # environment variable that marks worker processes
MAX_REPLY_BYTES = 64 * 2**20
MAX_LINE_LENGTH = 2**16  # characters of a worker's output that are kept in memory
MAX_WORKERS = 1024  # largest number of worker processes
DEFAULT_WORKERS = 8  # worker processes by default, if there are as many cores
START_SECONDS = 120.0  # time limit for a worker to load the reward functions

_Task = tuple["Future[Results]", bytes, float | None]
"""A job's future, its request, and its time limit in seconds."""


class _Worker:
    """A thread that sends queued jobs to its own process, which it starts again if it has ended.

    Args:
        setup: First message to the process.
        tasks: Queue of jobs, shared by all workers; None ends the thread.

    Attributes:
        process: The process; None before the first job.
        future: The running job; None while idle.
        lock: Held while `future` changes, so that only the process of a cancelled job is killed.
        owner: Id of the process that this worker belongs to. Its forks have copies of this object.
    """

    def __init__(self, setup: bytes, tasks: "SimpleQueue[_Task | None]") -> None:
        self._setup = setup
        self._tasks = tasks
        self.process: subprocess.Popen[bytes] | None = None
        self.future: Future[Results] | None = None
        self.lock = threading.Lock()
        self.owner = os.getpid()
        self._requests = 0  # number of the next request
        # Daemon threads never keep the program from ending.
        threading.Thread(target=self._run, name="evogrpo rewards", daemon=True).start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, request, limit = task
            with self.lock:
                if not future.set_running_or_notify_cancel():
                    continue
                self.future = future
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                assert self.process is not None
                future.set_result(self._exchange(self.process, request, limit))
            except Exception as error:  # noqa: BLE001 (passed on to the caller)
                future.set_exception(error)
            with self.lock:
                self.future = None
        self._close_pipes()

    def _start(self) -> None:
        """Start the process and wait until it has loaded the functions."""
        self._close_pipes()
        # One thread per worker, so that the workers and this process share the cores.
        environment = {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            WORKER_VARIABLE: "1",
        }
        self.process = process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            # A new session, so that Ctrl-C does not reach it and its child processes can be killed
            # with it.
            start_new_session=True,
        )
        threading.Thread(target=forward_output, args=(process.stderr,), daemon=True).start()
        try:
            self._exchange(process, self._setup, START_SECONDS)
        except CallFailedError as error:
            raise ValueError(
                f"A worker process cannot load the reward functions: {error}"
            ) from None

    def _exchange(
        self, process: "subprocess.Popen[bytes]", message: bytes, limit: float | None
    ) -> Results:
        """Send a request and return the reply, both with the same number.

        Raises:
            CallFailedError: If the call failed. A process that ends, exceeds the limit or sends
                another reply is killed.
        """
        assert process.stdin is not None and process.stdout is not None
        self._requests += 1
        number = self._requests
        began = time.monotonic()
        if limit is None:
            timer = None
        else:
            timer = threading.Timer(limit, _kill, [process])
        if timer is not None:
            timer.daemon = True
            timer.start()
        # 1. Send the request and read one line.
        line = b""
        try:
            process.stdin.write(
                len(message).to_bytes(8, "big") + number.to_bytes(8, "big") + message
            )
            process.stdin.flush()
            line = process.stdout.readline(MAX_REPLY_BYTES)
        except (OSError, ValueError):  # a closed pipe
            pass
        # 2. Kill a process that has not answered this request.
        try:
            answered, reply = json.loads(line, object_hook=_decoded)
        except (ValueError, TypeError):
            answered = None
            reply = None
        if answered != number:
            complete = line.endswith(b"\n") or len(line) == MAX_REPLY_BYTES
            ending = _kill(process, patience=0.0 if complete else 1.0)
        if timer is not None:
            timer.cancel()
            # it may be killing the process, which must not happen after the next job was sent to it
            timer.join()
        if answered != number:
            if limit is not None and time.monotonic() - began >= limit:
                raise timeout_error(limit)
            if complete:
                raise CallFailedError(
                    f"was stopped, as its worker process sent a wrong reply: {line[:80]!r}"
                )
            raise CallFailedError(f"ended its worker process ({ending})")
        if isinstance(reply, CallFailedError):
            raise reply
        return list(reply)

    def _close_pipes(self) -> None:
        for pipe in () if self.process is None else (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes


def forward_output(pipe: IO[bytes]) -> None:
    """Copy a worker's output to standard error until it ends, line by line."""
    with io.TextIOWrapper(pipe, "utf-8", "replace") as lines:
        while text := lines.readline(MAX_LINE_LENGTH):
            if sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    EscapingStream(sys.stderr).write(text)
                    sys.stderr.flush()


def _kill(process: "subprocess.Popen[bytes]", patience: float = 0.0) -> str:
    """Kill a process and its child processes; describe how it ended.

    Args:
        process: The process.
        patience: Seconds to wait for it to exit by itself first.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    code = process.poll()
    if hasattr(os, "killpg"):  # kills its child processes too
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}: {signal.strsignal(-code)}"


def _decoded(item: dict[str, Any]) -> StepRewards | CallFailedError:
    """Decode an object in a worker's reply."""
    if "steps" in item:
        return StepRewards(*item["steps"])
    return CallFailedError(printable(str(item["failed"]))[:1000])


class VerifierPool:
    """Runs reward functions in worker processes.

    A worker that exceeds the time limit is killed with its child processes, and replaced. So is a
    worker that dies. Worker processes protect the run against crashes; they are no sandbox against
    hostile code.

    Args:
        functions: Reward functions by name.
        workers: Number of processes. They start with their first job.
        timeout: Time limit of one call, in seconds; None = no limit.

    Raises:
        ValueError: If a function cannot be pickled, or the first worker cannot load the functions.
    """

    in_process = False

    def __init__(
        self, functions: Mapping[str, Function], *, workers: int, timeout: float | None
    ) -> None:
        if WORKER_VARIABLE in os.environ:
            raise ValueError(
                "Worker processes import this program. Put training under `if __name__ =="
                ' "__main__":`.'
            )
        # 1. Pickle the functions: those of importable modules by name, others (of scripts and
        # notebooks) with their code.
        pickled = {}
        for name, function in functions.items():
            try:
                pickled[name] = cloudpickle.dumps(function)
            except Exception as error:
                reason = f"{class_name(error)}: {one_line(error)}"
                raise ValueError(
                    f"Reward function {name!r} cannot be sent to a worker process ({reason})."
                    " Define it at the top level of a module."
                ) from error
        # Files that a configuration names cannot be imported by name, so workers load them by path.
        files = {
            name: module.__file__
            for name, module in sys.modules.copy().items()
            if name.startswith(USER_MODULE_PREFIX)
            and any(name.encode() in data for data in pickled.values())
        }
        setup = {"path": list(sys.path), "files": files, "functions": pickled, "timeout": timeout}
        # 2. Create the workers, whose processes start with their first job.
        self.num_workers = workers
        self._timeout = timeout
        self._async = {name for name, function in functions.items() if is_async(function)}
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._workers = [_Worker(pickle.dumps(setup), self._tasks) for _ in range(workers)]
        # Runs at the end of the program, or when the pool is garbage collected.
        weakref.finalize(self, _end, self._tasks, self._workers, final=True)
        # 3. Run an empty job: it raises ValueError if a worker process cannot load the functions.
        self.submit(next(iter(functions)), ()).result()

    def close(self) -> None:
        """Cancel all jobs and kill all processes. The next job starts new ones."""
        _end(self._tasks, self._workers)

    def runs_in_background(self, name: str) -> bool:
        """Return True for functions that are not async.

        Async ones are faster with many completions per job.
        """
        return name not in self._async

    def submit(self, name: str, calls: Sequence[Call], stop: Stop = NEVER) -> "Future[Results]":
        """Queue the calls of a function as one job. Failures inside the function are results."""
        future: Future[Results] = Future()
        # call_async applies the limit to async functions itself; the pool steps in if their loop is
        # blocked.
        grace = GRACE_SECONDS if name in self._async else 0.0
        if self._timeout is None:
            limit = None
        else:
            limit = self._timeout + grace
        try:
            self._tasks.put((future, pickle.dumps((name, calls)), limit))
        except Exception as error:  # noqa: BLE001 (datasets may contain objects of any class)
            text = (
                f"cannot be sent its arguments, {class_name(error)}: {printable(str(error))[:400]}"
            )
            future.set_exception(CallFailedError(text))
        return future

    def cancel(self, futures: Sequence["Future[Results]"]) -> None:
        """Remove queued jobs, and kill the processes of running ones."""
        running = {future for future in futures if not future.cancel() and not future.done()}
        for worker in self._workers if running else ():
            with worker.lock:
                if worker.future in running and worker.process is not None:
                    _kill(worker.process)


def _end(
    tasks: "SimpleQueue[_Task | None]", workers: Sequence[_Worker], *, final: bool = False
) -> None:
    """Cancel queued jobs and kill the processes; with `final`, end the threads too."""
    with contextlib.suppress(Empty):
        while (task := tasks.get_nowait()) is not None:
            task[0].cancel()
    for worker in workers:
        if final:
            tasks.put(None)
        # not in a fork of this process
        if worker.process is not None and worker.owner == os.getpid():
            _kill(worker.process)


RewardRunner = InProcessRunner | VerifierPool


def make_reward_runner(
    rewards: Sequence[Reward], timeout: float | None, workers: int | None
) -> RewardRunner:
    """Return a runner that calls the reward functions.

    Args:
        rewards: The reward functions.
        timeout: Time limit of one call, in seconds; None = no limit.
        workers: Number of worker processes; 0 = call functions in this process; None = one per
            core, at most 8, if a timeout is set and a function is not async, otherwise 0.

    Raises:
        ValueError: If a number is out of range, a timeout needs worker processes, or a function
            cannot be pickled.
    """
    check_worker_limits(timeout, workers)
    functions = {reward.name: reward.function for reward in rewards}
    synchronous = [name for name, function in functions.items() if not is_async(function)]
    # Only worker processes can stop a function that is not async.
    if workers is None:
        if timeout is not None and synchronous:
            workers = min(DEFAULT_WORKERS, cores_per_rank())
        else:
            workers = 0
    if workers > 0:
        return VerifierPool(functions, workers=workers, timeout=timeout)
    if timeout is not None and synchronous:
        raise ValueError(
            f"reward_timeout requires reward_workers of at least 1 for {synchronous[0]!r} (not"
            " async)."
        )
    return InProcessRunner(functions, timeout)


def check_worker_limits(timeout: float | None, workers: int | None) -> None:
    """Raise ValueError if a time limit or number of worker processes is out of range."""
    if timeout is not None and finite_number("reward_timeout", timeout) <= 0:
        raise ValueError(f"reward_timeout must be above 0 seconds, or None, got {timeout}.")
    if workers is not None and not 0 <= whole_number("reward_workers", workers) <= MAX_WORKERS:
        raise ValueError(f"reward_workers must be in [0, {MAX_WORKERS}], or None, got {workers}.")
