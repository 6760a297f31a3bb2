"""EnvironmentPool: environments that are made once and reset for each conversation, in threads."""

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evogrpo.envs.text.compute_rewards import POLL_SECONDS
from evogrpo.envs.text.reward_functions import own_row
from evogrpo.envs.text.tools import finished
from evogrpo.envs.text.user_functions import CallFailedError, call_sync, timeout_error
from evogrpo.interruption import NEVER, Stop
from evogrpo.text import escaped_prints, short_repr

EnvironmentFactory = Callable[[], Any]
"""A class or function without arguments that returns an environment: `reset`, tools and
`get_reward`, as in TRL.
"""


@dataclass(kw_only=True, eq=False)
class EnvironmentPool:
    """Environments that are made once and reset for each conversation.

    Attributes:
        factories: Functions that return an environment, by name; None is the name of the only one.
        seeded: Seed Python's and NumPy's global random numbers by the argument `seed` of each
            reset.
        workers: Number of threads; 0 = the calling thread, without a time limit.
        timeout: Time limit of one call, in seconds; None = no limit.
    """

    factories: Mapping[str | None, EnvironmentFactory]
    seeded: bool
    workers: int
    timeout: float | None
    _free: list[tuple[str | None, Any]] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Held during a seeded reset: the global random numbers belong to one at a time.
    _seeding: threading.Lock = field(default_factory=threading.Lock, init=False)

    __repr__ = short_repr

    def take(self, name: str | None) -> Any:
        """Return an unused environment of a name, or a new one."""
        with self._lock:
            for position, (free_name, environment) in enumerate(self._free):
                # Any unused one will do: `reset` begins a new episode.
                if free_name == name:
                    del self._free[position]
                    return environment
        return self.factories[name]()

    def give(self, name: str | None, environment: Any) -> None:
        """Take an environment back for further conversations."""
        with self._lock:
            self._free.append((name, environment))

    def start(self, name: str | None, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return an environment and the observation that it returns at its reset.

        A reset that raises ConnectionError is repeated once in a new environment. An environment
        whose reset fails is closed.
        """
        environment = self.take(name)
        try:
            return environment, self._reset(environment, arguments)
        # The second attempt is outside of `except`, so that its error has no context.
        except ConnectionError:  # a server may have restarted
            close_environment(environment)
        except BaseException:
            close_environment(environment)
            raise
        environment = self.factories[name]()
        try:
            return environment, self._reset(environment, arguments)
        except BaseException:
            close_environment(environment)
            raise

    def _reset(self, environment: Any, arguments: Mapping[str, Any]) -> Any:
        """Reset an environment for a row of the dataset; return its observation."""
        arguments = own_row(arguments)
        if not self.seeded:
            return finished(environment.reset(**arguments))
        # Wait for another reset no longer than for a call.
        limit = min(self.timeout or threading.TIMEOUT_MAX, threading.TIMEOUT_MAX)
        # The lock that this call releases: `_run_in_threads` may replace `self._seeding`.
        seeding = self._seeding
        if not seeding.acquire(timeout=limit):
            raise timeout_error(limit)
        # The program's own streams continue as if there had been no reset.
        numpy_state = np.random.get_state()  # noqa: NPY002 (what environments draw from)
        python_state = random.getstate()
        try:
            random.seed(arguments["seed"])
            np.random.seed(arguments["seed"])  # noqa: NPY002
            return finished(environment.reset(**arguments))
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            seeding.release()

    def run(self, calls: Sequence[Callable[[], Any]], stop: Stop = NEVER) -> list[Any]:
        """Make calls to environments in threads; return a value or exception for each.

        A call that exceeds the time limit is abandoned in its thread, which another one replaces.

        Args:
            calls: Functions without arguments.
            stop: Checked while waiting.
        """
        with escaped_prints():
            if self.workers:
                return self._run_in_threads(calls, stop)
            results = []
            for call in calls:
                stop.check()
                results.append(call_sync(call, ((), {})))
            return results

    def _run_in_threads(self, calls: Sequence[Callable[[], Any]], stop: Stop) -> list[Any]:
        """Make calls in threads; return their results, or their errors, in order."""
        # 1. Daemon threads take calls from a queue; they never keep the program from ending.
        futures: list[Future[Any]] = [Future() for _ in calls]
        waiting = deque(enumerate(calls))
        started: dict[int, float] = {}

        def work() -> None:
            """Make calls until none is left, or one took too long."""
            with suppress(IndexError, InvalidStateError):
                while True:
                    number, call = waiting.popleft()
                    started[number] = time.monotonic()
                    try:
                        outcome = call_sync(call, ((), {}))
                    except BaseException as error:  # noqa: BLE001 (a stop that a tool raised)
                        futures[number].set_exception(error)
                    else:
                        futures[number].set_result(outcome)

        def start_thread() -> None:
            threading.Thread(target=work, name="evogrpo environments", daemon=True).start()

        for _ in range(min(self.workers, len(calls))):
            start_thread()
        # 2. Wait for all calls, and abandon those that take too long.
        limit = math.inf if self.timeout is None else self.timeout
        try:
            while wait(futures, timeout=POLL_SECONDS).not_done:
                stop.check()
                # A copy, as threads add entries.
                for number, begin in started.copy().items():
                    if futures[number].done() or time.monotonic() - begin <= limit:
                        continue
                    with suppress(InvalidStateError):  # it has just finished
                        futures[number].set_result(timeout_error(limit))
                        start_thread()
        finally:
            waiting.clear()
        outcomes = [future.result() for future in futures]
        if any(isinstance(outcome, CallFailedError) for outcome in outcomes):
            # An abandoned reset may never release the previous lock.
            self._seeding = threading.Lock()
        return outcomes

    def close(self) -> None:
        """Close all unused environments. Further conversations make new ones."""
        with self._lock:
            # Closing may take long, so it is done without the lock.
            unused = self._free
            self._free = []
        for _, environment in unused:
            close_environment(environment)


def close_environment(environment: Any) -> None:
    """Call the method `close` or `_close` of an environment, if it has one."""
    end = getattr(environment, "close", None) or getattr(environment, "_close", None)
    with suppress(Exception):  # it may be broken or closed already
        if end is not None:
            finished(end())
