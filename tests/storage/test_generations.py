"""The newest complete generation is found after kills, damage and pruning."""

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch

from evogrpo.storage.checkpoint import (
    generation_folder,
    latest_checkpoint,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from tests.forking import Forked


def write(run_dir, *generations):
    for generation in generations:
        tensors = {"x": torch.full((4,), float(generation))}
        write_checkpoint(
            generation_folder(run_dir, generation), tensors, {"generation": generation}
        )


def damage(run_dir, generation):
    (generation_folder(run_dir, generation) / "population.safetensors").write_bytes(b"")


def present(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_newest_complete_generation_is_found(tmp_path):
    write(tmp_path, 8, 9, 10, 11, 10000)
    damage(tmp_path, 10000)
    (generation_folder(tmp_path, 11) / "manifest.json").unlink()
    assert latest_checkpoint(tmp_path) == 10


@pytest.mark.parametrize("present", ["nothing", "empty", "damaged", "others"])
def test_a_run_without_a_complete_checkpoint_has_no_latest_one(tmp_path, present):
    if present != "nothing":
        (tmp_path / "checkpoints").mkdir()
    if present == "damaged":
        write(tmp_path, 1)
        damage(tmp_path, 1)
    if present == "others":
        write_checkpoint(tmp_path / "checkpoints" / "generation-x", {}, {})
        (tmp_path / "checkpoints" / "generation-0001").write_text("a file")
        write_checkpoint(generation_folder(tmp_path, 2), {}, {}, kind="agent")
    assert latest_checkpoint(tmp_path) is None


def test_prune_keeps_what_was_written_and_those_before_it(tmp_path):
    write(tmp_path, *range(6))
    for keep, expected in ((2, [4, 5]), (2, [4, 5]), (1, [5])):
        prune(tmp_path, 5, keep=keep)
        assert present(tmp_path) == [f"generation-{number:04d}" for number in expected]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_prune_keeps_the_last_complete_checkpoint(tmp_path, keep):
    """A run resumed from generation 2 while damaged ones lay ahead writes 3.

    Only damaged ones are older and newer.
    """
    write(tmp_path, 0, 1, 2, 4, 5)
    for generation in (0, 1, 2, 4, 5):
        damage(tmp_path, generation)
    write(tmp_path, 3)
    prune(tmp_path, 3, keep=keep)
    assert len(present(tmp_path)) == keep + 2
    assert latest_checkpoint(tmp_path) == 3
    assert {"generation-0004", "generation-0005"} < set(present(tmp_path))


def test_the_next_write_clears_what_killed_writes_left(tmp_path):
    write(tmp_path, 0, 1)
    parent = tmp_path / "checkpoints"
    half = parent / f".generation-0001.temporary-{'a' * 32}"
    half.mkdir()
    (half / "population.safetensors").write_bytes(b"half")
    (parent / ".generation-0000.previous").mkdir()
    (parent / f".notes.temporary-{'a' * 32}").mkdir()  # belongs to another writer
    write(tmp_path, 2)
    assert present(tmp_path) == [
        f".notes.temporary-{'a' * 32}",
        "generation-0000",
        "generation-0001",
        "generation-0002",
    ]


def test_a_kill_between_the_two_renames_of_a_replace_loses_nothing(tmp_path):
    write(tmp_path, 0, 1)
    folder = generation_folder(tmp_path, 1)
    folder.rename(folder.with_name(".generation-0001.previous"))
    assert latest_checkpoint(tmp_path) == 1
    assert read_checkpoint(folder)[1] == {"generation": 1}
    write(tmp_path, 2)  # puts it back
    assert present(tmp_path) == ["generation-0000", "generation-0001", "generation-0002"]
    folder.rename(folder.with_name(".generation-0001.previous"))
    prune(tmp_path, 2, keep=1)
    assert present(tmp_path) == ["generation-0002"]


# --- kills and order of writes --------------------------------------------------------------------


def die_before_every_operation(path):
    """Die right before the k-th operation on a file, for every k until a write gets through.

    Each tensor has a file of its own, and the versions differ in the number of tensors.
    """
    folder = Path(path)
    outcomes = []

    def write_version(version):
        tensors = {
            str(number): torch.full((8,), float(version)) for number in range(2 * version - 1)
        }
        write_checkpoint(
            folder,
            tensors,
            {"version": version},
            files={"more": b"m" * version},
            replace=True,
            file_bytes=1,
        )

    def die_before(operation):
        count = itertools.count(1)

        def hook(event, arguments):
            if (
                event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
                and next(count) == operation
            ):
                os._exit(9)

        sys.addaudithook(hook)

    write_version(1)
    for operation in itertools.count(1):
        child = os.fork()
        if child == 0:
            die_before(operation)
            write_version(2)
            os._exit(0)
        finished = os.waitpid(child, 0)[1] == 0
        tensors, record = read_checkpoint(folder)
        assert set(tensors) == {str(number) for number in range(2 * record["version"] - 1)}, (
            operation
        )
        assert all(
            torch.equal(x, torch.full((8,), float(record["version"]))) for x in tensors.values()
        ), operation
        outcomes.append(record["version"])
        write_version(1)  # succeeds despite what the kill left
        assert read_checkpoint(folder)[1] == {"version": 1}, operation
        assert os.listdir(folder.parent) == [folder.name], operation
        if finished:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 15


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the process that dies")
def test_a_kill_before_any_file_operation_of_a_replace_leaves_the_old_or_the_new(tmp_path):
    forked = Forked(
        die_before_every_operation, str(tmp_path / "checkpoints" / "generation-0007"), cwd=tmp_path
    )
    _, errors = forked.communicate(120)
    assert forked.returncode == 0, errors


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up what was synced in /proc")
def test_everything_is_on_disk_before_the_rename_and_the_rename_before_the_return(
    tmp_path, monkeypatch
):
    real_fsync = os.fsync
    real_rename = Path.rename
    log = []

    def fsync(descriptor):
        log.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_fsync(descriptor)

    def rename(path, target):
        log.append(("rename", path.name))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3)}
    write_checkpoint(
        generation_folder(tmp_path, 3), tensors, {}, files={"more": lambda: b"m"}, file_bytes=1
    )
    at = next(position for position, (operation, _) in enumerate(log) if operation == "rename")
    temporary = log[at][1]
    parts = {"population.safetensors", "population-00002.safetensors"}
    names = {*parts, "population.json", "more", "manifest.json", temporary}
    assert names <= {name for operation, name in log[:at] if operation == "sync"}
    # The manifest after the files that it lists, and the list of names after all.
    assert log[at - 2 : at] == [("sync", "manifest.json"), ("sync", temporary)]
    assert log[at + 1 :] == [("sync", "checkpoints")]
