"""Checkpoints: safetensors files, a JSON record and a manifest with hashes, written atomically."""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import (
    NotRegularFileError,
    make_folder,
    open_regular_file,
    sync_folder,
    write_synced,
)
from evogrpo.text import class_name, expand_user, one_line, shown
from evogrpo.validation import dump, validate

__all__ = [
    "CheckpointError",
    "Manifest",
    "read_checkpoint",
    "read_record",
    "verify_checkpoint",
    "write_checkpoint",
]

Kind = Literal["population", "agent"]
FORMAT = "evogrpo-checkpoint"
VERSION = 6
"""Format of checkpoints; only this one is read."""

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 24  # far more than the manifest of a hundred thousand files
FILE_BYTES = 16 * 2**20
"""Bytes of tensors after which the next tensor file is begun. Serialising a file takes twice this
memory again.
"""
MAX_TENSORS = 100_000
"""Maximum number of tensors in a file. A forged header with millions of empty ones would take long
to parse.
"""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_TEMPORARY = re.compile(r"\.(.+)\.temporary-[0-9a-f]{32}")
_PREVIOUS = re.compile(r"\.(.+)\.previous")
_OTHER_HASH = "has another SHA-256 than in the manifest"
_GENERATION = re.compile(r"generation-(\d{4,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


def is_path(source: str) -> bool:
    """Return True if a checkpoint's name of a base model may be a local path: never follow it."""
    return (
        source.startswith((".", "~", "/", "\\"))
        or Path(source).exists()
        or source.endswith(".gguf")
    )


def damaged_error(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that was changed after it was written."""
    return CheckpointError(
        f"{path} {reason}. The checkpoint is damaged. Use another one, or a copy."
    )


@contextmanager
def checkpoint_errors(path: Path | str) -> Iterator[None]:
    """Convert errors of loading a malformed record to CheckpointError.

    Hashes find damage only: a forged record can come with hashes that fit it.
    """
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CheckpointError(f"{path} needs more memory than is available: {error}") from error
    except Exception as error:
        reason = f"{class_name(error)}: {one_line(error, 300)}"
        raise CheckpointError(f"{path} cannot be read by this version ({reason}).") from error


# ---- manifest


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: Length in bytes.
        sha256: Hash of the content, hexadecimal.
    """

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint.

    Attributes:
        kind: Kind of the saved object, which is in the names of the record and the tensor files.
        files: Every file of the folder, by name, except the manifest itself.
        format: `FORMAT`.
        version: `VERSION`.

    Raises:
        ValueError: If a name is not a plain file name, or the record is missing.
    """

    kind: Kind
    files: Mapping[str, FileEntry]
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if f"{self.kind}.json" not in self.files:
            raise ValueError(f"files must list {self.kind}.json")
        for name in self.files:
            if not _is_plain_name(name):
                raise ValueError(f"files must have plain file names, got {shown(name)}")


def tensor_names(kind: Kind, names: Iterable[str]) -> list[str]:
    """Return, in order, those of the names that are names of tensor files of a kind."""
    return sorted(
        name for name in names if re.fullmatch(rf"{kind}(-[0-9]{{5}})?\.safetensors", name)
    )


def _is_plain_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name != MANIFEST_NAME


def read_manifest(folder: Path) -> Manifest:
    """Read and check a folder's manifest; the files themselves are not read.

    Raises:
        CheckpointError: If there is no manifest, or this version cannot use it.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder at {folder}. Check the path.")
    # 1. Read the file. The manifest has no hash of its own, so only its size is limited.
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_MANIFEST_BYTES:
            raise damaged_error(path, f"has more than {MAX_MANIFEST_BYTES} bytes")
        content = file.read()
    # 2. Check format and version before the fields, which other versions may not have.
    try:
        values = load_json(content)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'format must be "{FORMAT}"')
        if values.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has format version {shown(values.get('version'))}, but this evogrpo reads"
                f" version {VERSION}. Load it with the version that wrote it."
            )
        return validate(Manifest, values, extra="forbid")
    except CheckpointError:
        raise
    except ValueError as error:
        raise damaged_error(path, f"is not a valid manifest ({error})") from error


# ---- writing


def write_checkpoint(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    files: Mapping[str, bytes | Callable[[], bytes]] | None = None,
    kind: Kind = "population",
    replace: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Save tensors and a record as one folder, complete or absent even after a kill.

    Everything is written and synced in a temporary folder next to `folder`, which is then renamed.
    A replaced checkpoint can be loaded until the new one has its name. Leftovers of killed writes
    are removed first. Only one process may write a given folder, or the generations of a run, at a
    time.

    Memory: about three times the size of one tensor file, which is at most `file_bytes` plus one
    tensor.

    Args:
        folder: Folder of the checkpoint; its parents are created.
        tensors: Dense tensors of any dtype, shape and device; views and tied tensors are stored as
            separate tensors. Each is read once, when it is written, so a mapping may create them on
            access.
        record: Strict JSON: text keys, finite numbers.
        files: Further files, by plain name: their bytes, or a function that returns them when they
            are written. None = no others.
        kind: Kind of the saved object; the reader must give the same kind.
        replace: Replace an existing checkpoint.
        file_bytes: See `FILE_BYTES`.

    Raises:
        CheckpointError: If `folder` holds a checkpoint and `replace` is False, or other files.
        ValueError: If a tensor, the record or a name cannot be stored; `folder` is unchanged.
        OSError: If writing fails; `folder` is unchanged.
    """
    # 1. Check everything that can be checked before the first write.
    folder = expand_user(folder).resolve()
    files = files or {}
    for name in files:
        if not _is_plain_name(name) or name in {f"{kind}.json", *tensor_names(kind, files)}:
            raise ValueError(
                f"{name!r} cannot be the name of a file. Use letters, digits, '.', '_' and '-'."
            )
    record_bytes = dump_json(record, what="record").encode("ascii")
    make_folder(folder.parent)
    remove_leftovers(folder)
    _check_overwrite(folder, kind=kind, replace=replace, written=files.keys())
    # 2. Write and sync a temporary folder, the manifest last.
    temporary = folder.with_name(f".{folder.name}.temporary-{uuid.uuid4().hex}")
    entries: dict[str, FileEntry] = {}

    def write(name: str, content: bytes) -> None:
        write_synced(temporary / name, content)
        entries[name] = FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())

    try:
        temporary.mkdir()
        for name, content in _tensor_files(kind, tensors, file_bytes):
            write(name, content)
        write(f"{kind}.json", record_bytes)
        for name, given in files.items():
            write(name, given if isinstance(given, bytes) else given())
        manifest = dump_json(dump(Manifest(kind=kind, files=entries)), what="manifest", indent=1)
        write_synced(temporary / MANIFEST_NAME, manifest.encode("ascii"))
        sync_folder(temporary)
        # 3. Move it into place.
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tensor_files(
    kind: Kind, tensors: Mapping[str, Tensor], file_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the tensor files; each tensor is read when its file is filled."""
    held: dict[str, Tensor] = {}  # tensors of the file that is being filled
    size = 0  # their bytes
    file_name = f"{kind}.safetensors"
    number = 1
    for name in list(tensors):
        # 1. Begin another file if this one is full.
        if held and size >= file_bytes:
            yield file_name, _serialise(held)
            held.clear()
            size = 0
            number += 1
            file_name = f"{kind}-{number:05d}.safetensors"
        # 2. Check name and tensor. safetensors keeps its own texts under "__metadata__".
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(
                f"the name of a tensor must be text other than '__metadata__', got {shown(name)}."
            )
        tensor = tensors[name]
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout != torch.strided
            or tensor.is_quantized
            or tensor.is_meta
        ):
            raise ValueError(f"{name!r} must be a dense tensor. Convert it, or leave it out.")
        # 3. Copy it: safetensors refuses tensors that share memory, and writes the whole storage of
        #    a view.
        whole = tensor.detach().resolve_conj().resolve_neg().to("cpu")
        held[name] = whole.clone(memory_format=torch.contiguous_format)
        size += whole.nbytes
        del tensor, whole  # free their memory before the next tensor is created
    yield file_name, _serialise(held)


def _serialise(tensors: dict[str, Tensor]) -> bytes:
    """Return tensors as the bytes of a safetensors file."""
    try:
        return save_tensors(tensors)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"safetensors cannot store these tensors ({min(tensors)} to {max(tensors)}): {error}. "
            "Convert them to a dtype it supports, or leave them out."
        ) from error


def _check_overwrite(folder: Path, *, kind: Kind, replace: bool, written: Set[str]) -> None:
    """Raise CheckpointError unless `folder` is free or holds only a replaceable checkpoint.

    Args:
        folder: Folder that the new checkpoint will have.
        kind: Kind of the new checkpoint.
        replace: Allow files of an older checkpoint, and of the names in `written`.
        written: Names of the additional files that the new checkpoint will have.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Choose another path.")
    # 1. Names that a checkpoint of this kind has or may have.
    found = {entry.name for entry in folder.iterdir()}
    known = {MANIFEST_NAME, f"{kind}.json", *tensor_names(kind, found)}
    # A damaged checkpoint may be replaced if all of its files are known by name.
    with suppress(CheckpointError):
        known |= read_manifest(folder).files.keys()
    holds_checkpoint = bool(found & known)
    if holds_checkpoint and not replace:
        raise CheckpointError(
            f"{folder} already holds a checkpoint. Pass replace=True, or choose another folder."
        )
    # 2. Other names are foreign, and never removed. The system may have added hidden files to a
    #    checkpoint, such as .DS_Store, which are replaced as well.
    if holds_checkpoint:
        known |= {name for name in found if name.startswith(".") and (folder / name).is_file()}
    if replace:
        known |= written
    foreign = sorted(found - known)
    if foreign:
        raise CheckpointError(
            f"{folder} holds other files: {', '.join(foreign[:5])}. Choose another folder."
        )


def checkpoint_path(folder: Path) -> Path:
    """Return the folder of a checkpoint, or the one set aside by an interrupted replacement."""
    previous = folder.with_name(f".{folder.name}.previous")
    if previous.is_dir() and not os.path.lexists(folder):
        return previous
    return folder


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename a complete, synced folder to its final name, replacing an existing one."""
    previous = folder.with_name(f".{folder.name}.previous")
    # 1. Set an existing checkpoint aside, under a name that `checkpoint_path` finds after a kill.
    replacing = os.path.lexists(folder)
    if replacing:
        # A leftover that could not be removed. The next write tries again.
        if os.path.lexists(previous):
            previous.rename(folder.with_name(f".{folder.name}.temporary-{uuid.uuid4().hex}"))
        folder.rename(previous)
    # 2. Rename the new one, or put the old one back.
    try:
        temporary.rename(folder)
    except OSError:
        if replacing:
            previous.rename(folder)
        raise
    # 3. Only when the new name is on disk is the old checkpoint removed.
    sync_folder(folder.parent)
    if replacing:
        shutil.rmtree(previous, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writes of this folder, and rename set-aside folders back.

    If the folder is a generation of a run, this includes the leftovers of all its generations.
    """
    for entry in sorted(folder.parent.iterdir()):
        match = _TEMPORARY.fullmatch(entry.name) or _PREVIOUS.fullmatch(entry.name)
        if match is None:
            continue
        target = folder.with_name(match[1])
        both_generations = _GENERATION.fullmatch(target.name) and _GENERATION.fullmatch(folder.name)
        if target != folder and not both_generations:
            continue
        # A kill between two renames: the checkpoint that was set aside is the only one.
        if checkpoint_path(target) == entry:
            entry.rename(target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


# ---- reading


def read_checkpoint(
    folder: Path | str, *, kind: Kind = "population"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load a checkpoint, and check all its files.

    One tensor file at a time is in memory besides the tensors.

    Args:
        folder: The checkpoint's folder.
        kind: Kind that the checkpoint must have.

    Returns:
        The tensors, on the CPU, by name; and the record.

    Raises:
        CheckpointError: If a file is missing or was changed, or the kind differs.
    """
    # Record and tensor files are checked as they are read, all others before.
    path, manifest = _find(folder, kind)
    names = tensor_names(kind, manifest.files)
    _verify_files(path, manifest, besides=(f"{kind}.json", *names))
    record = _record(path, manifest)
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(_read_tensors(path / name, manifest.files[name]))
    return tensors, record


def read_record(folder: Path | str, *, kind: Kind = "population") -> dict[str, Any]:
    """Load only the record of a checkpoint, after checking its file.

    Raises:
        CheckpointError: If the manifest or the record is missing or was changed, or the kind
            differs.
    """
    return _record(*_find(folder, kind))


def verify_checkpoint(folder: Path | str) -> None:
    """Check that every file of a population's checkpoint is complete and unchanged.

    Raises:
        CheckpointError: If a file is missing or was changed.
    """
    _verify_files(*_find(folder, "population"))


def _find(folder: Path | str, kind: Kind) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a checkpoint.

    Raise CheckpointError if it is of another kind.
    """
    path = checkpoint_path(Path(folder).resolve())
    manifest = read_manifest(path)
    if manifest.kind != kind:
        raise CheckpointError(
            f"{path} must be a checkpoint of kind {kind!r}, got kind {manifest.kind!r}."
        )
    return path, manifest


def _record(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read and check the record of a checkpoint."""
    path = folder / f"{manifest.kind}.json"
    content = _read_verified(path, manifest.files[path.name])
    try:
        record = load_json(content)
    except ValueError as error:
        raise damaged_error(path, f"is not strict JSON ({error})") from error
    if not isinstance(record, dict):
        raise damaged_error(path, f"must be a JSON object, got a {class_name(record)}")
    return record


def _read_tensors(path: Path, entry: FileEntry) -> dict[str, Tensor]:
    """Read and check one tensor file."""
    # Parse the bytes that were verified, because the file may change between two reads.
    content = _read_verified(path, entry)
    # A file begins with the length of its JSON header, in which each tensor has a "dtype".
    header = int.from_bytes(content[:8], "little")
    if header < len(content) and content.count(b'"dtype"', 8, 8 + header) > MAX_TENSORS:
        raise damaged_error(path, f"has more than {MAX_TENSORS:,} tensors")
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise damaged_error(path, f"is not in the safetensors format ({error})") from error


def _verify_files(folder: Path, manifest: Manifest, *, besides: Collection[str] = ()) -> None:
    """Check that the files of a manifest are unchanged; the caller checks those in `besides`."""
    for name, entry in manifest.files.items():
        if name not in besides:
            with _opened(folder / name, entry) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    raise damaged_error(folder / name, _OTHER_HASH)


def _read_verified(path: Path, entry: FileEntry) -> bytes:
    """Return the bytes of a file after checking them against the manifest."""
    with _opened(path, entry) as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise damaged_error(path, _OTHER_HASH)
    return content


@contextmanager
def _opened(path: Path, entry: FileEntry | None = None) -> Iterator[BufferedReader]:
    """Open a regular file.

    Raise CheckpointError if it is missing or its size differs from the manifest.
    """
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if entry is not None and actual != entry.size:
                raise damaged_error(path, f"has {actual} bytes instead of {entry.size}")
            yield file
    except NotRegularFileError as error:
        raise damaged_error(path, "is not a plain file") from error
    except FileNotFoundError as error:
        raise damaged_error(path, "is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error


# ---- generations of a run


def generation_folder(run_dir: Path | str, generation: int) -> Path:
    """Return the path of the checkpoint of one generation, which may not exist."""
    return Path(run_dir) / CHECKPOINTS / f"generation-{generation:04d}"


def stored_generations(run_dir: Path | str) -> list[int]:
    """Return the generations that have a folder, newest first."""
    parent = Path(run_dir) / CHECKPOINTS
    if not parent.is_dir():
        return []
    generations = set()
    for entry in parent.iterdir():
        # A kill between two renames leaves a checkpoint under its `.previous` name.
        match = _GENERATION.fullmatch(entry.name.removeprefix(".").removesuffix(".previous"))
        if match is not None and entry.is_dir():
            generations.add(int(match[1]))
    return sorted(generations, reverse=True)


def latest_checkpoint(run_dir: Path | str) -> int | None:
    """Return the newest generation with a complete, unchanged checkpoint; None if there is none."""
    for generation in stored_generations(run_dir):
        with suppress(CheckpointError):
            verify_checkpoint(generation_folder(run_dir, generation))
            return generation
    return None


def prune(run_dir: Path | str, written: int, keep: int = 2) -> None:
    """Remove old checkpoints without reading them; `written` and the `keep` - 1 before it stay.

    The checkpoint of `written` is complete, so the run can be resumed even if all others are
    damaged. Checkpoints of later generations are those that a resumed run has skipped, such as
    damaged ones. They are not counted or removed, and are replaced when the run reaches these
    generations.

    Args:
        run_dir: Run directory.
        written: Generation whose checkpoint this process has just written.
        keep: Number of checkpoints to keep, at least 1.
    """
    older = [generation for generation in stored_generations(run_dir) if generation <= written]
    for generation in older[keep:]:
        folder = checkpoint_path(generation_folder(run_dir, generation))
        temporary = folder.with_name(f".{folder.name}.temporary-{uuid.uuid4().hex}")
        # A kill while files are removed must leave no incomplete checkpoint.
        folder.rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
