"""Manifest of a checkpoint folder: lists its files with sizes and hashes, and verifies them."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import NotRegularFileError, open_regular_file, write_synced

FORMAT = "evogrpo-checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"

_KIND = re.compile(r"[a-z][a-z0-9_]{0,49}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIZE_LIMIT = 1 << 20  # bytes; the manifest of a thousand files is far smaller
_CHUNK = 1 << 20  # bytes read at a time


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


class OtherVersionError(CheckpointError):
    """A checkpoint in the format of another version of evogrpo."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: Length in bytes.
        sha256: Hash of the content, hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint.

    Attributes:
        kind: What was saved, such as "population"; names the record and the tensor files.
        files: Every file of the folder, by name, except the manifest itself.
    """

    kind: str
    files: Mapping[str, FileEntry]


def record_name(kind: str) -> str:
    """Return the name of the record file of a kind of checkpoint."""
    if not _KIND.fullmatch(kind) or kind == "manifest":
        raise ValueError(f"a kind of checkpoint is a short lower-case word other than 'manifest', got {kind!r}")
    return f"{kind}.json"


def tensor_name(kind: str, number: int | None = None) -> str:
    """Return the name of a tensor file: the only one, or the one with this number, from 1."""
    return f"{kind}.safetensors" if number is None else f"{kind}-{number:05d}.safetensors"


def tensor_names(kind: str, names: Iterable[str]) -> list[str]:
    """Return those names that tensor files of a kind have, in order."""
    return sorted(name for name in names if re.fullmatch(rf"{kind}(-[0-9]{{5}})?\.safetensors", name))


def is_safe_name(name: str) -> bool:
    """Return whether a name stays inside its folder: letters, digits, dot, underscore and dash, no leading dot."""
    return _NAME.fullmatch(name) is not None and name != MANIFEST_NAME


def write_entry(path: Path, content: bytes) -> FileEntry:
    """Create a file, wait until it is on disk, and return what the manifest says of it."""
    write_synced(path, content)
    return FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def dump_manifest(manifest: Manifest) -> bytes:
    """Write a manifest; raises ValueError if it lists more files than `read_manifest` would read."""
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in manifest.files.items()}
    values = {"format": FORMAT, "version": VERSION, "kind": manifest.kind, "files": files}
    content = dump_json(values, what="manifest", indent=1).encode("ascii")
    if len(content) > _SIZE_LIMIT:
        raise ValueError(f"a checkpoint of {len(files)} files is not readable: write fewer, or a larger file_bytes")
    return content


def read_manifest(folder: Path) -> Manifest:
    """Read and check a folder's manifest; the files themselves are not looked at.

    Raises:
        CheckpointError: If there is none, or it is not one that this version can use.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder at {folder}: check the path")
    try:
        manifest = load_json(_read_plain(path, limit=_SIZE_LIMIT))
    except CheckpointError:
        raise
    except ValueError as error:
        raise damaged_error(path, f"must be strict JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise damaged_error(path, f'must say "format": "{FORMAT}"')
    _check_version(path, manifest.get("version"))
    if manifest.keys() != {"format", "version", "kind", "files"}:
        raise damaged_error(path, f"must have exactly format, version, kind and files, but has {sorted(manifest)}")
    kind, files = manifest["kind"], manifest["files"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise damaged_error(path, f"must name the kind of checkpoint by a short word, not {kind!r:.80}")
    if not isinstance(files, dict):
        raise damaged_error(path, "must list files by name")
    found = tensor_names(kind, files)
    numbered = [tensor_name(kind, number) for number in range(1, max(1, len(found)) + 1)]
    if found not in ([tensor_name(kind)], numbered):
        rule = f"must list {tensor_name(kind)}, or {numbered[0]} and so on without a gap"
        raise damaged_error(path, f"{rule}, but lists {', '.join(found) or 'neither'}")
    if record_name(kind) not in files:
        raise damaged_error(path, f"must list {record_name(kind)}")
    return Manifest(kind=kind, files={name: _file_entry(path, name, entry) for name, entry in files.items()})


def verify_files(folder: Path, manifest: Manifest, *, besides: Collection[str] = ()) -> None:
    """Check that a folder holds every file of its manifest as written, and no tensor file that is not in it.

    Args:
        folder: Where the manifest was found.
        manifest: What it says.
        besides: Files that are checked elsewhere.

    Raises:
        CheckpointError: If a file is missing, too many or changed.
    """
    for name in tensor_names(manifest.kind, (entry.name for entry in folder.iterdir())):
        if name not in manifest.files:
            raise damaged_error(folder / name, "must be listed in the manifest")
    for name, entry in manifest.files.items():
        if name not in besides:
            verify_file(folder / name, entry)


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """Return the bytes of a file, after checking those very bytes against the manifest."""
    content = _read_plain(path, size=entry.size)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise _changed(path)
    return content


def verify_file(path: Path, entry: FileEntry) -> None:
    """Check a file against the manifest, holding only a small part of it in memory."""
    digest = hashlib.sha256()
    try:
        with open(_open_plain(path, size=entry.size), "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest.hexdigest() != entry.sha256:
        raise _changed(path)


def damaged_error(path: Path, rule: str) -> CheckpointError:
    """Return the error for a file that breaks a rule."""
    return CheckpointError(
        f"{path} {rule}: this checkpoint was cut off or changed after it was written, use another one or a copy"
    )


@contextmanager
def checkpoint_errors(path: Path | str) -> Iterator[None]:
    """Turn errors of loading a malformed record into CheckpointError; hashes detect damage, not forgery."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CheckpointError(f"{path} takes more memory to load than there is: {error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is a checkpoint whose record this version cannot read ({type(error).__name__}: {error!s:.300}): "
            "use the version that wrote it, or another checkpoint"
        ) from error


def _check_version(path: Path, version: Any) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise damaged_error(path, f"must have a whole-number version of at least 1, not {version!r:.80}")
    if version > VERSION:
        raise OtherVersionError(
            f"{path} has format version {version}, but this evogrpo reads up to version {VERSION}: upgrade evogrpo"
        )
    if version < VERSION:
        raise OtherVersionError(
            f"{path} has format version {version}, but this evogrpo reads version {VERSION}. Load it with the "
            "version that wrote it"
        )


def _file_entry(path: Path, name: str, entry: Any) -> FileEntry:
    """Check one line of the manifest."""
    if not is_safe_name(name):
        raise damaged_error(path, f"must list plain file names, not {name!r:.80}")
    size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise damaged_error(path, f"must give the size of {name} in bytes, not {size!r:.80}")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise damaged_error(path, f"must give the SHA-256 of {name}, not {digest!r:.80}")
    return FileEntry(size=size, sha256=digest)


def _read_plain(path: Path, *, size: int | None = None, limit: int | None = None) -> bytes:
    try:
        with open(_open_plain(path, size=size, limit=limit), "rb") as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _open_plain(path: Path, *, size: int | None = None, limit: int | None = None) -> int:
    """Open a regular file of this size, or of at most this limit."""
    try:
        file = open_regular_file(path)
    except NotRegularFileError as error:
        raise damaged_error(path, "must be a plain file, not a link, folder or device") from error
    actual = os.fstat(file).st_size
    wrong = ""
    if size is not None and actual != size:
        wrong = f"must have {size} bytes, but has {actual}"
    elif limit is not None and actual > limit:
        wrong = f"must have at most {limit} bytes, but has {actual}"
    if wrong:
        os.close(file)
        raise damaged_error(path, wrong)
    return file


def _changed(path: Path) -> CheckpointError:
    return damaged_error(path, "must have the SHA-256 that the manifest gives, but its content differs")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return damaged_error(path, "must exist, but is missing")
    return CheckpointError(f"{path} cannot be read ({error.strerror}): check the disk and the permissions")
