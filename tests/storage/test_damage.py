"""A damaged checkpoint is refused, with the file, the rule and the remedy named."""

import hashlib
import json
import os
import re

import pytest

from evogrpo.storage.checkpoint import (
    VERSION,
    CheckpointError,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from tests.storage.conftest import ALL_FILES, FILES, RECORD, TENSORS, rewrite_manifest


def forge(folder, name, content):
    """Replace a file and its size and hash in the manifest, as someone with bad intent could."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    rewrite_manifest(folder, files={**files, name: entry_of(content)})


def entry_of(content):
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def refused(folder, *words):
    """Reading and verifying both fail, with a message that has these words."""
    for read in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.95, -1, "longer"])
def test_a_file_of_another_length_is_refused(folder, name, part):
    content = (folder / name).read_bytes()
    if part == "longer":
        end = None
    elif part >= 0:
        end = int(len(content) * part)
    else:
        end = -1
    (folder / name).write_bytes(content[:end] if end is not None else content + b"\0")
    refused(folder, name, "damaged")


@pytest.mark.parametrize("name", ["population.safetensors", "population.json", *FILES])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.9999])
def test_one_flipped_bit_is_refused(folder, name, part):
    content = bytearray((folder / name).read_bytes())
    content[int(len(content) * part)] ^= 0b100
    (folder / name).write_bytes(content)
    refused(folder, name, "SHA-256")


def test_no_flipped_bit_of_the_manifest_passes(folder):
    content = (folder / "manifest.json").read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        (folder / "manifest.json").write_bytes(flipped)
        with pytest.raises(CheckpointError):
            verify_checkpoint(folder)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    refused(folder, name, "missing")


@pytest.mark.parametrize("name", ALL_FILES)
def test_links_are_not_followed(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "target")
    (folder / name).symlink_to(tmp_path / "target")
    refused(folder, name, "plain file")


def test_a_pipe_in_place_of_a_file_does_not_hang(folder):
    (folder / "population.json").unlink()
    os.mkfifo(folder / "population.json")
    refused(folder, "population.json", "plain file")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "..", "a/../b", "a\\b", "x\0", "", "manifest.json"]
)
def test_names_that_leave_the_folder_are_refused_before_any_file_is_opened(folder, tmp_path, name):
    (tmp_path / "secret").write_bytes(b"s")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    rewrite_manifest(folder, files={**files, name: entry_of(b"s")})
    refused(folder, "manifest.json", "plain file names")


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_is_refused(folder, version):
    rewrite_manifest(folder, version=version)
    refused(folder, f"version {version}")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 0}, "version"),
        ({"version": True}, "version"),
        ({"format": "other"}, "evogrpo-checkpoint"),
        ({"kind": "../x"}, "kind"),
        ({"kind": ["population"]}, "kind"),
        ({"files": {}}, "population.json"),
        (
            {"files": {"population.safetensors": {"size": 1, "sha256": "0" * 64}}},
            "must list population.json",
        ),
        ({"files": []}, "files"),
        ({"extra": 1}, "extra"),
        ({"files": {"population.safetensors": None, "population.json": None}}, "manifest"),
        (
            {
                "files": {
                    "population.safetensors": {"size": -1, "sha256": "0" * 64},
                    "population.json": {},
                }
            },
            "size",
        ),
        (
            {
                "files": {
                    "population.safetensors": {"size": 1, "sha256": "../x"},
                    "population.json": {},
                }
            },
            "sha256",
        ),
    ],
)
def test_a_malformed_manifest_is_refused(folder, changes, word):
    rewrite_manifest(folder, **changes)
    refused(folder, "manifest.json", word)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        "NaN",
        '{"format": 1e999}',
        "\xff",
        "[" * 100_000,
        '{"a": 1, "a": 1}',
        " " * 20_000_000,
    ],
    ids=[
        "empty",
        "open",
        "list",
        "null",
        "nan",
        "infinite",
        "latin-1",
        "deep",
        "repeated key",
        "huge",
    ],
)
def test_a_manifest_that_is_not_a_json_object_is_refused(folder, text):
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    refused(folder, "manifest.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("population.json", b"[]"),
        ("population.json", b'{"lr": NaN}'),
        ("population.json", b'{"lr": 1e400}'),
        ("population.json", b'{"a": 1, "a": 2}'),
        ("population.json", b"\xff\xfe"),
        ("population.json", b"\x80\x04\x95."),  # the start of a pickle
        ("population.safetensors", b""),
        ("population.safetensors", b"PK\x03\x04 a zip, as torch.save writes"),
        ("population.safetensors", b"\xff" * 64),
        ("population.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00{}trailing"),
    ],
)
def test_a_forged_file_with_matching_hash_is_still_only_parsed_strictly(folder, name, content):
    forge(folder, name, content)
    verify_checkpoint(folder)  # the hashes do match
    with pytest.raises(CheckpointError, match=re.escape(name)):
        read_checkpoint(folder)


@pytest.mark.parametrize("kind", ["absent", "file", "empty"])
def test_other_paths_than_checkpoint_folders_are_refused(tmp_path, kind):
    if kind == "file":
        (tmp_path / kind).write_text("")
    elif kind == "empty":
        (tmp_path / kind).mkdir()
    refused(tmp_path / kind, kind)


def test_another_kind_of_checkpoint_is_refused(tmp_path):
    write_checkpoint(tmp_path / "best", TENSORS, RECORD, kind="agent")
    assert read_checkpoint(tmp_path / "best", kind="agent")[1] == RECORD
    refused(tmp_path / "best", "kind 'agent'", "kind 'population'")


def test_files_that_someone_added_are_ignored(folder):
    (folder / ".DS_Store").write_bytes(b"x")
    assert read_checkpoint(folder)[1] == RECORD
