"""Launcher of a function in several processes, with the environment that torchrun sets."""

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forking import start_process


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Running processes."""

    processes: Sequence[BaseProcess]
    logs: Sequence[Path]

    def ended(self, seconds: float = 240) -> list[tuple[int | None, str]]:
        """Return exit status and output of each process once all have ended.

        Status None = still running.
        """
        for process in self.processes:
            process.join(seconds)
        found = [
            (process.exitcode, log.read_text())
            for process, log in zip(self.processes, self.logs, strict=True)
        ]
        for process in self.processes:
            process.kill()
        return found


def launch(count: int, logs: Path, function: Callable[..., object], *arguments: object) -> Launched:
    """Call a module's function in `count` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs.mkdir(parents=True, exist_ok=True)
    files = [logs / f"process-{rank}.log" for rank in range(count)]
    running = [
        start_process(_run, rank, count, port, str(files[rank]), function, arguments)
        for rank in range(count)
    ]
    return Launched(processes=running, logs=files)


def _run(
    rank: int,
    count: int,
    port: int,
    log: str,
    function: Callable[..., object],
    arguments: Sequence[object],
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "EVOGRPO_TIMEOUT_MINUTES": "2",
    }
    with (
        open(log, "w", buffering=1) as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            function(*arguments)
        except SystemExit:
            raise
        except BaseException:  # noqa: BLE001  # the test looks at what it says
            traceback.print_exc()
            sys.exit(1)
