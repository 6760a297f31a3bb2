"""A checkpoint reads back what was written, or says exactly what is wrong with it."""

import gc
import os
import shutil
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from evogrpo.storage.checkpoint import VERSION, CheckpointError, read_checkpoint, write_checkpoint
from tests.storage.conftest import ALL_FILES, FILES, RECORD, TENSORS, rewrite_manifest


def equal(left, right):
    """Same names, dtypes and bits (NaN equals NaN)."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(
            left[name].reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)
        )
        for name in left
    )


# --- round trips ----------------------------------------------------------------------------------


def test_tensors_and_records_round_trip(folder):
    tensors, record = read_checkpoint(folder)
    assert equal(tensors, TENSORS)
    assert record == RECORD
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert sorted(path.name for path in folder.iterdir()) == sorted(ALL_FILES)


def test_views_and_tied_tensors_are_stored_as_whole_tensors(tmp_path):
    stack = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1))
    tensors = {
        "row": stack[3],
        "transposed": stack[:4].T,
        "tied": stack[3],
        "trained": stack[5].requires_grad_(),
    }
    write_checkpoint(tmp_path / "c", tensors, {})
    assert equal(
        read_checkpoint(tmp_path / "c")[0],
        {name: value.detach() for name, value in tensors.items()},
    )
    # Only the views are stored, not the stack behind them.
    assert (tmp_path / "c" / "population.safetensors").stat().st_size < 2000


def tensor_files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("file_bytes", "sizes"),
    [(1, [4, 4, 8, 4, 4]), (8, [8, 8, 8]), (9, [16, 8]), (20, [20, 4]), (21, [24]), (1000, [24])],
)
def test_a_file_is_full_when_it_holds_file_bytes(tmp_path, file_bytes, sizes):
    tensors = {
        name: torch.full((size,), float(size))
        for name, size in zip("edcba", (1, 1, 2, 1, 1), strict=True)
    }
    write_checkpoint(tmp_path / "c", tensors, {}, file_bytes=file_bytes)
    names = ["population.safetensors"] + [
        f"population-{n:05d}.safetensors" for n in range(2, len(sizes) + 1)
    ]
    assert set(tensor_files(tmp_path / "c")) == set(names)
    parts = [load_file(tmp_path / "c" / name) for name in names]
    joined = {}
    for part, size in zip(parts, sizes, strict=True):
        assert sum(tensor.nbytes for tensor in part.values()) == size
        joined.update(part)
    assert equal(joined, tensors)
    assert equal(read_checkpoint(tmp_path / "c")[0], tensors)


def test_a_checkpoint_can_be_moved_and_linked_to(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert read_checkpoint(tmp_path / "link")[1] == RECORD
    write_checkpoint(tmp_path / "link", {}, {"new": True}, replace=True)
    assert read_checkpoint(tmp_path / "elsewhere")[1] == {"new": True}


# --- memory ---------------------------------------------------------------------------------------

MEGABYTE = 2**20


def bytes_alive():
    """Bytes of all tensors in this process."""
    return sum(value.nbytes for value in gc.get_objects() if type(value) is Tensor)


class Fresh(Mapping[str, Tensor]):
    """Makes tensors of one megabyte on request, and counts bytes of tensors alive then."""

    def __init__(self, length):
        self.asked = []
        self.alive = []
        self._length = length

    def __getitem__(self, name):
        self.asked.append(name)
        self.alive.append(bytes_alive())
        return torch.full((MEGABYTE // 4,), float(name))

    def __iter__(self):
        return map(str, range(self._length))

    def __len__(self):
        return self._length


def test_only_the_tensors_of_one_file_are_alive_while_writing(tmp_path):
    tensors = Fresh(4)
    gc.collect()
    before = bytes_alive()
    write_checkpoint(tmp_path / "c", tensors, {}, file_bytes=2 * MEGABYTE)
    assert len(tensor_files(tmp_path / "c")) == 2
    assert tensors.asked == list(tensors)
    # When a tensor is read, only those of the same file are in memory.
    assert [alive - before for alive in tensors.alive] == [0, MEGABYTE, 0, MEGABYTE]
    assert equal(read_checkpoint(tmp_path / "c")[0], dict(Fresh(4)))


# --- what cannot be written -----------------------------------------------------------------------


def test_further_files_have_plain_names(tmp_path):
    for name in (
        "../x",
        "a\\b",
        ".hidden",
        "a\0b",
        "manifest.json",
        "population.json",
        "population-00007.safetensors",
    ):
        with pytest.raises(ValueError, match="the name of a file"):
            write_checkpoint(tmp_path / "c", {}, {}, files={name: b""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["tensors", "files"])
def test_a_failed_write_leaves_the_old_checkpoint_and_no_other_files(folder, where):
    def fails():
        raise RuntimeError("out of memory")

    class Failing(Fresh):
        def __getitem__(self, name):
            return fails() if name == "2" else super().__getitem__(name)

    given = {"tensors": (Failing(4), {}), "files": (TENSORS, {"a": b"", "b": fails})}[where]
    with pytest.raises(RuntimeError, match="out of memory"):
        write_checkpoint(
            folder, given[0], {"new": True}, files=given[1], replace=True, file_bytes=1
        )
    assert read_checkpoint(folder)[1] == RECORD
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# --- what is not overwritten ----------------------------------------------------------------------


def test_a_complete_checkpoint_is_replaced_only_on_request(folder):
    with pytest.raises(CheckpointError, match="replace=True"):
        write_checkpoint(folder, {}, {"new": True})
    assert read_checkpoint(folder)[1] == RECORD
    (folder / ".DS_Store").write_bytes(b"of the system")
    write_checkpoint(folder, {}, {"new": True}, replace=True)
    assert read_checkpoint(folder) == ({}, {"new": True})
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "damaged", ["population-00002.safetensors", "population.json", "manifest.json"]
)
def test_a_damaged_checkpoint_may_be_replaced(tmp_path, damaged):
    write_checkpoint(tmp_path / "c", TENSORS, RECORD, file_bytes=1)
    (tmp_path / "c" / damaged).write_bytes(b"")
    write_checkpoint(tmp_path / "c", TENSORS, {"again": True}, replace=True)
    assert read_checkpoint(tmp_path / "c")[1] == {"again": True}
    assert tensor_files(tmp_path / "c") == ["population.safetensors"]


@pytest.mark.parametrize(
    ("name", "replace"),
    [("cat.jpg", False), ("cat.jpg", True), (".env", True), ("adapter_config.json", False)],
)
def test_a_folder_with_files_of_others_is_never_touched(tmp_path, name, replace):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=name):
        write_checkpoint(tmp_path / "mine", {}, {}, files=FILES, replace=replace)
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == {name: b"{}"}


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "c").write_text("notes")
    with pytest.raises(CheckpointError, match="not a folder"):
        write_checkpoint(tmp_path / "c", {}, {}, replace=True)
    assert (tmp_path / "c").read_text() == "notes"


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1])
def test_a_checkpoint_of_another_version_is_not_lost_by_accident(folder, version):
    rewrite_manifest(folder, version=version)
    with pytest.raises(CheckpointError, match="replace=True"):
        write_checkpoint(folder, {}, {})


def test_leftovers_that_cannot_be_removed_yet_do_not_hinder_a_write(folder, monkeypatch):
    # Folders stay, as on NFS while their files are open.
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    for number in range(3):
        write_checkpoint(folder, {}, {"number": number}, replace=True)
        assert read_checkpoint(folder)[1] == {"number": number}
    monkeypatch.undo()
    write_checkpoint(folder, {}, {}, replace=True)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(folder, monkeypatch):
    real = os.fsync
    calls = []

    def no_space(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=f"No space left on device: '{folder.parent}.*json'"):
        write_checkpoint(folder, {}, {"new": True}, replace=True)
    assert read_checkpoint(folder)[1] == RECORD
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
