"""One worker process as its parent sees it: started, written to and read from without ever blocking, and killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

from evogrpo.envs.prompts.rewards.verifiers.calling import Begun
from evogrpo.envs.prompts.rewards.verifiers.printing import pass_on

SCRIPT = Path(__file__).with_name("worker.py")
INSIDE_A_WORKER = "EVOGRPO_VERIFIER"  # set in the environment of workers
LONGEST_REPLY = 64 * 2**20  # bytes


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
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, INSIDE_A_WORKER: "1"}
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
        self.job: Begun | None = None
        self.deadline: float | None = deadline
        self.ending = ""
        assert self._process.stderr is not None
        printed = self._process.stderr
        for work in (self._write, lambda: self._read(inbox), lambda: pass_on(printed)):
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
            while len(rest) < LONGEST_REPLY and (new := pipe.read(65536)):
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
