"""The newest complete generation is found after kills, damage and pruning."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from evogrpo.storage.checkpoint import generation_folder, latest_checkpoint, prune, read_checkpoint, write_checkpoint


def write(run_dir, *generations):
    for generation in generations:
        tensors = {"x": torch.full((4,), float(generation))}
        write_checkpoint(generation_folder(run_dir, generation), tensors, {"generation": generation})


def damage(run_dir, generation):
    (generation_folder(run_dir, generation) / "population.safetensors").write_bytes(b"")


def present(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_folders_sort_by_generation(tmp_path):
    assert generation_folder(tmp_path, 3) == tmp_path / "checkpoints" / "generation-0003"
    assert generation_folder(tmp_path, 12345).name == "generation-12345"


def test_the_newest_complete_generation_is_found(tmp_path):
    write(tmp_path, 8, 9, 10, 11, 10000)
    damage(tmp_path, 10000)
    (generation_folder(tmp_path, 11) / "manifest.json").unlink()
    assert latest_checkpoint(tmp_path) == 10


@pytest.mark.parametrize("present", ["nothing", "empty", "damaged", "others"])
def test_a_run_without_a_whole_checkpoint(tmp_path, present):
    if present != "nothing":
        (tmp_path / "checkpoints").mkdir()
    if present == "damaged":
        write(tmp_path, 1)
        damage(tmp_path, 1)
    if present == "others":
        write_checkpoint(tmp_path / "checkpoints" / "generation-x", {}, {})
        (tmp_path / "checkpoints" / "generation-0001").write_text("a file")
    assert latest_checkpoint(tmp_path) is None


def test_a_checkpoint_of_another_kind_is_no_generation(tmp_path):
    write_checkpoint(generation_folder(tmp_path, 1), {}, {}, kind="agent")
    assert latest_checkpoint(tmp_path) is None


def test_prune_keeps_what_was_written_and_those_before_it(tmp_path):
    write(tmp_path, *range(6))
    for keep, expected in ((2, [4, 5]), (2, [4, 5]), (1, [5])):
        prune(tmp_path, 5, keep=keep)
        assert present(tmp_path) == [f"generation-{number:04d}" for number in expected]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_prune_never_costs_the_last_whole_checkpoint(tmp_path, keep):
    """A run resumed from generation 2 while damaged ones lay ahead writes 3; only damaged ones are older and newer."""
    write(tmp_path, 0, 1, 2, 4, 5)
    for generation in (0, 1, 2, 4, 5):
        damage(tmp_path, generation)
    write(tmp_path, 3)
    prune(tmp_path, 3, keep=keep)
    assert len(present(tmp_path)) == keep + 2
    assert latest_checkpoint(tmp_path) == 3
    assert {"generation-0004", "generation-0005"} < set(present(tmp_path))


def test_prune_opens_nothing_that_it_keeps(tmp_path):
    write(tmp_path, *range(4))
    kept = [generation_folder(tmp_path, generation) for generation in (2, 3)]
    watching, opened = [True], []

    def hook(event, arguments):  # stays for the life of the process
        if watching and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    prune(tmp_path, 3, keep=2)
    assert not [path for path in opened if any(folder.name in path for folder in kept)]
    opened.clear()
    assert latest_checkpoint(tmp_path) == 3  # which does look
    watching.clear()
    assert str(kept[1] / "population.safetensors") in opened


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


# --- kill -9 ---------------------------------------------------------------------------------------------------------

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

# Loading torch takes seconds, so one process loads it and forks a writer, to be killed, at every line it reads.
WRITERS = """
import os, sys
from pathlib import Path
import torch
from evogrpo.storage.checkpoint import write_checkpoint
from evogrpo.storage.checkpoint import generation_folder, latest_checkpoint, prune

def write_for_ever(run_dir):
    generation = latest_checkpoint(run_dir) or 0
    while True:
        generation += 1
        generator = torch.Generator().manual_seed(generation)
        tensors = {f"layer{i}": torch.randn(97, 101, generator=generator) for i in range(4)}
        record = {"generation": generation, "sums": {name: value.sum().item() for name, value in tensors.items()}}
        write_checkpoint(generation_folder(run_dir, generation), tensors, record, file_bytes=50_000)
        write_checkpoint(run_dir / "best", tensors, record, kind="agent", files={"more": b"x" * 50_000}, replace=True)
        os.write(1, f"{generation}\\n".encode())  # one write, so that no kill cuts the line in two
        prune(run_dir, generation, keep=2)

torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print(f"pid {os.getpid()}", flush=True)
        write_for_ever(Path(sys.argv[1]))
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def check(tensors, record):
    """The tensors are the ones that the record describes, exactly."""
    generator = torch.Generator().manual_seed(record["generation"])
    expected = {f"layer{i}": torch.randn(97, 101, generator=generator) for i in range(4)}
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert record["sums"] == {name: value.sum().item() for name, value in expected.items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9 needs a POSIX system")
def test_kill_9_at_random_moments_never_costs_the_last_generation(tmp_path):
    rng = torch.Generator().manual_seed(0)
    run_dir = tmp_path / "run"
    newest = reported = in_the_middle = 0
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS, run_dir], stdin=PIPE, stdout=PIPE, text=True, env=ENVIRONMENT
    ) as writers:
        seconds = 0.0  # of the latest generation that was timed
        for number in range(16):
            writers.stdin.write("go\n")
            writers.stdin.flush()
            pid = int(writers.stdout.readline().removeprefix("pid "))
            printed = []
            # Every other writer completes a generation first: if the machine gets slower, it is timed again.
            if number % 2 == 0:
                start = time.monotonic()
                printed = [int(writers.stdout.readline())]
                seconds = time.monotonic() - start
            time.sleep(2 * seconds * torch.rand((), generator=rng).item())
            os.kill(pid, signal.SIGKILL)
            printed += [int(line) for line in iter(writers.stdout.readline, "dead\n")]
            reported = max([reported, *printed])
            in_the_middle += any(run_dir.glob("**/.*"))
            latest = latest_checkpoint(run_dir)
            # Every generation that was reported is there; the one being written when the kill came may be.
            assert latest in (newest + len(printed), newest + len(printed) + 1)
            newest = latest
            tensors, record = read_checkpoint(generation_folder(run_dir, newest))
            assert record["generation"] == newest
            check(tensors, record)
            tensors, record = read_checkpoint(run_dir / "best", kind="agent")
            assert reported <= record["generation"] <= newest
            check(tensors, record)
    assert reported >= 8  # later writers went on where killed ones stopped
    assert in_the_middle > 0  # and some kills did fall into a write
    write(run_dir, 9999)
    assert not list((run_dir / "checkpoints").glob(".*"))


# Dies right before the k-th operation on a file, for every k until a write gets through. The number of tensor files
# differs between the versions when each tensor has a file of its own.
EVERY_OPERATION = """
import itertools, os, sys
from pathlib import Path
import torch
from evogrpo.storage.checkpoint import read_checkpoint, write_checkpoint

torch.set_num_threads(1)
folder = Path(sys.argv[1])
outcomes = []

def write(version):
    tensors = {str(number): torch.full((8,), float(version)) for number in range(2 * version - 1)}
    write_checkpoint(
        folder, tensors, {"version": version}, files={"more": b"m" * version}, replace=True, file_bytes=int(sys.argv[2])
    )

def die_before(operation):
    count = itertools.count(1)
    def hook(event, arguments):
        if event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"} and next(count) == operation:
            os._exit(9)
    sys.addaudithook(hook)

write(1)
for operation in itertools.count(1):
    child = os.fork()
    if child == 0:
        die_before(operation)
        write(2)
        os._exit(0)
    finished = os.waitpid(child, 0)[1] == 0
    tensors, record = read_checkpoint(folder)
    assert set(tensors) == {str(number) for number in range(2 * record["version"] - 1)}, operation
    assert all(torch.equal(x, torch.full((8,), float(record["version"]))) for x in tensors.values()), operation
    outcomes.append(record["version"])
    write(1)  # succeeds despite what the kill left
    assert read_checkpoint(folder)[1] == {"version": 1}, operation
    assert os.listdir(folder.parent) == [folder.name], operation
    if finished:
        break
assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2} and len(outcomes) > 15, outcomes
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the process that dies")
@pytest.mark.parametrize(("name", "file_bytes"), [("best", 10_000), ("generation-0007", 1)])
def test_a_kill_before_any_file_operation_of_a_replace_leaves_the_old_or_the_new(tmp_path, name, file_bytes):
    command = [sys.executable, "-c", EVERY_OPERATION, tmp_path / "checkpoints" / name, str(file_bytes)]
    subprocess.run(command, check=True, env=ENVIRONMENT)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up what was synced in /proc")
def test_everything_is_on_disk_before_the_rename_and_the_rename_before_the_return(tmp_path, monkeypatch):
    real_fsync, real_rename, log = os.fsync, Path.rename, []

    def fsync(descriptor):
        log.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_fsync(descriptor)

    def rename(path, target):
        log.append(("rename", path.name))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3)}
    write_checkpoint(generation_folder(tmp_path, 3), tensors, {}, files={"more": lambda: b"m"}, file_bytes=1)
    at = next(place for place, (operation, _) in enumerate(log) if operation == "rename")
    temporary = log[at][1]
    parts = {"population.safetensors", "population-00002.safetensors"}
    names = {*parts, "population.json", "more", "manifest.json", temporary}
    assert names <= {name for operation, name in log[:at] if operation == "sync"}
    # The manifest after the files that it lists, and the list of names after all.
    assert log[at - 2 : at] == [("sync", "manifest.json"), ("sync", temporary)]
    assert log[at + 1 :] == [("sync", "checkpoints")]
