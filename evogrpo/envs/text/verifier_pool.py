"""Verifier workers: a pool of processes that run reward functions with a time limit."""

import contextlib
import importlib.machinery
import io
import json
import os
import pickle  # noqa: TID251 (sent to our own child process; replies are JSON)
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import FunctionType
from typing import Any

from evogrpo.envs.text.reward_calls import (
    GRACE_SECONDS,
    CallFailedError,
    CallTimeoutError,
    Function,
    Job,
    Outcome,
    PendingJob,
    forward_output,
    is_async,
)
from evogrpo.envs.text.step_rewards import StepRewards
from evogrpo.interruption import NEVER, Stop

SCRIPT = Path(__file__).with_name("verifier_worker.py")
WORKER_VARIABLE = "EVOGRPO_VERIFIER"  # environment variable that marks worker processes
MAX_REPLY_BYTES = 64 * 2**20
START_SECONDS = 120.0  # time limit for a worker to import the reward functions
POLL_SECONDS = 0.5  # longest wait without checking for Ctrl-C


def setup_message(functions: Mapping[str, Function], timeout: float | None) -> bytes:
    """Return the first message to a worker, with the reward functions and the modules to load.

    Raises:
        ValueError: If a function cannot be pickled.
    """
    modules: dict[str, tuple[str, str | None, str | None]] = {}
    pickled: dict[str, bytes] = {}
    for name, function in functions.items():
        pickled[name], names = _pickled(name, function)
        for module in sorted(names):
            modules[module] = _module_source(name, module)
    special = [source for key, source in modules.items() if source[1:] != (key, None)]
    setup = {"path": list(sys.path), "modules": special, "functions": pickled, "timeout": timeout}
    return pickle.dumps(setup)


def _pickled(name: str, function: Function) -> tuple[bytes, set[str]]:
    """Pickle a function; return also the modules of the functions and classes in it."""
    modules: set[str] = set()

    class Recording(pickle.Pickler):
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, FunctionType | type):
                modules.add(item.__module__)
            return NotImplemented

    buffer = io.BytesIO()
    try:
        Recording(buffer).dump(function)
    except Exception as error:
        raise ValueError(
            f"Reward function {name!r} cannot be sent to a worker process ({type(error).__name__}: {error}). Define it "
            "with `def` at the top level of a module, or remove reward_workers and reward_timeout."
        ) from error
    return buffer.getvalue(), modules - {"builtins"}


def _module_source(name: str, module: str) -> tuple[str, str | None, str | None]:
    """Return a module's name, and the module to import or the file to run in a worker."""
    loaded = sys.modules.get(module)
    spec, file = getattr(loaded, "__spec__", None), getattr(loaded, "__file__", None)
    # The main module has another name in a worker: import it by its real name, or run its file.
    if module == "__main__":
        if spec is not None:  # python -m
            return module, str(spec.name), None
    elif file is None or "." in module:
        return module, module, None
    else:
        # A module loaded from a file by path cannot be imported by name.
        spec = importlib.machinery.PathFinder.find_spec(module)
        origin = None if spec is None else spec.origin
        if origin is not None and Path(origin).exists() and Path(origin).samefile(file):
            return module, module, None
    if file is None:
        raise ValueError(
            f"Reward function {name!r} cannot be sent to a worker process: it was defined in a notebook or interactive "
            "session. Move it to a module, or remove reward_workers and reward_timeout."
        )
    return module, None, str(Path(file).absolute())


class InvalidReward:
    """A worker's result that cannot be a reward, with the repr of the original."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_message(line: bytes) -> dict[str, Any] | None:
    """Return a worker's message, or None if it is malformed."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def parse_reply(line: bytes) -> Outcome:
    """Return the outcome of a job, or None if the reply is malformed."""
    message = read_message(line)
    if message is None:
        return None
    if "unread" in message:
        return CallFailedError(f"cannot read its arguments in a worker process, {escaped(message['unread'])}")
    try:
        return [_value(value) for value in message["values"]]
    except (KeyError, TypeError, ValueError):
        return None


def _value(value: Any) -> Any:
    """Decode one value of a worker's reply."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return InvalidReward(f"{value!r:.240}") if isinstance(value, str) else value
    if "failed" in value:
        return CallFailedError(escaped(value["failed"]))
    if "raised" in value:
        kind, text, where = value["raised"]
        return CallFailedError(f"raised {escaped(kind)}: {str(text)!r:.400}{escaped(where)}")
    if "steps" in value:
        return StepRewards(*value["steps"])
    return InvalidReward(str(value.get("other")))


def escaped(text: object) -> str:
    """Return a short text with control characters escaped: it may contain parts of a completion."""
    return f"{str(text)!r:.400}"[1:-1]


class WorkerProcess:
    """A running worker.

    Three threads read and write its pipes, so that a full or unclosed pipe never blocks the caller.

    Args:
        setup: The first message.
        inbox: Queue for (this worker, line of its output); the line is None when the output ends.
        deadline: Time limit for loading the functions, on the monotonic clock.

    Attributes:
        ready: True once it has loaded the functions.
        job: Its current job; None while idle.
        deadline: Time limit of the current job; None = no limit.
        ending: Description of its exit, after `kill`.
    """

    def __init__(self, setup: bytes, inbox: "SimpleQueue[tuple[WorkerProcess, bytes | None]]", deadline: float) -> None:
        # One thread per worker, so that the workers and this process share the cores.
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, WORKER_VARIABLE: "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            # A new session, so that Ctrl-C does not reach it and its child processes can be killed with it.
            start_new_session=True,
        )
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.ready = False
        self.job: PendingJob | None = None
        self.deadline: float | None = deadline
        self.ending = ""
        assert self._process.stderr is not None
        printed = self._process.stderr
        # Daemon threads: they never keep the program from ending.
        for work in (self._write, lambda: self._read(inbox), lambda: forward_output(printed)):
            threading.Thread(target=work, name="evogrpo rewards", daemon=True).start()
        self.send(setup)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def send(self, message: bytes) -> None:
        """Queue a message for the worker."""
        self._outbox.put(len(message).to_bytes(8, "big") + message)

    def kill(self, *, patience: float = 0.0) -> None:
        """Kill the process and its child processes.

        Args:
            patience: Seconds to wait for it to exit by itself first, so that `ending` describes its own exit.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.ending = _describe_exit(self._process.poll())
        if hasattr(os, "killpg"):  # kills its child processes too
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with self._process.stdin as pipe, contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                while message:
                    message = message[pipe.write(message) :]

    def _read(self, inbox: "SimpleQueue[tuple[WorkerProcess, bytes | None]]") -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as pipe, contextlib.suppress(OSError):
            while len(rest) < MAX_REPLY_BYTES and (new := pipe.read(65536)):
                *lines, rest = (rest + new).split(b"\n")
                for line in lines:
                    inbox.put((self, line))
        inbox.put((self, None))


def _describe_exit(code: int | None) -> str:
    """Describe the exit code of a process."""
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


class VerifierPool:
    """Runs reward functions in worker processes.

    A worker that exceeds the time limit is killed with its child processes, and replaced. So is a worker that dies.
    Worker processes protect the run against crashes; they are no sandbox against hostile code.

    Args:
        functions: Reward functions by name, defined at the top level of a module or script.
        workers: Maximum number of processes.
        timeout: Time limit of one call, in seconds; None = no limit.

    Raises:
        ValueError: If a function cannot be pickled.
    """

    in_process = False

    def __init__(self, functions: Mapping[str, Function], *, workers: int, timeout: float | None) -> None:
        if WORKER_VARIABLE in os.environ:
            raise ValueError(
                "Worker processes import the script that defines reward functions, which starts training again. Put "
                'the training under `if __name__ == "__main__":`, or move the reward functions to a module.'
            )
        self.num_workers = workers
        self._timeout = timeout
        self._async = {name for name, function in functions.items() if is_async(function)}
        # call_async applies the limit to async functions itself; the pool steps in if the loop is blocked.
        self._limits = {
            name: None if timeout is None else timeout + (GRACE_SECONDS if name in self._async else 0.0)
            for name in functions
        }
        self._setup = setup_message(functions, timeout)
        self._inbox: queue.SimpleQueue[tuple[WorkerProcess, bytes | None]] = queue.SimpleQueue()
        self._workers: list[WorkerProcess] = []
        self._queue: deque[PendingJob] = deque()
        # Runs at the end of the program, or when the pool is garbage collected.
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        self._start()

    def check(self) -> None:
        """Wait until the first worker has loaded the functions.

        Raises:
            ValueError: If loading fails.
        """
        try:
            while any(not worker.ready for worker in self._workers):
                self._receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all workers. The next call starts new ones."""
        for job in [*self._queue, *(worker.job for worker in self._workers if worker.job is not None)]:
            job.finish(CallFailedError("was cancelled because its environment was closed"))
        self._queue.clear()
        _kill_all(self._workers)

    def runs_in_background(self, name: str) -> bool:
        """Return True for functions that are not async. Async ones are faster with many completions per job."""
        return name not in self._async

    def submit(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """Send jobs to idle workers and queue the others; see `RewardRunner.submit`."""
        for worker in [worker for worker in self._workers if worker.job is None and not worker.alive]:
            self._drop(worker)  # it died while idle
        pending = [PendingJob(job) for job in jobs]
        self._queue.extend(pending)
        self._dispatch()
        return pending

    def poll(self) -> None:
        """Send queued jobs to workers that have become idle; see `RewardRunner.poll`.

        Raises:
            ValueError: If a new worker cannot load the functions.
        """
        while self._receive(max_wait=0.0):
            pass
        self._dispatch()

    def wait(self, pending: Sequence[PendingJob], *, stop_at_first: bool, stop: Stop = NEVER) -> list[Outcome]:
        """Wait until jobs are done; see `RewardRunner.wait`.

        Raises:
            ValueError: If a new worker cannot load the functions.
        """
        unfinished = list(pending)
        try:
            while unfinished:
                stop.check()
                self._dispatch()
                if stop_at_first and any(job.done and job.failed for job in unfinished):
                    break
                unfinished = [job for job in unfinished if not job.done]
                if unfinished:
                    self._receive()
            return [job.outcome for job in pending]
        finally:
            self.cancel(pending)

    def cancel(self, pending: Sequence[PendingJob]) -> None:
        """Kill the workers of unfinished jobs and remove them from the queue; see `RewardRunner.cancel`."""
        cancelled = {job for job in pending if not job.done}
        self._queue = deque(job for job in self._queue if job not in cancelled)
        for worker in [worker for worker in self._workers if worker.job in cancelled]:
            self._drop(worker)

    def _start(self) -> None:
        self._workers.append(WorkerProcess(self._setup, self._inbox, time.monotonic() + START_SECONDS))

    def _drop(self, worker: WorkerProcess, *, patience: float = 0.0) -> None:
        self._workers.remove(worker)
        worker.kill(patience=patience)

    def _dispatch(self) -> None:
        """Give every idle worker a job, and start more workers for the remaining ones."""
        idle = [worker for worker in self._workers if worker.ready and worker.job is None]
        # 1. Send queued jobs to idle workers.
        while self._queue and idle:
            pending = self._queue.popleft()
            job = pending.job
            try:
                request = pickle.dumps((job.name, job.calls))
            except Exception as error:  # noqa: BLE001 (datasets may contain objects of any class)
                text = f"cannot be sent its arguments, {type(error).__name__}: {escaped(error)}"
                pending.finish(CallFailedError(text))
                continue
            limit = self._limits[job.name]
            worker = idle.pop()
            worker.job = pending
            worker.deadline = None if limit is None else time.monotonic() + limit
            worker.send(request)
        # 2. Start a worker for each job that no starting worker will take.
        starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self.num_workers and starting < len(self._queue):
            self._start()
            starting += 1

    def _receive(self, max_wait: float = POLL_SECONDS) -> bool:
        """Wait for one event and handle it; return False if there was none."""
        # 1. Wait for a reply or the nearest deadline.
        busy = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        if not busy:
            return False
        nearest = min((worker.deadline for worker in busy if worker.deadline is not None), default=None)
        timeout = max_wait if nearest is None else min(max(nearest - time.monotonic(), 0.0), max_wait)
        try:
            worker, line = self._inbox.get(timeout=timeout)
        except queue.Empty:
            overdue = [
                candidate
                for candidate in busy
                if candidate.deadline is not None and candidate.deadline <= time.monotonic()
            ]
            if overdue:
                self._time_out(overdue[0])
            return bool(overdue)
        # 2. Handle the reply.
        if worker not in self._workers:
            return True  # it was killed
        if not worker.ready:
            self._check_started(worker, line)
            return True
        pending, worker.job = worker.job, None
        outcome = None if line is None else parse_reply(line)
        if outcome is None:
            self._drop(worker, patience=1.0)
            outcome = CallFailedError(f"ended its worker process ({worker.ending})")
        if pending is not None:
            pending.finish(outcome)
        return True

    def _time_out(self, worker: WorkerProcess) -> None:
        """Replace a worker whose time limit has passed, and report its job as failed."""
        pending = worker.job
        self._drop(worker)
        if not worker.ready or pending is None:
            raise ValueError(f"Loading the reward functions in a worker process took longer than {START_SECONDS:g} s.")
        assert self._timeout is not None
        pending.finish(CallTimeoutError(self._timeout))

    def _check_started(self, worker: WorkerProcess, line: bytes | None) -> None:
        """Mark a worker as ready, or raise ValueError if it could not load the functions."""
        message = None if line is None else read_message(line)
        if message is not None and "ready" in message:
            worker.ready = True
            return
        self._drop(worker, patience=1.0)
        reason = f"it ended ({worker.ending})" if message is None else escaped(message.get("refused"))
        raise ValueError(f"A worker process cannot load the reward functions: {reason}")


def _kill_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
