"""Processes forked off a server that has imported everything, so that they start at once."""

import multiprocessing
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

CHARTS = ("matplotlib", "plotly")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["tests.distributed.scenarios", "evogrpo.cli", "torch.utils.tensorboard"]
)


def start_process(
    function: Callable[..., object], *arguments: Any, daemon: bool = False, **options: Any
) -> BaseProcess:
    """Call a module-level function in a new process; a daemon ends with this process."""
    process = _SERVER.Process(target=function, args=arguments, kwargs=options, daemon=daemon)
    process.start()
    return process


class Forked:
    """A function that runs in a forked process, with the interface of `subprocess.Popen`.

    Args:
        function: Module-level function.
        arguments: Its arguments.
        cwd: Working directory.
        environment: Additional environment variables.
        file_bytes: Maximum size of a file, to simulate a full disk; None for no limit.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        cwd: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        file_bytes: int | None = None,
    ) -> None:
        self._folder = TemporaryDirectory()  # removed with this object
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for each in self._outputs:
            each.touch()
        self._process = start_process(
            _call,
            function,
            arguments,
            str(cwd),
            {**os.environ, **environment},
            self._outputs,
            file_bytes,
        )

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def wait_for(self, line: str, timeout: float = 100) -> None:
        """Wait until the process has printed a line."""
        over = time.monotonic() + timeout
        while line not in self._outputs[0].read_text().splitlines():
            assert time.monotonic() < over, self._outputs[1].read_text()
            assert self.returncode is None, self._outputs[1].read_text()
            time.sleep(0.01)

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit status; kill the process after the time limit."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"not over after {timeout:g} s: {self._outputs[1].read_text()}")
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr."""
        self.wait(timeout)
        return self._outputs[0].read_text(), self._outputs[1].read_text()


def _call(
    function: Callable[..., object],
    arguments: Sequence[Any],
    cwd: str,
    environment: Mapping[str, str],
    outputs: Sequence[Path],
    file_bytes: int | None,
) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    function(*arguments)


def evogrpo(*arguments: str) -> None:
    """Run the command."""
    sys.argv = ["evogrpo", *arguments]
    runpy.run_module("evogrpo", run_name="__main__", alter_sys=True)


def close_terminal() -> None:
    """Let stdout and stderr be a terminal that has been closed: every write fails."""
    master, terminal = os.openpty()
    os.close(master)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored


def evogrpo_without_charts(*arguments: str) -> None:
    """Run the command as if matplotlib and plotly were missing: reports would take too long."""
    sys.modules.update(dict.fromkeys(CHARTS))
    evogrpo(*arguments)
