"""Pool of worker processes that run reward functions with a time limit."""

import contextlib
import importlib.machinery
import io
import json
import os
import pickle  # noqa: TID251 (sent to our own child process, never a file; what comes back is JSON)
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
from evogrpo.interruption import check_interrupted


def setup_message(functions: Mapping[str, Function], timeout: float | None) -> bytes:
    """Return the first message to a worker: how to find the reward functions.

    Raises:
        ValueError: If a function cannot be sent to another process.
    """
    modules: dict[str, tuple[str, str | None, str | None]] = {}
    sent: dict[str, bytes] = {}
    for name, function in functions.items():
        sent[name], named = _pickled(name, function)
        for module in sorted(named):
            modules[module] = _found(name, module)
    own = {key: value for key, value in modules.items() if value[1:] != (key, None)}
    setup = {"path": list(sys.path), "modules": list(own.values()), "functions": sent, "timeout": timeout}
    return pickle.dumps(setup)


def _pickled(name: str, function: Function) -> tuple[bytes, set[str]]:
    """Return a function as bytes, and the modules in which functions and classes in it are defined."""
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
            f"reward function {name!r} cannot be sent to a worker process ({type(error).__name__}: {error}): define it "
            "with `def` at the top level of a module, not inside a function or as a lambda, or leave out "
            "reward_workers and reward_timeout"
        ) from error
    return buffer.getvalue(), modules - {"builtins"}


def _found(name: str, module: str) -> tuple[str, str | None, str | None]:
    """Return how another process finds a module: its name, what to import for it, or the file to run."""
    loaded = sys.modules.get(module)
    spec, file = getattr(loaded, "__spec__", None), getattr(loaded, "__file__", None)
    if module == "__main__":
        if spec is not None:  # python -m
            return module, str(spec.name), None
    elif file is None or "." in module:
        return module, module, None
    else:
        known = importlib.machinery.PathFinder.find_spec(module)
        origin = None if known is None else known.origin
        if origin is not None and Path(origin).exists() and Path(origin).samefile(file):
            return module, module, None
    if file is None:
        raise ValueError(
            f"reward function {name!r} cannot be sent to a worker process: it was defined in a notebook or at a "
            "prompt, where no other process can find it; put it into a module, or leave out reward_workers and "
            "reward_timeout"
        )
    return module, None, str(Path(file).absolute())


def request_message(job: Job) -> bytes:
    """Return a job as a worker reads it; raises whatever pickling an argument raises."""
    return pickle.dumps((job.name, job.calls))


class InvalidReward:
    """What a worker says of a result that cannot be a reward; its repr is that of the result."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_message(line: bytes) -> dict[str, Any] | None:
    """Return what a worker has said; None where it cannot be read."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def parse_reply(line: bytes) -> Outcome:
    """Return what a reply says; None where it cannot be read."""
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
    """Return a short text without control codes: it may hold parts of a completion."""
    return f"{str(text)!r:.400}"[1:-1]


SCRIPT = Path(__file__).with_name("verifier_worker.py")
WORKER_VARIABLE = "EVOGRPO_VERIFIER"  # set in the environment of workers
MAX_REPLY_BYTES = 64 * 2**20  # bytes


class WorkerProcess:
    """A running worker.

    Three threads move bytes, so that neither a full pipe nor a process that keeps one open can block the caller.

    Args:
        setup: The first message: what to load.
        inbox: Where (this worker, a line that it replied) goes; None instead of a line when it has ended.
        deadline: When it must have said that it is ready.

    Attributes:
        ready: Whether it has.
        job: What it is at; None while idle.
        deadline: When that must be done, on the monotonic clock; None = whenever.
        ending: After `kill`: how it ended.
    """

    def __init__(self, setup: bytes, inbox: "SimpleQueue[tuple[WorkerProcess, bytes | None]]", deadline: float) -> None:
        # One thread for each worker's libraries: there are many workers, and this process wants its cores back.
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, WORKER_VARIABLE: "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            # A session of its own: Ctrl-C in the terminal does not reach it, and its children can be killed with it.
            start_new_session=True,
        )
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.ready = False
        self.job: PendingJob | None = None
        self.deadline: float | None = deadline
        self.ending = ""
        assert self._process.stderr is not None
        printed = self._process.stderr
        for work in (self._write, lambda: self._read(inbox), lambda: forward_output(printed)):
            threading.Thread(target=work, name="evogrpo rewards", daemon=True).start()
        self.send(setup)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def send(self, message: bytes) -> None:
        """Have a message written as soon as the worker reads."""
        self._outbox.put(len(message).to_bytes(8, "big") + message)

    def kill(self, *, patience: float = 0.0) -> None:
        """End the process and whatever it has started.

        Args:
            patience: Seconds for it to end by itself, where it is about to and how it does is worth knowing.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.ending = _ending(self._process.poll())
        if hasattr(os, "killpg"):
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


def _ending(code: int | None) -> str:
    """Describe an exit code."""
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, perhaps out of memory" if name == "SIGKILL" else name


START_SECONDS = 120.0  # for a worker to import what the functions need
POLL_SECONDS = 0.5  # that nothing else is looked at while waiting: Ctrl-C wants to be heard


class VerifierPool:
    """Runs reward functions in worker processes.

    A worker that exceeds the time limit is killed together with every process it has started, and replaced by a new
    one; so is one that dies. Processes keep accidents apart from the run; they are no sandbox against hostile code.

    Args:
        functions: By name; defined at the top level of a module or script, so that another process can find them.
        workers: Most processes at a time.
        timeout: Seconds that one call may take; None = no limit.

    Raises:
        ValueError: If a number is out of range or a function cannot be sent to another process.
    """

    here = False

    def __init__(self, functions: Mapping[str, Function], *, workers: int, timeout: float | None) -> None:
        if WORKER_VARIABLE in os.environ:
            raise ValueError(
                "a script whose reward functions run in worker processes is loaded by each of them: keep what trains "
                'under `if __name__ == "__main__":`, or put the reward functions into a module of their own'
            )
        self.shares = workers
        self._timeout = timeout
        self._async = {name for name, function in functions.items() if is_async(function)}
        self._limits = {
            name: None if timeout is None else timeout + (GRACE_SECONDS if name in self._async else 0.0)
            for name in functions
        }
        self._setup = setup_message(functions, timeout)
        self._inbox: queue.SimpleQueue[tuple[WorkerProcess, bytes | None]] = queue.SimpleQueue()
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[PendingJob] = deque()
        # At the end of the program, or when the pool is dropped.
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        self._start()

    def check(self) -> None:
        """Wait until the first worker has loaded the functions.

        Raises:
            ValueError: If it cannot.
        """
        try:
            while any(not worker.ready for worker in self._workers):
                self._receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all workers, whatever they are at; the next call starts new ones."""
        for each in [*self._waiting, *(worker.job for worker in self._workers if worker.job is not None)]:
            each.ended(CallFailedError("was given up, as its environment was closed"))
        self._waiting.clear()
        _kill_all(self._workers)

    def runs_in_background(self, name: str) -> bool:
        """Return whether a function is not async: those that are wait for many completions at once, a job at a time."""
        return name not in self._async

    def begin(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """Hand jobs out to as many workers as there are; see `RewardRunner.begin`."""
        for worker in [worker for worker in self._workers if worker.job is None and not worker.alive]:
            self._drop(worker)  # it died while nobody asked it anything
        begun = [PendingJob(job) for job in jobs]
        self._waiting.extend(begun)
        self._dispatch()
        return begun

    def proceed(self) -> None:
        """Hand jobs out to workers that have become idle; see `RewardRunner.proceed`.

        Raises:
            ValueError: If a worker cannot load the functions any more.
        """
        while self._receive(patience=0.0):
            pass
        self._dispatch()

    def finish(self, begun: Sequence[PendingJob], *, stop_at_first: bool) -> list[Outcome]:
        """Wait until jobs are done; see `RewardRunner.finish`.

        Raises:
            ValueError: If a worker cannot load the functions any more.
        """
        left = list(begun)
        try:
            while left:
                check_interrupted()
                self._dispatch()
                ended = [each for each in left if each.done]
                if stop_at_first and any(each.failed for each in ended):
                    break
                left = [each for each in left if not each.done] if ended else left
                if left:
                    self._receive()
            return [each.outcome for each in begun]
        finally:
            self.abandon(begun)

    def abandon(self, begun: Sequence[PendingJob]) -> None:
        """Kill whoever is at one of these jobs, and let nobody begin another of them; see `RewardRunner.abandon`."""
        given_up = {each for each in begun if not each.done}
        self._waiting = deque(each for each in self._waiting if each not in given_up)
        for worker in [worker for worker in self._workers if worker.job in given_up]:
            self._drop(worker)

    def _start(self) -> None:
        self._workers.append(WorkerProcess(self._setup, self._inbox, time.monotonic() + START_SECONDS))

    def _drop(self, worker: WorkerProcess, *, patience: float = 0.0) -> None:
        self._workers.remove(worker)
        worker.kill(patience=patience)

    def _dispatch(self) -> None:
        """Give every idle worker a job, and start workers while there is more to do than they can take."""
        idle = [worker for worker in self._workers if worker.ready and worker.job is None]
        while self._waiting and idle:
            begun = self._waiting.popleft()
            try:
                request = request_message(begun.job)
            except Exception as error:  # noqa: BLE001 (a dataset may hold objects of any class)
                text = f"cannot be sent its arguments, {type(error).__name__}: {escaped(error)}"
                begun.ended(CallFailedError(text))
                continue
            limit = self._limits[begun.job.name]
            worker = idle.pop()
            worker.job = begun
            worker.deadline = None if limit is None else time.monotonic() + limit
            worker.send(request)
        starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self.shares and starting < len(self._waiting):
            self._start()
            starting += 1

    def _receive(self, patience: float = POLL_SECONDS) -> bool:
        """Wait for one event and note what it means; tells whether there was one."""
        expected = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        if not expected:
            return False
        nearest = min((worker.deadline for worker in expected if worker.deadline is not None), default=None)
        left = patience if nearest is None else min(max(nearest - time.monotonic(), 0.0), patience)
        try:
            worker, line = self._inbox.get(timeout=left)
        except queue.Empty:
            late = [each for each in expected if each.deadline is not None and each.deadline <= time.monotonic()]
            if late:
                self._late(late[0])
            return bool(late)
        if worker not in self._workers:
            return True  # the last words of one that was killed
        if not worker.ready:
            self._started(worker, line)
            return True
        begun, worker.job = worker.job, None
        outcome = None if line is None else parse_reply(line)
        if outcome is None:
            self._drop(worker, patience=1.0)
            outcome = CallFailedError(f"ended its worker process ({worker.ending})")
        if begun is not None:
            begun.ended(outcome)
        return True

    def _late(self, worker: WorkerProcess) -> None:
        begun = worker.job
        self._drop(worker)
        if not worker.ready or begun is None:
            raise ValueError(f"a worker process took longer than {START_SECONDS:g} s to load the reward functions")
        assert self._timeout is not None  # else nothing is ever late
        begun.ended(CallTimeoutError(self._timeout))

    def _started(self, worker: WorkerProcess, line: bytes | None) -> None:
        message = None if line is None else read_message(line)
        if message is not None and "ready" in message:
            worker.ready = True
            return
        self._drop(worker, patience=1.0)
        reason = f"it ended ({worker.ending})" if message is None else escaped(message.get("refused"))
        raise ValueError(f"a worker process cannot load the reward functions: {reason}")


def _kill_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().kill()
