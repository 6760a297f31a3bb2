"""One writer per folder: others are refused until it has ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evogrpo.storage.atomic_files import remove_temporary_files
from evogrpo.storage.lock import LOCK, DirectoryLock, LockLostError

HOLD = (
    "import sys, pathlib; from evogrpo.storage import lock; c ="
    " lock.DirectoryLock(pathlib.Path(sys.argv[1])); "
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def holder(tmp_path):
    """Return another process that has locked the folder."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD + "print('locked', flush=True); sys.stdin.read()",
            str(tmp_path),
        ],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_locked_by_another_process_is_refused_until_it_ends(tmp_path, holder):
    with pytest.raises(ValueError, match=rf"is in use by process {holder.pid} on '.+'"):
        DirectoryLock(tmp_path)
    holder.send_signal(signal.SIGSTOP)  # one that sleeps will wake up
    with pytest.raises(ValueError, match=f"process {holder.pid}"):
        DirectoryLock(tmp_path)
    holder.kill()
    holder.wait()
    DirectoryLock(tmp_path).check()


def test_the_content_of_a_lock_file_is_not_trusted(tmp_path, holder):
    for content in ("", "[1, 2]", '{"pid": "x"}', "\x1b[31m" * 1000):
        (tmp_path / LOCK).write_text(content)
        with pytest.raises(ValueError, match=f"{tmp_path.name} is in use by another process"):
            DirectoryLock(tmp_path)


def hold_elsewhere(folder):
    return subprocess.run(
        [sys.executable, "-c", HOLD, str(folder)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    ).stderr


def test_a_lock_that_reading_the_folder_has_released_is_taken_again(tmp_path):
    lock = DirectoryLock(tmp_path)
    (tmp_path / LOCK).read_bytes()
    lock.check()
    assert f"is in use by process {os.getpid()}" in hold_elsewhere(tmp_path)
    (tmp_path / LOCK).read_bytes()
    code = HOLD + "print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(LockLostError, match=f"in use by process {other.pid}"):
            lock.check()
        other.kill()


def test_a_second_lock_of_a_process_takes_over(tmp_path):
    first = DirectoryLock(tmp_path)
    second = DirectoryLock(tmp_path)
    assert first.lost
    second.check()
    with pytest.raises(ValueError, match="opened again"):
        first.check()
    first.release()  # lets go of nothing
    assert f"is in use by process {os.getpid()}" in hold_elsewhere(tmp_path)


def test_without_functions_that_windows_lacks_the_owner_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("evogrpo.storage.lock.fcntl", None)
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name)
    first = DirectoryLock(tmp_path)
    second = DirectoryLock(tmp_path)
    assert first.lost
    second.check()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("let_go", ["release", "drop"])
def test_a_released_lock_is_free(tmp_path, let_go):
    lock = DirectoryLock(tmp_path)
    if let_go == "release":
        lock.release()
        lock.release()
        assert lock.lost
    del lock
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], env=ENVIRONMENT, check=True)


def test_a_hard_link_in_place_of_the_lock_is_refused_and_its_file_kept(tmp_path):
    (tmp_path / "precious").write_text("kept")
    folder = tmp_path / "run"
    folder.mkdir()
    os.link(tmp_path / "precious", folder / LOCK)
    with pytest.raises(OSError, match="hard link"):
        DirectoryLock(folder)
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_link_pipe_or_folder_in_place_of_the_lock_is_refused(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "precious").write_text("kept")
    if kind == "link":
        (folder / LOCK).symlink_to(tmp_path / "precious")
    elif kind == "pipe":
        os.mkfifo(folder / LOCK)
    else:
        (folder / LOCK).mkdir()
    with pytest.raises(OSError, match=r"\.lock must be a regular file"):
        DirectoryLock(folder)
    assert (tmp_path / "precious").read_text() == "kept"


def test_only_files_of_killed_writes_are_removed(tmp_path):
    kept = ["step-000001.jsonl", ".step-1.temporary", "notes.temporary", ".hidden"]
    for name in (*kept, ".step-000002.jsonl.4711.temporary", ".config.yaml.1.temporary"):
        (tmp_path / name).write_text("")
    remove_temporary_files(tmp_path)
    remove_temporary_files(tmp_path / "missing")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)
