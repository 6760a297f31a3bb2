"""Runs under a launcher that restarts them, with kills of one rank at chosen moments."""

import json
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


@dataclass(frozen=True)
class Pace:
    """Speed of an undisturbed run.

    Attributes:
        startup: Seconds from the launcher's start to the run's first event.
        event: Seconds from one event to the next, on average.
    """

    startup: float
    event: float


@dataclass(frozen=True)
class Elastic:
    """Outcome of a run under `torchrun --max-restarts`.

    Attributes:
        status: Of the launcher.
        said: By the launcher and all processes.
        killed: For each kill, the number of events in the journal and the rank; ranks that had ended are left out.
        pace: Its speed, kills included.
    """

    status: int
    said: str
    killed: Sequence[tuple[int, int]]
    pace: Pace


def elastic(
    folder: Path,
    words: Sequence[str],
    *,
    kills: Sequence[float] = (),
    pace: Pace | None = None,
    settings: Mapping[str, str] | None = None,
) -> Elastic:
    """Run a program in two processes under torchrun, and kill one of them at several moments.

    Args:
        folder: Working directory; the run directory is `run` in it.
        words: Program and arguments.
        kills: The moments, in events of the journal, in order; a process started again later than that is killed
            within the time that it takes to start, wherever it is then.
        pace: Speed of the undisturbed run; needed with kills.
        settings: Additional environment variables.
    """
    rng, killed = np.random.default_rng(0), list[tuple[int, int]]()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "EVOGRPO_TIMEOUT_MINUTES": "2", **(settings or {})}
    began = time.time()
    with (folder / "said").open("w") as said:
        started = subprocess.Popen(
            [*launcher, "--max-restarts", str(len(kills)), *words],
            cwd=folder, env=os.environ | own, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        before = set[int]()
        try:
            for moment in kills:
                assert pace is not None
                workers = _workers(started, before)
                late = events_in(folder) >= moment
                while events_in(folder) < moment and started.poll() is None:
                    time.sleep(0.002)
                time.sleep(float(rng.random()) * (pace.startup if late else pace.event))
                victim, reached = int(rng.integers(2)), events_in(folder)
                if len(workers) == 2 and _killed(workers[victim]):
                    killed.append((reached, victim))
                before.update(workers)
            status = started.wait(600)
        finally:
            started.kill()
    return Elastic(status, (folder / "said").read_text(), killed, _pace(folder, began))


def events_in(folder: Path) -> int:
    """Return the number of different events in a run's journal; repeated ones count once."""
    journal = folder / "run" / "journal.jsonl"
    if not journal.exists():
        return 0
    return len({_named(line) for line in journal.read_bytes().splitlines()} - {None})


def _pace(folder: Path, began: float) -> Pace:
    journal = folder / "run" / "journal.jsonl"
    times = [json.loads(line)["time"] for line in journal.read_bytes().splitlines()] if journal.exists() else [began]
    return Pace(startup=times[0] - began, event=(times[-1] - times[0]) / max(1, len(times) - 1))


def _killed(process: int) -> bool:
    """Kill a process; return True if it was still running."""
    try:
        ended = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return not ended


def _named(line: bytes) -> tuple[bytes, ...] | None:
    """Return the kind and the step or generation of an event; None for events without."""
    kind = re.search(rb'"event": ?"(\w+)"', line)
    if kind is None or kind[1] in (b"resumed", b"stopped", b"ended"):
        return None
    place = re.search(rb'"(?:step|generation)": ?(\d+)', line)
    return kind[1], place[1] if place else b""


def _workers(launcher: "subprocess.Popen[bytes]", before: set[int]) -> list[int]:
    """Wait for the processes that a launcher started last, and return their ids by rank."""
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
