"""What is shown may fail to be written: training goes on. What is saved may too: then the message says what is left."""

import subprocess
import sys
import warnings
from pathlib import Path

from evogrpo.cli import main
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import RunDir
from tests.cli.project import ROOT, command, program
from tests.forking import Forked


def ended(run_dir: Path) -> bool:
    return read_journal(run_dir / "journal.jsonl")[-1].get("reason") == "1 generation"


def test_a_reader_that_goes_away_does_not_end_the_run(project, here):
    process = program("train", project / "tiny.yaml", "--run-dir", "run", "schedule.generations=1", cwd=here)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()  # as `head -n 1` does
    errors = process.stderr.read()
    assert process.wait(100) == 0, errors
    assert "cannot be written: Broken pipe" in errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert ended(here / "run")


def test_a_full_disk_behind_the_output_does_not_end_the_run(project, here):
    arguments = ["train", str(project / "tiny.yaml"), "--run-dir", "run", "schedule.generations=1"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "evogrpo", *arguments],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=here,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 0, process.stderr
    assert "No space left on device" in process.stderr
    assert ended(here / "run")


def test_a_checkpoint_that_cannot_be_written_says_what_is_left(project, here):
    tiny = str(project / "tiny.yaml")
    process = command("train", tiny, "--run-dir", "run", "schedule.generations=1", cwd=here, file_bytes=30_000)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    said = " ".join(errors.split())
    assert "nothing of this run was saved yet: " in said
    assert "run/checkpoints/generation-0000" in said
    assert "resume" not in output

    assert main(["train", tiny, "--run-dir", "whole", "schedule.generations=1"]) == 0
    process = command("resume", "whole", "--generations", "2", cwd=here, file_bytes=30_000)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    said = " ".join(errors.split())
    assert "the run can be resumed from generation 1 once this is fixed" in said
    assert "evogrpo" in output.splitlines()[-1]
    assert "resume whole" in output.splitlines()[-1]
    assert main(["resume", "whole", "--generations", "2"]) == 0


def draw_curves() -> None:
    run_dir = RunDir(Path("run"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(200):
            run_dir.log_scalars(step, {"reward/slot_0": 1.0})
    print(len(said), said[0].message)


def test_curves_that_cannot_be_written_are_left_out(here):
    output, errors = Forked(draw_curves, cwd=here, file_bytes=100).communicate(timeout=100)
    assert "1 TensorBoard logging stopped: File too large" in output, errors
