"""One writer per folder: others are refused until it has ended, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evogrpo.storage.atomic_files import remove_temporary_files
from evogrpo.storage.lock import LOCK, DirectoryLock

HOLD = "import sys, pathlib; from evogrpo.storage import lock; c = lock.DirectoryLock(pathlib.Path(sys.argv[1])); "
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def holder(tmp_path):
    """Return another process that has claimed the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD + "print('claimed', flush=True); sys.stdin.read()", str(tmp_path)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_that_another_process_writes_into_is_refused_until_that_is_gone(tmp_path, holder):
    with pytest.raises(ValueError, match=rf"is in use by process {holder.pid} on '.+': wait until it has ended"):
        DirectoryLock(tmp_path)
    holder.send_signal(signal.SIGSTOP)  # one that sleeps will wake up
    with pytest.raises(ValueError, match=f"process {holder.pid}"):
        DirectoryLock(tmp_path)
    holder.kill()
    holder.wait()
    DirectoryLock(tmp_path).check()


def test_what_a_lock_file_says_is_not_believed(tmp_path, holder):
    for said in ("", "[1, 2]", '{"pid": "x"}', "\x1b[31m" * 1000):
        (tmp_path / LOCK).write_text(said)
        with pytest.raises(ValueError, match=f"{tmp_path.name} is in use by another process: "):
            DirectoryLock(tmp_path)


def test_within_a_process_the_right_passes_on(tmp_path):
    first = DirectoryLock(tmp_path)
    second = DirectoryLock(tmp_path)
    assert first.lost
    second.check()
    with pytest.raises(ValueError, match="opened again"):
        first.check()
    first.release()  # lets go of nothing
    refused = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert f"is in use by process {os.getpid()}" in refused.stderr


@pytest.mark.parametrize("let_go", ["release", "drop"])
def test_what_is_let_go_of_is_free(tmp_path, let_go):
    lock = DirectoryLock(tmp_path)
    if let_go == "release":
        lock.release()
        lock.release()
        assert lock.lost
    del lock
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], env=ENVIRONMENT, check=True)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_lies_in_the_place_of_the_lock_is_not_followed_or_taken_for_one(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "precious").write_text("kept")
    if kind == "link":
        (folder / LOCK).symlink_to(tmp_path / "precious")
    elif kind == "pipe":
        os.mkfifo(folder / LOCK)
    else:
        (folder / LOCK).mkdir()
    with pytest.raises(OSError, match=r"\.lock is not a regular file"):
        DirectoryLock(folder)
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_claim_is_withdrawn_without_a_trace_unless_something_was_written(tmp_path):
    DirectoryLock(tmp_path).withdraw()
    assert list(tmp_path.iterdir()) == []
    lock = DirectoryLock(tmp_path)
    (tmp_path / "file").touch()
    lock.withdraw()
    assert lock.lost
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [LOCK, "file"]


def test_a_sweep_removes_what_killed_writes_left_and_nothing_else(tmp_path):
    kept = ["step-000001.jsonl", ".step-1.temporary", "notes.temporary", ".hidden"]
    for name in (*kept, ".step-000002.jsonl.4711.temporary", ".config.yaml.1.temporary"):
        (tmp_path / name).write_text("")
    remove_temporary_files(tmp_path)
    remove_temporary_files(tmp_path / "missing")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)
