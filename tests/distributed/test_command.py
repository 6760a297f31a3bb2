"""`torchrun -m evogrpo ...`: one run, one run directory, one output."""

import os
import signal
import time
from pathlib import Path

import pytest

from evogrpo.storage.journal import read_journal
from tests.distributed.launching import launch
from tests.distributed.scenarios import commanded, looped

SMALL = (
    "population.size=3",
    "schedule.generations=1",
    "schedule.steps_per_generation=2",
    "schedule.validation_questions=4",
    "schedule.test_questions=4",
    "schedule.samples_per_step=8",
    "task.max_episode_steps=30",
)


def both(folder: Path, *words: str, restarts: int = 0) -> list[str]:
    results = launch(2, folder / "logs", commanded, str(folder), restarts, *words).ended(60)
    assert [status for status, _ in results] == [0, 0], results
    return [output for _, output in results]


def test_a_run_is_started_and_resumed_in_several_processes(tmp_path: Path) -> None:
    """Rank 0 alone claims the run directory, writes and prints.

    With --run-dir the same command resumes after a restart by the launcher.
    """
    words = ("train", "--env", "CartPole-v1", *SMALL, "--run-dir", "run")
    leader, other = both(tmp_path, *words)
    assert "run directory" in leader
    assert other == ""
    leader, _ = both(tmp_path, *words, restarts=1)
    assert "Restarted by the launcher" in leader
    assert "This run is finished" in leader
    leader, other = both(tmp_path, "resume", "run", "generations=2", "target_fitness=null")
    assert "Resuming run after generation 1" in leader
    assert other == ""
    events = [event["event"] for event in read_journal(tmp_path / "run" / "journal.jsonl")]
    assert events.count("run") == 1
    assert events.count("resumed") >= 1
    assert events.count("generation") == 2


@pytest.mark.parametrize(
    ("number", "to", "options", "status"),
    [
        (signal.SIGTERM, (0, 1, 0, 1), (), 143),
        pytest.param(signal.SIGUSR1, (1,), ("--exit-code-on-stop", "0"), 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, (1,), (), 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_process_ends_all_with_one_status(
    number: signal.Signals,
    to: tuple[int, ...],
    options: tuple[str, ...],
    status: int,
    tmp_path: Path,
) -> None:
    """A signal may arrive twice: launchers forward signals that their processes also get."""
    words = ("train", "--env", "CartPole-v1", *SMALL, "schedule.generations=100000", *options)
    launched = launch(2, tmp_path / "logs", commanded, str(tmp_path), 0, *words)
    journal = tmp_path / "runs" / "CartPole-v1" / "journal.jsonl"
    while all(process.is_alive() for process in launched.processes):
        if journal.exists() and any(event["event"] == "step" for event in read_journal(journal)):
            break
        time.sleep(0.05)
    for rank in to:
        os.kill(launched.processes[rank].pid or 0, number)
    (first_status, output), (second_status, other_output) = launched.ended(60)
    assert (first_status, second_status) == (status, status), output + other_output
    assert "evogrpo resume runs/CartPole-v1" in output
    last = read_journal(journal)[-1]
    by = "the user" if number == signal.SIGINT else number.name
    assert (last["event"], last["reason"]) == ("stopped", f"stopped by {by}")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)],
)
def test_a_signal_to_one_process_ends_a_program_in_all(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    """The code after the loop does not run; the output names the run directory."""
    results = launch(2, tmp_path / "logs", looped, str(tmp_path / "run"), int(number)).ended(60)
    message = (
        f"Stopped after learning step 4. Continue with evogrpo.resume({str(tmp_path / 'run')!r},"
        " ...)."
    )
    assert [each for each, _ in results] == [status, status], results
    assert all("after the loop" not in words for _, words in results)
    assert [message in words for _, words in results] == [True, number == signal.SIGINT], results
