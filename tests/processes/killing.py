"""A run that a launcher starts in several processes and starts again, and whoever kills one of them at times."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.cli.project import ROOT

STARTUP = 8.0
"""Seconds within which a process is killed that has been started again after the moment meant for it."""


@dataclass(frozen=True)
class Elastic:
    """What was seen of a run under `torchrun --max-restarts`.

    Attributes:
        status: Of the launcher.
        said: By the launcher and all processes.
        killed: How many events the journal held when a process was killed, for each time; and which process.
    """

    status: int
    said: str
    killed: Sequence[tuple[int, int]]


def elastic(
    folder: Path,
    words: Sequence[str],
    *,
    kills: Sequence[float] = (),
    seed: int = 0,
    settings: Mapping[str, str] | None = None,
) -> Elastic:
    """Let a launcher run a program in two processes, and kill one of them at several moments.

    Args:
        folder: Where it runs; the run itself is in `run` there.
        words: The program, as the launcher takes it.
        kills: The moments, in events of the journal, in order; a process started again later than that is killed
            within some seconds, wherever it is then.
        seed: Of which process is killed, and how long after the event.
        settings: Of its environment.
    """
    rng, killed = np.random.default_rng(seed), list[tuple[int, int]]()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "EVOGRPO_PATIENCE_MINUTES": "2", **(settings or {})}
    with (folder / "said").open("w") as said:
        started = subprocess.Popen(
            [*launcher, "--max-restarts", str(len(kills)), *words],
            cwd=folder, env=os.environ | own, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        before = set[int]()
        try:
            for moment in kills:
                workers = _workers(started, before)
                late = events_in(folder) >= moment
                while events_in(folder) < moment and started.poll() is None:
                    time.sleep(0.002)
                time.sleep(float(rng.random()) * (STARTUP if late else 0.2))
                victim = int(rng.integers(2))
                if started.poll() is None and len(workers) == 2:
                    killed.append((events_in(folder), victim))
                    os.kill(workers[victim], signal.SIGKILL)
                before.update(workers)
            status = started.wait(600)
        finally:
            started.kill()
    return Elastic(status, (folder / "said").read_text(), killed)


def events_in(folder: Path) -> int:
    """Return how many different events of a run's journal were reached: what is written twice counts once."""
    journal = folder / "run" / "journal.jsonl"
    if not journal.exists():
        return 0
    return len({_named(line) for line in journal.read_bytes().splitlines()} - {None})


def _named(line: bytes) -> tuple[bytes, ...] | None:
    """Return what an event is and of which step or generation; None for those that are of no place in the run."""
    kind = re.search(rb'"event": ?"(\w+)"', line)
    if kind is None or kind[1] in (b"resumed", b"stopped"):
        return None
    place = re.search(rb'"(?:step|generation)": ?(\d+)', line)
    return kind[1], place[1] if place else b""


def _workers(launcher: "subprocess.Popen[bytes]", before: set[int]) -> list[int]:
    """Wait for the processes that a launcher has started last, and return their ids in order of rank."""
    while launcher.poll() is None:
        found = dict[int, int]()
        for child in _children(launcher.pid):
            rank = _rank(child)
            if rank is not None and child not in before:
                found[rank] = child
        if len(found) == 2:
            return [found[0], found[1]]
        time.sleep(0.02)
    return []


def _children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _rank(process: int) -> int | None:
    try:
        found = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{process}/environ").read_bytes())
    except OSError:
        return None
    return int(found[1]) if found else None
