"""Reward functions in processes of their own: one that hangs is killed, one that dies is reported, the run goes on.

`concurrent.futures` cannot kill a worker that hangs, and `multiprocessing` runs the caller's script again in every
worker; so the workers here are plain child processes (`worker.py`), started afresh and never forked: nothing of
this process, neither its threads nor torch, reaches them.
"""

import os
import queue
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

from evogrpo.envs.prompts.rewards.verifiers.calling import (
    GRACE_SECONDS,
    Begun,
    CallFailedError,
    CallTimeoutError,
    Function,
    Job,
    Outcome,
    is_async,
)
from evogrpo.envs.prompts.rewards.verifiers.messages import (
    escaped,
    outcome_of,
    read_message,
    request_message,
    setup_message,
)
from evogrpo.envs.prompts.rewards.verifiers.process import INSIDE_A_WORKER, WorkerProcess
from evogrpo.interruption import give_way

START_SECONDS = 120.0  # for a worker to import what the functions need
PATIENCE_SECONDS = 0.5  # that nothing else is looked at while waiting: Ctrl-C wants to be heard


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
        if INSIDE_A_WORKER in os.environ:
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
        self._waiting: deque[Begun] = deque()
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

    def aside(self, name: str) -> bool:
        """Return whether a function is not async: those that are wait for many completions at once, a job at a time."""
        return name not in self._async

    def begin(self, jobs: Sequence[Job]) -> list[Begun]:
        """Hand jobs out to as many workers as there are; see `Runner.begin`."""
        for worker in [worker for worker in self._workers if worker.job is None and not worker.alive]:
            self._drop(worker)  # it died while nobody asked it anything
        begun = [Begun(job) for job in jobs]
        self._waiting.extend(begun)
        self._dispatch()
        return begun

    def proceed(self) -> None:
        """Hand jobs out to workers that have become idle; see `Runner.proceed`.

        Raises:
            ValueError: If a worker cannot load the functions any more.
        """
        while self._receive(patience=0.0):
            pass
        self._dispatch()

    def finish(self, begun: Sequence[Begun], *, stop_at_first: bool) -> list[Outcome]:
        """Wait until jobs are done; see `Runner.finish`.

        Raises:
            ValueError: If a worker cannot load the functions any more.
        """
        left = list(begun)
        try:
            while left:
                give_way()
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

    def abandon(self, begun: Sequence[Begun]) -> None:
        """Kill whoever is at one of these jobs, and let nobody begin another of them; see `Runner.abandon`."""
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

    def _receive(self, patience: float = PATIENCE_SECONDS) -> bool:
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
        outcome = None if line is None else outcome_of(line)
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
