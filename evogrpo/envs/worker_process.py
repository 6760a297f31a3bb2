"""Worker processes: new Python interpreters that answer numbered requests, within a time limit."""

import contextlib
import importlib.util
import io
import os
import pickle  # noqa: TID251 (sent to our own child processes, never read from a file)
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import cloudpickle

from evogrpo.envs import worker_script
from evogrpo.envs.worker_script import read_bytes, read_integer, write_message
from evogrpo.text import USER_MODULE_PREFIX, EscapingStream, class_name, one_line

WORKER_VARIABLE = "EVOGRPO_WORKER"  # environment variable that marks worker processes
MAX_LINE_LENGTH = 2**16  # characters of a worker's output that are kept in memory


class WorkerError(RuntimeError):
    """A worker process ended or sent a wrong reply.

    The message completes a sentence that starts with the name of the process.
    """


class Handler(Protocol):
    """Answers the requests in a worker process, to which it is sent by pickle."""

    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request. Errors of user code are part of the reply."""

    def close(self) -> None:
        """Release resources before the process ends."""


@dataclass(frozen=True)
class PackedCode:
    """A function or class for another process; see `pack_code`.

    Attributes:
        pickled: Objects of importable modules by name, others with their code.
        files: Python files that cannot be imported, by the name of their module.
    """

    pickled: bytes
    files: Mapping[str, str]

    def load(self) -> Any:
        """Return the object. Runs the files that are not loaded yet."""
        for name, file in self.files.items():
            # Several functions may be from one file, which runs once.
            if name in sys.modules:
                continue
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None  # Python files only
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return pickle.loads(self.pickled)  # noqa: S301 (of our own parent process)


def pack_code(value: object, what: str, advice: str) -> PackedCode:
    """Pickle a function or class of the user for worker processes.

    Args:
        value: The object. It is sent with its code if it is of the program or a notebook, which
            workers do not run again.
        what: Name of the object, for messages.
        advice: Sentence that ends the message.

    Raises:
        ValueError: If it cannot be pickled.
    """
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        reason = f"{class_name(error)}: {one_line(error)}"
        raise ValueError(
            f"{what} cannot be sent to a worker process ({reason}). {advice}"
        ) from error
    # Files that a configuration names cannot be imported by name.
    files = {}
    for name, module in sys.modules.copy().items():
        if name.startswith(USER_MODULE_PREFIX) and name.encode() in pickled:
            files[name] = str(module.__file__)
    return PackedCode(pickled, files)


class WorkerProcess:
    """A Python interpreter that answers requests, and ends with this process.

    It is a new interpreter and no fork, because a fork of a process that has used torch may wait
    forever. It does not run the user's program again.

    Args:
        handler: Answers the requests.
        escape_output: Escape control characters in its output, which goes to standard error.

    Raises:
        ValueError: If this is a worker process itself.
    """

    def __init__(self, handler: Handler, *, escape_output: bool = False) -> None:
        if WORKER_VARIABLE in os.environ:
            raise ValueError(
                "Worker processes import this program. Put training under `if __name__ =="
                ' "__main__":`.'
            )
        # One thread per worker, so that the workers and this process share the cores.
        # The user's own environment variables override these.
        limits = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker_script.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if escape_output else None,
            env={**limits, **os.environ, WORKER_VARIABLE: "1"},
            # A new session: Ctrl-C does not reach it, and its child processes can be killed too.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._replies: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self._number = 0  # of the latest request
        self._lock = threading.Lock()
        # Runs at the end of the program, or when this object is garbage collected.
        self._finalizer = weakref.finalize(self, _kill, os.getpid(), self._process)
        if escape_output:
            output = self._process.stderr
            threading.Thread(target=forward_output, args=(output,), daemon=True).start()
        setup = {
            "path": list(sys.path),
            "argv": list(sys.argv),
            "handler": pickle.dumps(handler),
        }
        self._write(pickle.dumps(setup))

    @property
    def running(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def send(self, request: bytes) -> None:
        """Send a request. `receive` returns its reply, or raises an error."""
        self._number += 1
        self._write(request)

    def receive(self) -> bytes:
        """Wait for the reply to the latest request.

        Raises:
            WorkerError: If the process ends, or sends the reply to another request. It is killed.
        """
        try:
            # A worker that dies closes its end of the pipe, so reading ends.
            number = read_integer(self._replies)
            # The length of a wrong reply may be any number.
            if number == self._number:
                return read_bytes(self._replies, read_integer(self._replies))
        except (EOFError, OSError, ValueError):  # ValueError: the pipe is closed
            raise WorkerError(f"ended ({self.kill(patience=1.0)})") from None
        self.kill()
        raise WorkerError(
            f"sent a wrong reply (to request {number} instead of {self._number}): user code may"
            " write into its pipe"
        )

    def call(self, request: bytes, limit: float | None = None) -> bytes:
        """Send a request and return its reply.

        Args:
            request: The request.
            limit: Time limit in seconds, after which the process is killed; None = no limit.

        Raises:
            TimeoutError: If the reply takes longer.
            WorkerError: As `receive`.
        """
        if limit is None:
            self.send(request)
            return self.receive()
        # The timer kills the process, which ends the wait for its reply.
        began = time.monotonic()
        timer = threading.Timer(limit, self.kill)
        timer.daemon = True
        timer.start()
        try:
            self.send(request)
            return self.receive()
        except WorkerError:
            if time.monotonic() - began >= limit:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
            timer.join()  # it may be killing the process: the next request needs a new one

    def kill(self, patience: float = 0.0) -> str:
        """Kill the process and its child processes, and describe how it ended.

        Args:
            patience: Seconds to wait for it to end by itself first.
        """
        with self._lock:  # the process has ended when any of several calls returns
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
            code = self._process.poll()
            self._finalizer()
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        return f"signal {-code}: {signal.strsignal(-code)}"

    def end(self) -> None:
        """Let the process end by itself once it has answered its requests."""
        with contextlib.suppress(OSError):  # it has ended
            self._requests.close()

    def close(self, patience: float = 0.0) -> None:
        """Close the pipes, and kill the process if it does not end within `patience` seconds."""
        self.kill(patience)
        for pipe in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                pipe.close()

    def _write(self, message: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # `receive` raises the error
            write_message(self._requests, self._number, message)


def _kill(owner: int, process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its child processes. A fork of the owner does nothing."""
    # A fork has a copy of this object, but the process is not its child.
    if os.getpid() != owner:
        return
    # The process leads a group, which processes that it started belong to.
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def forward_output(pipe: IO[bytes]) -> None:
    """Copy the output of a worker to standard error until it ends, line by line, with escapes."""
    with io.TextIOWrapper(pipe, "utf-8", "replace") as lines:
        while text := lines.readline(MAX_LINE_LENGTH):
            if sys.stderr is None:
                continue
            with contextlib.suppress(OSError, ValueError):  # standard error is closed
                EscapingStream(sys.stderr).write(text)
                sys.stderr.flush()
