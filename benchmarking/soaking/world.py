"""Runs of the soak test: small networks on CartPole, trained in forked processes."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HyperparameterConfig,
    RLParameter,
    Tournament,
    evolve,
    resume,
)
from evogrpo.storage.checkpoint import CheckpointError, read_checkpoint
from evogrpo.training.run_dir import open_run

QUICK: dict[str, Any] = {"steps_per_generation": 2, "samples_per_step": 16, "test_questions": 4}
GENERATIONS = 4
SEEDS = 4
REFUSED, BROKEN, ENDED = 70, 71, 72
"""Exit codes of forked processes: the folder is in use, an error was raised, the run is finished.
"""


def environment() -> GymnasiumGroups:
    """Return CartPole with short episodes and few held-out starts."""
    return GymnasiumGroups("CartPole-v1", max_episode_steps=60, validation_size=8)


def begin(folder: Path, seed: int) -> Any:
    """Return a new run."""
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
    return evolve(
        population, env, strategy=strategy, run_dir=folder, generations=GENERATIONS, **QUICK
    )


def begin_or_resume(folder: Path, seed: int, generations: int = GENERATIONS) -> Any:
    """Return the resumed run, or a new one if there is no checkpoint."""
    try:
        return resume(folder, environment(), generations=generations, progress=False)
    except CheckpointError:
        return begin(folder, seed)


def outcome(folder: Path) -> tuple[Any, ...]:
    """Return a run's result without times: equal runs have equal results, bit for bit."""
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


def in_another_process(
    work: Callable[[], object], *, errors: Path, file_bytes: int | None = None
) -> int:
    """Do some work in a forked process; return its id.

    Args:
        work: The work.
        errors: File for the error that it raises.
        file_bytes: Limit on the size of files, as on a full disk; None = no limit.
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
    except BaseException as error:  # noqa: BLE001 (the parent counts it)
        _note(errors, error)
    os._exit(status)


def _note(errors: Path, error: BaseException) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    errors.write_text(f"{type(error).__name__}: {error}")


def run_to_the_end(folder: Path, seed: int) -> Callable[[], object]:
    """Return a function that begins or resumes a run and finishes it."""
    return lambda: begin_or_resume(folder, seed).finish()


def events_in(folder: Path) -> int:
    """Return the number of events in a run's journal."""
    journal = folder / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def is_running(child: int) -> bool:
    """Return True until a process has ended; it must still be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait(child: int, seconds: float = 120.0) -> int | None:
    """Wait for a process.

    Return its status, negative for a signal, or None if it does not end in time.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
