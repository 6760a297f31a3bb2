"""A folder that cannot take a run is refused before anything is written."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from evogrpo.storage import atomic_files
from evogrpo.storage.atomic_files import check_new_folder, sync_folder


def test_new_and_empty_folders_are_accepted_and_left_as_they_are(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hidden" / ".ipynb_checkpoints").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name in ("empty", "hidden", "new", "new/inner/most"):
        check_new_folder(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_with_files_links_and_unwritable_or_full_places_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "taken" / "inner").mkdir(parents=True)
    (tmp_path / "notes").touch()
    refused = {
        "link": "link is not a folder",
        "taken": "must be empty .*inner",
        "notes": "notes is not a folder",
    }
    refused |= {"notes/run": "notes is not a folder"} | (
        {"/proc/run": "run directory"} if Path("/proc").is_dir() else {}
    )
    for name, words in refused.items():
        with pytest.raises(ValueError, match=words):
            check_new_folder(Path(name))
    monkeypatch.setattr(atomic_files, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(ValueError, match=r"4611686018427 MB"):
        check_new_folder(tmp_path / "new")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path, monkeypatch, number):
    def fails(descriptor):
        raise OSError(number, "cannot sync")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="cannot sync") if number == errno.EIO else nullcontext():
        sync_folder(tmp_path)
