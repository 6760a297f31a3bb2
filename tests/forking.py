"""Processes that are forked off one which has imported everything and computed nothing: they start at once."""

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

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.distributed.scenarios", "evogrpo.cli", "evogrpo.cli.main"])


def started(function: Callable[..., object], *arguments: Any, daemon: bool = False, **keywords: Any) -> BaseProcess:
    """Call a function of a module in a process of its own; a daemon's ends with this one."""
    process = _SERVER.Process(target=function, args=arguments, kwargs=keywords, daemon=daemon)
    process.start()
    return process


class Forked:
    """A function of a module at work in a process of its own, as `subprocess.Popen` would show it.

    Args:
        function: Of a module.
        arguments: Its arguments.
        cwd: Where it works.
        environment: Variables besides those that are set here.
        file_bytes: No file may grow larger than this, as if the disk were full; no limit if it is None.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        cwd: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        file_bytes: int | None = None,
    ) -> None:
        self._folder = TemporaryDirectory()  # gone with this object
        self._said = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for each in self._said:
            each.touch()
        self._process = started(
            _call, function, arguments, str(cwd), {**os.environ, **environment}, self._said, file_bytes
        )

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def wait_for(self, line: str, timeout: float = 100) -> None:
        """Wait until it has said something."""
        over = time.monotonic() + timeout
        while line not in self._said[0].read_text().splitlines():
            assert time.monotonic() < over, self._said[1].read_text()
            assert self.returncode is None, self._said[1].read_text()
            time.sleep(0.01)

    def wait(self, timeout: float) -> int:
        """Wait for its end and return its status; it is killed if it takes longer."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"not over after {timeout:g} s: {self._said[1].read_text()}")
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end and return what it has said."""
        self.wait(timeout)
        return self._said[0].read_text(), self._said[1].read_text()


def _call(
    function: Callable[..., object],
    arguments: Sequence[Any],
    cwd: str,
    environment: Mapping[str, str],
    said: Sequence[Path],
    file_bytes: int | None,
) -> None:
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    function(*arguments)


def evogrpo(*arguments: str) -> None:
    """Be the command."""
    sys.argv = ["evogrpo", *arguments]
    runpy.run_module("evogrpo", run_name="__main__", alter_sys=True)
