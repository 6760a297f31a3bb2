"""Stopping and resuming: signals, failing rewards, damaged checkpoints.

A resumed run equals an uninterrupted one.
"""

import shutil
import signal
import time
from pathlib import Path

import pytest

from evogrpo.cli import main
from evogrpo.storage.checkpoint import latest_checkpoint
from evogrpo.storage.journal import read_journal
from tests.cli.project import command
from tests.forking import Forked, close_terminal, evogrpo_without_charts
from tests.tiny_training import events_of

SHORT = (
    "schedule.steps_per_generation=2",
    "schedule.generations=2",
    "schedule.samples_per_step=8",
    "population.size=2",
    "task.test_size=8",
    "task.validation_size=8",
)


@pytest.fixture(scope="module")
def uninterrupted(project, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", str(run_dir), *SHORT]) == 0
    return events_of(run_dir)


@pytest.fixture
def slow(project, workdir):
    """Return overrides with the same rewards, slowed down until the file `hurry` exists."""
    text = (project / "rewards.py").read_text()
    wait = "os.path.exists('hurry') or time.sleep(0.03)"
    Path("slow.py").write_text(f"import os, time\n{text.replace('return', f'{wait}; return')}")
    return (*SHORT, "task.reward=slow.py:score")


def wait_for_step(run_dir: Path, step: int) -> None:
    for _ in range(6000):
        time.sleep(0.02)
        path = run_dir / "journal.jsonl"
        if path.exists() and any(
            e["event"] == "step" and e["step"] >= step for e in read_journal(path)
        ):
            return
    raise AssertionError("the run did not get there")


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [(signal.SIGINT, ("--exit-code-on-stop", "9"), 130), (signal.SIGTERM, (), 143)],
)
def test_a_run_stopped_by_a_signal_resumes_to_the_same_result(
    project, workdir, slow, uninterrupted, number, options, code, capsys
):
    process = command(
        "train", project / "tiny.yaml", "--run-dir", "run", *options, *slow, cwd=workdir
    )
    wait_for_step(workdir / "run", 0)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Stopping and saving." in errors
    assert "Traceback" not in errors
    assert "evogrpo resume run" in output
    events = read_journal(workdir / "run" / "journal.jsonl")
    assert events[-1]["reason"] == (
        "stopped by SIGTERM" if number == signal.SIGTERM else "stopped by the user"
    )
    assert sum(event["event"] == "step" for event in events) < 4

    Path("hurry").touch()
    if number == signal.SIGINT:
        words = ("resume", "run")
    else:
        words = (
            "train",
            str(project / "tiny.yaml"),
            "--run-dir",
            "run",
            "--resume-if-exists",
            *slow,
        )
    assert main(words) == 0
    assert "Resuming run after generation" in capsys.readouterr().out
    assert events_of(workdir / "run") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_run_of_smollm2_ends_ten_seconds_after_sigterm_and_resumes(
    project, workdir, monkeypatch, capsys, blocks
):
    """While it samples, and in a reward function that does not return."""
    # Converting the model takes a while: use the user's cache.
    monkeypatch.delenv("EVOGRPO_CACHE", raising=False)
    wait = "os.path.exists('hang') and not open('hanging', 'w').close() and time.sleep(10_000)"
    text = (project / "rewards.py").read_text().replace("return", f"{wait}; return")
    Path("waiting.py").write_text(f"import os, time\n{text}")
    words = ("model=smollm2-135m", "task.reward=waiting.py:score", "agent.max_output_tokens=32")
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *words, cwd=workdir)
    wait_for_step(workdir / "run", 0)
    if blocks:
        Path("hang").touch()
        while not Path("hanging").exists():
            time.sleep(0.05)
        Path("hang").unlink()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"\nSIGTERM, {'reward blocks' if blocks else 'sampling'}: gone after {seconds:.1f} s")
    assert seconds < 10
    assert read_journal(workdir / "run" / "journal.jsonl")[-1]["reason"] == "stopped by SIGTERM"
    assert main(["resume", "run", "--generations", "1"]) == 0
    assert latest_checkpoint(workdir / "run") == 1


@pytest.mark.slow
def test_a_second_signal_aborts_at_once_and_the_run_resumes(
    project, workdir, slow, uninterrupted, capsys
):
    # Once the file `hang` exists, the step cannot end between the two signals.
    patient = "30 if os.path.exists('hang') and not open('hanging', 'w').close() else 0.03"
    Path("slow.py").write_text(Path("slow.py").read_text().replace("0.03", patient))
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *slow, cwd=workdir)
    wait_for_step(workdir / "run", 1)
    (workdir / "hang").touch()
    while not (workdir / "hanging").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Aborted" in errors
    # There is no `stopped` event.
    assert read_journal(workdir / "run" / "journal.jsonl")[-1]["event"] == "step"

    Path("slow.py").write_text((project / "rewards.py").read_text())
    assert main(["resume", "run", "--allow-changed-data"]) == 0
    assert "did not stop cleanly" in capsys.readouterr().out
    assert events_of(workdir / "run") == uninterrupted


def test_a_run_stopped_by_a_failing_reward_resumes_after_the_fix(
    project, workdir, uninterrupted, capsys
):
    good = (project / "rewards.py").read_text()
    Path("mine.py").write_text(
        good.replace(
            "    return",
            "    global calls\n    calls += 1\n    assert calls < 40, 'oh'\n    return",
        )
        + "\ncalls = 0\n"
    )
    arguments = [
        "train",
        str(project / "tiny.yaml"),
        "--run-dir",
        "run",
        *SHORT,
        "task.reward=mine.py:score",
    ]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "AssertionError" in printed.err
    assert "mine.py, line 5" in printed.err
    assert "evogrpo resume run --allow-changed-data" in printed.out

    Path("mine.py").write_text(good)
    assert main(["resume", "run"]) == 2
    assert "reward score: weight 1, code" in capsys.readouterr().err
    assert main(["resume", "run", "--allow-changed-data"]) == 0
    assert (
        "warning: Changed since the run began: reward score: weight 1, code"
        in capsys.readouterr().err
    )
    assert events_of(workdir / "run") == uninterrupted


HANGUP = """
import os, signal

def score(completion, answer, question):
    if "made-up" not in completion:
        os.kill(os.getpid(), signal.SIGHUP)
    return 0
"""


def on_a_closed_terminal(*arguments: str) -> None:
    close_terminal()
    evogrpo_without_charts(*arguments)


def test_a_run_whose_terminal_is_closed_is_saved(project, workdir):
    Path("mine.py").write_text(HANGUP)
    words = ("--run-dir", "run", *SHORT, "task.reward=mine.py:score")
    process = Forked(on_a_closed_terminal, "train", str(project / "tiny.yaml"), *words, cwd=workdir)
    assert process.wait(timeout=100) == 128 + signal.SIGHUP
    assert read_journal(Path("run/journal.jsonl"))[-1]["reason"] == "stopped by SIGHUP"


SECOND_WRITER = """
import os

def score(completion, answer, question):
    if os.path.exists("run/journal.jsonl"):
        with open("run/journal.jsonl", "a") as journal:
            journal.write("mine")
    return 0
"""


def test_after_a_second_writer_the_run_is_resumed_as_it_is(project, workdir, capsys):
    Path("mine.py").write_text(SECOND_WRITER)
    words = ("--run-dir", "run", *SHORT, "task.reward=mine.py:score")
    assert main(["train", str(project / "tiny.yaml"), *words]) == 1
    printed = capsys.readouterr()
    assert "journal.jsonl" in printed.err
    assert "evogrpo resume run\n" in printed.out


def test_resume_refuses_settings_that_change_the_run(trained, workdir, capsys):
    shutil.copytree(trained, "run")
    for override in (
        "hyperparameters.lr=1",
        "samples_per_step=32",
        "schedule.steps_per_generation=9",
    ):
        assert main(["resume", "run", override]) == 2
        assert "A resumed run may only change generations" in capsys.readouterr().err


def test_a_run_without_live_members_offers_no_resume(project, workdir, capsys):
    Path("mine.py").write_text(
        "def score(completion, answer, question):\n    return len(set(completion)) / 8\n"
    )
    deadly = (
        "search_space.lr=null",
        "hyperparameters.lr=1e37",
        "schedule.generations=2",
        "task.reward=mine.py:score",
    )
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", "run", *deadly]) == 1
    printed = capsys.readouterr()
    assert "All members failed" in printed.err
    assert "Start a new run" in printed.err
    assert "evogrpo resume" not in printed.out.partition("run directory")[2]
