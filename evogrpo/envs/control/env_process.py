"""EnvProcess: a Gymnasium environment in a process of its own."""

import os
import pickle  # noqa: TID251 (messages between our own processes, never a file)
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import gymnasium
from gymnasium.envs.registration import load_env_creator

from evogrpo.envs.control import env_worker
from evogrpo.envs.control.env_worker import CLOSE, read_message, write_message
from evogrpo.envs.control.single_env import EnvResult, MakeEnv, Method
from evogrpo.text import USER_MODULE_PREFIX, class_name, one_line

CLOSE_SECONDS = (
    1.0  # between the request to close and the end of a process that has not ended by itself
)
PROCESS_VARIABLE = "EVOGRPO_ENVIRONMENT"  # environment variable that marks environment processes
_MAIN = "__main__:"


class EnvProcessError(RuntimeError):
    """The process of an environment ended or sent a wrong reply. The run can be resumed."""


def process_setup(make: MakeEnv, *, recreate_env: bool) -> bytes:
    """Return the settings of an environment process, as its first message.

    The process does not run the user's program again: functions and classes of the program and of
    notebooks are sent with their code, those of modules by name.

    Args:
        make: Creates an environment.
        recreate_env: Create a new environment for every episode.

    Raises:
        ValueError: If `make` cannot be pickled.
    """
    try:
        pickled = cloudpickle.dumps(make)
    except Exception as error:
        raise ValueError(
            f"The environment cannot be sent to a process ({class_name(error)}: {one_line(error)})."
            ' Create what it needs in the environment itself, or set vectorization="serial".'
        ) from error
    # Files that a configuration names cannot be imported by name, so the process loads them by
    # path.
    files = {
        name: module.__file__
        for name, module in sys.modules.copy().items()
        if name.startswith(USER_MODULE_PREFIX) and name.encode() in pickled
    }
    setup = {
        "path": list(sys.path),
        "argv": list(sys.argv),
        "files": files,
        "registered": _registrations(),
        "make": pickled,
        "recreate_env": recreate_env,
    }
    return pickle.dumps(setup)


def _registrations() -> dict[str, bytes]:
    """Return the environments registered by others than Gymnasium, pickled by id.

    Those that cannot be are omitted.
    """
    pickled = {}
    for name, spec in gymnasium.registry.items():
        entry_point = spec.entry_point
        if isinstance(entry_point, str) and entry_point.startswith("gymnasium."):
            continue
        with suppress(Exception):
            if isinstance(entry_point, str) and entry_point.startswith(_MAIN):
                spec = copy(spec)  # noqa: PLW2901
                spec.entry_point = load_env_creator(entry_point)  # type: ignore[assignment]
            pickled[name] = cloudpickle.dumps(spec)
    return pickled


class EnvProcess:
    """Environment in a process of its own, which ends with this one.

    The process is a new one and no fork, because a fork of a process that has used torch may wait
    forever.

    Args:
        setup: Settings of the process; see `process_setup`.

    Raises:
        ValueError: If this is an environment process itself.
    """

    def __init__(self, setup: bytes) -> None:
        if PROCESS_VARIABLE in os.environ:
            raise ValueError(
                "Environment processes import this module. Put training under `if __name__ =="
                ' "__main__":`.'
            )
        # One thread per environment, so that the processes share the cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, PROCESS_VARIABLE: "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(env_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # A new session, so that Ctrl-C does not reach it and its child processes can be killed
            # with it.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._replies: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self._number = 0  # of the latest request
        self._deadline = 0.0
        # Runs at the end of the program, or when the environment is garbage collected.
        self._kill = weakref.finalize(self, _kill, os.getpid(), self._process)
        with self._errors():
            write_message(self._requests, setup)

    def send(self, method: Method, value: Any) -> None:
        """Start a call."""
        self._number += 1
        with self._errors():
            write_message(self._requests, pickle.dumps((self._number, method, value)))

    def receive(self) -> EnvResult:
        """Return the result of the call.

        Raises:
            RuntimeError: If the environment raised an exception.
            EnvProcessError: If the process has ended, or sent the reply to another call.
        """
        with self._errors():
            number, result, error = pickle.loads(read_message(self._replies))  # noqa: S301 (of our own process)
        if number != self._number:
            self._kill()
            raise EnvProcessError(
                f"An environment process sent reply {number} instead of {self._number}, so its"
                ' observations would belong to other steps. Set vectorization="serial".'
            )
        if error is not None:
            raise RuntimeError(f"An environment failed in its process:\n{error}")
        return result  # type: ignore[no-any-return]  # of `call_env`

    def end(self) -> None:
        """Let the process close its environment and end."""
        self._deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(OSError, ValueError):  # it has ended
            write_message(self._requests, pickle.dumps((0, CLOSE, None)))

    def close(self) -> None:
        """Kill the process if it does not end by itself within `CLOSE_SECONDS` of `end`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        self._kill()
        for pipe in (self._requests, self._replies):
            with suppress(OSError):
                pipe.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Explain errors of the pipes of a process that has ended."""
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            code = self._process.poll()
            if code is None:
                ending = "it closed its pipe"
            else:
                ending = f"exit code {code}"
            if code is not None and code < 0:
                ending = f"signal {-code}: {signal.strsignal(-code)}"
            self._kill()
            raise EnvProcessError(
                f"The process of an environment ended ({ending}), possibly out of memory. Lower"
                ' num_envs, or set vectorization="serial" to see the error.'
            ) from error


def _kill(owner: int, process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its child processes. A fork of the owner does nothing."""
    if os.getpid() != owner:
        return
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
