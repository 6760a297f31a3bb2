"""Guarantees of a run directory: kills at every write, damage, and cost of a generation."""

import io
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

from evogrpo.randomness import generator
from evogrpo.reporting.summary import summarise
from evogrpo.storage.checkpoint import CheckpointError, generation_folder, read_checkpoint
from evogrpo.storage.journal import JournalError, read_journal
from evogrpo.training.run_dir import JournalChangedError, open_run
from tests.tiny_steps import step_run
from tests.tiny_training import check_same_run, finish, resumed_run

SHORT = {"generations": 2, "steps_per_generation": 1, "size": 2}
OPERATIONS = (
    (os, "write"),
    (os, "fsync"),
    (os, "mkdir"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "ftruncate"),
    (io, "open"),
)


def start_or_resume(folder: Path) -> None:
    try:
        run = resumed_run(folder)
    except CheckpointError:
        run = step_run(folder, **SHORT)
    finish(run)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the folder of a run that was never killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start_or_resume(folder)
    return folder


def killed_at(operation: int, folder: Path) -> bool:
    """Run in a forked process that ends before its n-th file operation.

    Return True if it came to its end.
    """
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        assert status in (0, 9 << 8)
        return status == 0
    count = itertools.count(1)

    def counted(function):
        def call(*arguments, **options):
            if next(count) == operation:
                os._exit(9)
            return function(*arguments, **options)

        return call

    try:
        for module, name in OPERATIONS:
            setattr(module, name, counted(getattr(module, name)))
        torch.set_num_threads(1)
        start_or_resume(folder)
        os._exit(0)
    finally:
        os._exit(8)


@pytest.mark.slow
def test_a_run_killed_before_any_file_operation_ends_as_if_never_killed(uninterrupted, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for operation in itertools.count(1):
            folder = tmp_path / str(operation)
            ended = killed_at(operation, folder)
            if (folder / "journal.jsonl").exists():
                read_journal(folder / "journal.jsonl")
            start_or_resume(folder)
            check_same_run(folder, uninterrupted)
            assert not [path for path in folder.rglob(".*") if path.name != ".lock"]
            shutil.rmtree(folder)
            if ended:
                break
        assert operation > 100
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_a_run_killed_again_and_again_ends_as_if_never_killed(uninterrupted, tmp_path, number):
    rng = generator(number, "kills")
    folder = tmp_path / "run"
    for _ in range(6):
        if killed_at(int(rng.integers(1, 120)), folder):
            break
    start_or_resume(folder)
    check_same_run(folder, uninterrupted)


def damaged(content: bytes, rng) -> list[bytes]:
    """Return a file cut off, and with one bit changed, at a random byte."""
    position = int(rng.integers(len(content)))
    changed = bytearray(content)
    changed[position] ^= 1 << int(rng.integers(8))
    return [content[:position], bytes(changed)]


def test_damage_at_any_byte_of_the_journal_is_found(uninterrupted, tmp_path):
    """Checkpoints that fit the beginning of the journal are used.

    Others are refused, and nothing is lost.
    """
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    journal = folder / "journal.jsonl"
    content = journal.read_bytes()
    ends = {
        number: read_checkpoint(generation_folder(folder, number))[1]["journal"]["bytes"]
        for number in (1, 2)
    }
    outcomes = set()
    for number in range(4):
        for bytes_ in damaged(content, generator(number, "journal")):
            journal.write_bytes(bytes_)
            same = next(
                (n for n, (a, b) in enumerate(zip(bytes_, content, strict=False)) if a != b),
                len(bytes_),
            )
            usable = [generation for generation, end in ends.items() if end <= same]
            outcomes.add(len(usable))
            if not usable:
                with pytest.raises(JournalChangedError):
                    open_run(folder, writable=True)
                assert journal.read_bytes() == bytes_
                assert len(open_run(folder, members_only=True).restore()[0]) == SHORT["size"]
                continue
            assert open_run(folder).folder == generation_folder(folder, max(usable))
            copy = Path(shutil.copytree(folder, tmp_path / f"{number} {len(bytes_)}"))
            start_or_resume(copy)
            check_same_run(copy, uninterrupted)
    assert outcomes >= {0, 1}


def test_killed_between_the_end_and_its_checkpoint_the_run_is_complete_and_tested_again(
    uninterrupted, tmp_path
):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    shutil.rmtree(generation_folder(folder, 2))  # holds `tested` and `ended`
    summary = summarise(read_journal(folder / "journal.jsonl"))
    assert summary.test is not None
    assert summary.stopped == "2 generations"
    run = resumed_run(folder)
    assert run.run_state.tested is None
    finish(run)
    check_same_run(folder, uninterrupted)


def test_a_generation_costs_the_same_at_any_length(tmp_path):
    """Bytes of the checkpoint and of the journal's events, by generation."""
    run = step_run(
        tmp_path / "run", generations=8, size=2, steps_per_generation=1, test_questions=0
    )
    sizes = []
    journal = 0
    for report in run.reports():
        if hasattr(report, "plan"):
            files = generation_folder(tmp_path / "run", report.generation).iterdir()
            length = (tmp_path / "run" / "journal.jsonl").stat().st_size
            sizes.append((sum(path.stat().st_size for path in files), length - journal))
            journal = length
    checkpoints = [each[0] for each in sizes]
    events = [each[1] for each in sizes]
    for values in (checkpoints, events[1:]):  # the first also has the run event
        assert max(values[-3:]) < 1.3 * max(values[1:4])


def test_a_journal_that_is_no_journal_is_refused(uninterrupted, tmp_path):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    (folder / "journal.jsonl").unlink()
    (folder / "journal.jsonl").symlink_to(uninterrupted / "journal.jsonl")
    with pytest.raises((CheckpointError, JournalError)):
        open_run(folder)
