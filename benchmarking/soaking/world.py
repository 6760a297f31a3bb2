"""The runs that a soak damages: small networks on CartPole, begun or gone on with in processes that are forked off."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, RLParameter, Tournament, evolve, resume
from evogrpo.storage.checkpoint import CheckpointError, read_checkpoint
from evogrpo.training.run_dir import open_run

QUICK: dict[str, Any] = {"steps_per_generation": 2, "samples_per_step": 16, "test_questions": 4}
GENERATIONS = 4
SEEDS = 4
REFUSED, BROKEN, ENDED = 70, 71, 72
"""What a forked process ends with: the folder is another's, something raised, the run has come to its end."""


def environment() -> GymnasiumGroups:
    """Return short episodes of CartPole, few of them held out."""
    return GymnasiumGroups("CartPole-v1", max_episode_steps=60, validation_size=8)


def begin(folder: Path, seed: int) -> Any:
    """Return a run that has not begun."""
    env = environment()
    population = GRPO.population(
        3,
        env.observation_space,
        env.action_space,
        group_size=4,
        batch_size=64,
        seed=seed,
        hp_config=HyperparameterConfig(lr=RLParameter(min=1e-3, max=3e-2, scale="log")),
    )
    strategy = Tournament(z=0.0)
    return evolve(population, env, strategy=strategy, run_dir=folder, generations=GENERATIONS, **QUICK)


def begin_or_go_on(folder: Path, seed: int, generations: int = GENERATIONS) -> Any:
    """Return a run, wherever it stands: what whoever finds a process dead starts again."""
    try:
        return resume(folder, environment(), generations=generations, progress=False)
    except CheckpointError:
        return begin(folder, seed)


def outcome(folder: Path) -> tuple[Any, ...]:
    """Return what a finished run has come to, clock readings aside: to be equal, bit for bit."""
    saved = open_run(folder)
    assert not saved.skipped, saved.skipped
    tensors = {name: tensor.numpy().tobytes() for name, tensor in sorted(saved.tensors.items())}
    state = saved.record.run_state
    scores = [each.fitness for each in state.history]
    best = {
        name: tensor.numpy().tobytes()
        for name, tensor in sorted(read_checkpoint(folder / "best", kind="agent")[0].items())
    }
    return tensors, state.generation, state.step, scores, saved.lineage, best


def in_another_process(work: Callable[[], object], *, errors: Path, file_bytes: int | None = None) -> int:
    """Do something in a process that is forked off; returns its id.

    Args:
        work: What.
        errors: A file for what it raises.
        file_bytes: The most bytes a file may get to have: as good as a full disk.
    """
    if child := os.fork():
        return child
    status = BROKEN
    try:
        if file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
        status = ENDED
    except ValueError as error:
        status = REFUSED if "in use by" in str(error) else BROKEN
        _note(errors, error)
    except BaseException as error:  # noqa: BLE001 (whatever it is: the parent counts it)
        _note(errors, error)
    os._exit(status)


def _note(errors: Path, error: BaseException) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    errors.write_text(f"{type(error).__name__}: {error}")


def run_to_the_end(folder: Path, seed: int) -> Callable[[], object]:
    """Return the work of going on until a run has ended."""
    return lambda: begin_or_go_on(folder, seed).finish()


def events_in(folder: Path) -> int:
    """Return how many events a run's journal holds."""
    journal = folder / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def is_running(child: int) -> bool:
    """Tell whether a process has not ended yet; it stays to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait(child: int, seconds: float = 120.0) -> int | None:
    """Wait until a process has ended; returns its status, negative for a signal, or None if it does not end in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def prepare() -> None:
    """Settle what forked processes inherit."""
    torch.set_num_threads(1)
