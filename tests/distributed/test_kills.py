"""Runs whose ranks are killed at random moments under `torchrun --max-restarts`.

The series makes 25 kills. It starts torchrun 10 times and two processes 35 times, which takes 12
minutes on two busy cores.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from evogrpo.storage.checkpoint import read_checkpoint
from evogrpo.training.run_dir import open_run
from tests.cli.project import ROOT, write_project
from tests.tiny_training import events_of, without_run_id

pytestmark = pytest.mark.slow

KILLS = 5
"""Kills of each run."""
COMMAND = ("-m", "evogrpo", "train")
LONGER = (
    "schedule.steps_per_generation=8",
    "schedule.samples_per_step=32",
    "agent.max_output_tokens=32",
)
"""Length at which a run takes some seconds, so that kills fall into it."""
COMMANDS: dict[str, Sequence[str]] = {
    "networks": (
        *COMMAND,
        "--env",
        "CartPole-v1",
        "population.size=3",
        "schedule.generations=4",
        "schedule.steps_per_generation=8",
        "schedule.samples_per_step=64",
        "task.validation_size=8",
        "task.test_size=8",
        "task.max_episode_steps=200",
        "logging.checkpoint_steps=2",
    ),
    "language": (*COMMAND, "tiny.yaml", "population.size=3", *LONGER),
    "parts": (*COMMAND, "tiny.yaml", "population.size=3", *LONGER, "base_parts=2"),
    "opened": ("program.py", "dist.init_process_group('gloo')"),
    "met": ("program.py", "processes(), Accelerator(cpu=True)"),
}
SETTINGS = {"opened": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Environment of programs that initialise torch.distributed themselves; they would connect to
killed processes.
"""
PROGRAM = """
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator

import evogrpo
from evogrpo.distributed import processes

eval(sys.argv[1])
env = evogrpo.GymnasiumGroups("CartPole-v1", max_episode_steps=200, validation_size=8, test_size=8)
begun = [any(Path("run/checkpoints").glob("generation-*"))]
dist.broadcast_object_list(begun)
if begun[0]:
    run = evogrpo.resume("run", env)
else:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    population = evogrpo.GRPO.population(3, **spaces, group_size=4)
    lengths = {"generations": 4, "steps_per_generation": 8, "samples_per_step": 64}
    run = evogrpo.evolve(population, env, run_dir="run", checkpoint_steps=2, **lengths)
run.finish()
"""


class Pace(NamedTuple):
    """Speed of an undisturbed run: seconds to the first event, and between events."""

    startup: float
    event: float


class Elastic(NamedTuple):
    """Outcome of a run under `torchrun --max-restarts`.

    `killed` holds, for each kill, the number of events in the journal and the rank; ended ranks are
    left out.
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
        kills: The moments, in events of the journal, in order; a process started again later than
            that is killed within the time that it takes to start, wherever it is then.
        pace: Speed of the undisturbed run; needed with kills.
        settings: Additional environment variables.
    """
    rng = np.random.default_rng(0)
    killed = list[tuple[int, int]]()
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "EVOGRPO_TIMEOUT_MINUTES": "2",
        **(settings or {}),
    }
    began = time.time()
    with (folder / "said").open("w") as output:
        started = subprocess.Popen(
            [*launcher, "--max-restarts", str(len(kills)), *words],
            cwd=folder, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT,
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
                victim = int(rng.integers(2))
                reached = events_in(folder)
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
    if journal.exists():
        times = [json.loads(line)["time"] for line in journal.read_bytes().splitlines()]
    else:
        times = [began]
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
    number = re.search(rb'"(?:step|generation)": ?(\d+)', line)
    return kind[1], number[1] if number else b""


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
        return [
            int(word)
            for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except OSError:
        return []


def _rank(process: int) -> int | None:
    try:
        found = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{process}/environ").read_bytes())
    except OSError:
        return None
    return int(found[1]) if found else None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Pace]]:
    """All runs without kills: their folders and speeds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_project(folder)
    (folder / "program.py").write_text(PROGRAM)
    found = {}
    for kind in COMMANDS:
        run_folder = folder / kind
        run_folder.mkdir()
        seen = elastic(run_folder, words(kind, folder), settings=SETTINGS.get(kind))
        assert seen.status == 0, seen.said
        found[kind] = run_folder, seen.pace
    return found


def words(kind: str, project: Path) -> list[str]:
    given = [
        str(project / word) if word.endswith((".yaml", ".py")) else word for word in COMMANDS[kind]
    ]
    if "program.py" in COMMANDS[kind]:
        return given
    return [*given, "--run-dir", "run"]


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_with_killed_ranks_ends_like_an_undisturbed_one(
    kind: str, undisturbed: dict[str, tuple[Path, Pace]], tmp_path: Path
) -> None:
    """Journal, train states and best member are bit-equal, apart from clock readings."""
    original, pace = undisturbed[kind]
    moments = np.sort(np.random.default_rng(0).uniform(0, events_in(original) - 1, KILLS))
    seen = elastic(
        tmp_path,
        words(kind, original.parent),
        kills=moments.tolist(),
        pace=pace,
        settings=SETTINGS.get(kind),
    )
    print(kind, seen.killed)
    assert seen.status == 0, seen.said
    assert len(seen.killed) >= KILLS - 1, "kills that come when the run has ended test nothing"
    run = tmp_path / "run"
    straight = original / "run"
    assert events_of(run) == events_of(straight)
    ended = open_run(run)
    same = open_run(straight)
    assert not ended.skipped
    assert ended.tensors.keys() == same.tensors.keys()
    assert all(ended.tensors[name].equal(tensor) for name, tensor in same.tensors.items())
    _, one = read_checkpoint(run / "best", kind="agent")
    _, other = read_checkpoint(straight / "best", kind="agent")
    assert without_run_id(one) == without_run_id(other)
