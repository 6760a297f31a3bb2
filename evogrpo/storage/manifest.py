"""Manifest of a checkpoint folder: lists its files with sizes and hashes, and verifies them."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch

from evogrpo.config.checks import declared_fields, whole_between
from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import NotRegularFileError, open_regular_file, write_synced

FORMAT = "evogrpo-checkpoint"
VERSION = 4
"""Format of checkpoints; only this one is read."""

MANIFEST_NAME = "manifest.json"

_KIND = re.compile(r"[a-z][a-z0-9_]{0,49}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIZE_LIMIT = 1 << 20  # bytes; the manifest of a thousand files is far smaller


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

    def __post_init__(self) -> None:
        whole_between("size", self.size, 0)
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"a SHA-256 must have 64 hexadecimal digits, got {self.sha256!r:.80}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint.

    Attributes:
        kind: What was saved, such as "population"; names the record and the tensor files.
        files: Every file of the folder, by name, except the manifest itself.

    Raises:
        ValueError: If a name is not a plain file name, or the record or a tensor file is missing.
    """

    kind: str
    files: Mapping[str, FileEntry]

    def __post_init__(self) -> None:
        if record_name(self.kind) not in self.files:
            raise ValueError(f"files must list {record_name(self.kind)}")
        for name in self.files:
            if not is_safe_name(name):
                raise ValueError(f"files must have plain file names, got {name!r:.80}")
        names = tensor_names(self.kind, self.files)
        numbered = [tensor_name(self.kind, number) for number in range(1, len(names) + 1)]
        if not names or names not in ([tensor_name(self.kind)], numbered):
            raise ValueError(f"files must list {tensor_name(self.kind)}, or parts without a gap, got {names}")


def record_name(kind: str) -> str:
    """Return the name of the record file of a kind of checkpoint."""
    if not _KIND.fullmatch(kind) or kind == "manifest":
        raise ValueError(
            f"the kind of a checkpoint must be a short lower-case word other than 'manifest', got {kind!r}"
        )
    return f"{kind}.json"


def tensor_name(kind: str, number: int | None = None) -> str:
    """Return the name of a tensor file: the only one, or the one with this number, from 1."""
    return f"{kind}.safetensors" if number is None else f"{kind}-{number:05d}.safetensors"


def tensor_names(kind: str, names: Iterable[str]) -> list[str]:
    """Return those names that tensor files of a kind have, in order."""
    return sorted(name for name in names if re.fullmatch(rf"{kind}(-[0-9]{{5}})?\.safetensors", name))


def is_safe_name(name: str) -> bool:
    """Return True if a name stays inside its folder: letters, digits, dot, underscore and dash, no leading dot."""
    return _NAME.fullmatch(name) is not None and name != MANIFEST_NAME


def write_entry(path: Path, content: bytes) -> FileEntry:
    """Create a file, sync it to disk, and return its entry."""
    write_synced(path, content)
    return FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def dump_manifest(manifest: Manifest) -> bytes:
    """Write a manifest; raises ValueError if it lists more files than `read_manifest` would read."""
    files = {name: vars(entry) for name, entry in manifest.files.items()}
    values = {"format": FORMAT, "version": VERSION, "kind": manifest.kind, "files": files}
    content = dump_json(values, what="manifest", indent=1).encode("ascii")
    if len(content) > _SIZE_LIMIT:
        raise ValueError(f"a checkpoint of {len(files)} files cannot be read. Write fewer files, or raise file_bytes.")
    return content


def read_manifest(folder: Path) -> Manifest:
    """Read and check a folder's manifest; the files themselves are not read.

    Raises:
        CheckpointError: If there is none, or it is not one that this version can use.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder at {folder}. Check the path.")
    with _opened(path, limit=_SIZE_LIMIT) as file:
        content = file.read()
    try:
        values = load_json(content)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'must have "format": "{FORMAT}"')
        if values.get("version") != VERSION:
            raise OtherVersionError(
                f"{path} has format version {values.get('version')!r:.80}, but this evogrpo reads version {VERSION}. "
                "Load it with the version that wrote it."
            )
        if values.keys() != {"format", "version", "kind", "files"}:
            raise ValueError(f"must have exactly format, version, kind and files, got {sorted(values)}")
        kind, files = values["kind"], values["files"]
        if not isinstance(kind, str) or not isinstance(files, dict):
            raise ValueError("kind must be text, and files an object")
        entries = {name: FileEntry(**declared_fields(FileEntry, dict(entry))) for name, entry in files.items()}
        return Manifest(kind=kind, files=entries)
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise damaged_error(path, f"is not a valid manifest ({error})") from error


def verify_files(folder: Path, manifest: Manifest, *, besides: Collection[str] = ()) -> None:
    """Check that a folder holds every file of its manifest as written, and no tensor file that is not in it.

    Args:
        folder: Folder of the manifest.
        manifest: Its manifest.
        besides: Files that are checked elsewhere.

    Raises:
        CheckpointError: If a file is missing, changed, or not listed.
    """
    for name in tensor_names(manifest.kind, (entry.name for entry in folder.iterdir())):
        if name not in manifest.files:
            raise damaged_error(folder / name, "is not listed in the manifest")
    for name, entry in manifest.files.items():
        if name not in besides:
            with _opened(folder / name, size=entry.size) as file:
                _check_hash(folder / name, entry, hashlib.file_digest(file, "sha256").hexdigest())


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """Return the bytes of a file, after checking those very bytes against the manifest."""
    with _opened(path, size=entry.size) as file:
        content = file.read()
    _check_hash(path, entry, hashlib.sha256(content).hexdigest())
    return content


def damaged_error(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    return CheckpointError(f"{path} {reason}. The checkpoint is damaged. Use another one, or a copy.")


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
        raise CheckpointError(f"{path} needs more memory than there is: {error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} has a record that this version cannot read ({type(error).__name__}: {error!s:.300}). Use the "
            "version that wrote it, or another checkpoint."
        ) from error


@contextmanager
def _opened(path: Path, *, size: int | None = None, limit: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file of this size, or of at most this limit."""
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if size is not None and actual != size:
                raise damaged_error(path, f"has {actual} bytes instead of {size}")
            if limit is not None and actual > limit:
                raise damaged_error(path, f"has {actual} bytes, more than {limit}")
            yield file
    except NotRegularFileError as error:
        raise damaged_error(path, "is not a plain file") from error
    except FileNotFoundError as error:
        raise damaged_error(path, "is missing") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Check the disk and the permissions."
        ) from error


def _check_hash(path: Path, entry: FileEntry, found: str) -> None:
    if found != entry.sha256:
        raise damaged_error(path, "has another SHA-256 than in the manifest")
