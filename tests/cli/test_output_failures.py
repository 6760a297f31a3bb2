"""Failing output does not stop training.

Failing checkpoints do, with a message about what is saved.
"""

import os
import sys
import warnings
from pathlib import Path

import pytest

from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.trackers import Trackers
from tests.cli.project import command
from tests.forking import Forked, evogrpo_without_charts

SHORT = ("schedule.generations=1", "schedule.steps_per_generation=1", "population.size=2")


def ended(run_dir: Path) -> bool:
    return read_journal(run_dir / "journal.jsonl")[-1].get("reason") == "1 generation"


def with_stdout(kind: str, *arguments: str) -> None:
    if kind == "none":
        os.close(1)
        sys.stdout = None
    else:
        if kind == "full disk":
            target = os.open("/dev/full", os.O_WRONLY)
        else:
            reader, target = os.pipe()
            os.close(reader)
        os.dup2(target, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    evogrpo_without_charts(*arguments)


@pytest.mark.parametrize(
    ("kind", "error"), [("full disk", "No space left on device"), ("closed pipe", "Broken pipe")]
)
def test_a_failing_stdout_does_not_end_the_run(project, workdir, kind, error):
    process = Forked(
        with_stdout,
        kind,
        "train",
        str(project / "tiny.yaml"),
        "--run-dir",
        "run",
        *SHORT,
        cwd=workdir,
    )
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert error in errors
    assert "Traceback" not in errors
    assert ended(workdir / "run")


@pytest.mark.parametrize(("kind", "code"), [("full disk", 1), ("closed pipe", 0), ("none", 0)])
def test_a_command_whose_output_is_lost_fails(workdir, kind, code):
    """As `cat` does: an output that cannot be written is a failure, a reader that left is not."""
    process = Forked(with_stdout, kind, "tasks", cwd=workdir)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == code, errors
    assert errors.count("\n") == code


def test_an_unwritable_checkpoint_stops_the_run_and_names_what_is_saved(project, workdir):
    process = command(
        "train", project / "tiny.yaml", "--run-dir", "run", *SHORT, cwd=workdir, file_bytes=30_000
    )
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    message = " ".join(errors.split())
    assert "Nothing was saved yet" in message
    assert "run/checkpoints/generation-0000" in message
    assert "resume" not in output

    assert main(["train", str(project / "tiny.yaml"), "--run-dir", "whole", *SHORT]) == 0
    process = command("resume", "whole", "--generations", "2", cwd=workdir, file_bytes=30_000)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "generation 1" in " ".join(errors.split())
    assert "evogrpo" in output.splitlines()[-1]
    assert "resume whole" in output.splitlines()[-1]
    assert main(["resume", "whole", "--generations", "2"]) == 0


def test_an_export_that_does_not_fit_on_the_disk_leaves_no_file(trained, workdir):
    words = ("export", trained, "out")
    _, errors = command(*words, cwd=workdir, file_bytes=1000).communicate(timeout=100)
    assert "out/" in errors
    assert not any(Path("out").iterdir())


def draw_curves() -> None:
    trackers = Trackers(["tensorboard"], Path("run"))
    trackers.start({}, 0, {})
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        for step in range(200):
            trackers.log({"reward/slot_0": 1.0}, step)
    print(len(message), message[0].message)


def test_unwritable_tensorboard_curves_are_left_out(workdir):
    output, errors = Forked(draw_curves, cwd=workdir, file_bytes=100).communicate(timeout=100)
    assert "1 The tracker tensorboard stopped: File too large" in output, errors
