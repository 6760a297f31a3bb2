"""Checkpoints: folders of safetensors files, a JSON record and a manifest with hashes, written atomically."""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import make_folder, sync_folder, write_synced
from evogrpo.storage.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    FileEntry,
    Manifest,
    OtherVersionError,
    damaged_error,
    dump_manifest,
    is_safe_name,
    read_manifest,
    read_verified,
    record_name,
    tensor_name,
    tensor_names,
    verify_files,
    write_entry,
)

# Serialising takes twice as much again: small beside any model that is trained, and hundreds of files hold gigabytes.
FILE_BYTES = 16 * 2**20
MOST_TENSORS = 100_000  # of a file; a forged header may name any number of empty ones, which take long to parse


def write_tensors(folder: Path, kind: str, tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, FileEntry]:
    """Write tensors in the order of the mapping, which is read once per tensor, when its file is filled.

    Args:
        folder: Where the files go.
        kind: The kind of checkpoint, which names the files.
        tensors: Dense tensors; views and tied tensors are stored as separate whole tensors.
        file_bytes: A file that holds this many bytes of tensors takes no more of them.

    Returns:
        Manifest entries of the files.

    Raises:
        ValueError: If a tensor or its name cannot be stored.
        OSError: If writing fails.
    """
    names = list(tensors)
    entries: dict[str, FileEntry] = {}
    held: dict[str, Tensor] = {}
    for name in names:
        if sum(tensor.nbytes for tensor in held.values()) >= file_bytes:
            file = tensor_name(kind, len(entries) + 1)
            entries[file] = write_entry(folder / file, _serialise(held))
            held.clear()
        held[name] = _storable(name, tensors[name])
    file = tensor_name(kind, len(entries) + 1 if entries else None)
    entries[file] = write_entry(folder / file, _serialise(held))
    return entries


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, checking every file before it is parsed.

    Raises:
        CheckpointError: If a file is not as the manifest says or not safetensors, or a tensor occurs twice.
    """
    tensors: dict[str, Tensor] = {}
    for file in tensor_names(manifest.kind, manifest.files):
        loaded = _read(folder / file, manifest.files[file])
        if repeated := sorted(tensors.keys() & loaded.keys()):
            raise damaged_error(folder / file, f"repeats tensors of another file: {', '.join(repeated[:5])}")
        tensors.update(loaded)
    return tensors


def _read(path: Path, entry: FileEntry) -> dict[str, Tensor]:
    # Parse the same bytes that were verified, so that the file cannot change in between.
    content = read_verified(path, entry)
    header = int.from_bytes(content[:8], "little")
    if header < len(content) and content.count(b'"dtype"', 8, 8 + header) > MOST_TENSORS:
        raise damaged_error(path, f"has more than {MOST_TENSORS:,} tensors")
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise damaged_error(path, f"is not in the safetensors format ({error})") from error


def _storable(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(name, str) or name == "__metadata__":
        raise ValueError(f"the name of a tensor must be text other than '__metadata__', got {name!r}.")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"{name!r} must be a dense tensor. Convert it, or leave it out.")
    # safetensors refuses tensors that share memory, and would write all of the storage behind a view.
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)


def _serialise(tensors: dict[str, Tensor]) -> bytes:
    try:
        return save_tensors(tensors)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"the tensors cannot be stored as safetensors: {error}") from error


_TEMPORARY = re.compile(r"\.(.+)\.temporary-[0-9a-f]{32}")
_PREVIOUS = re.compile(r"\.(.+)\.previous")
_GENERATION = re.compile(r"generation-\d+")


def checkpoint_path(folder: Path) -> Path:
    """Return the path of a checkpoint: its folder, or the previous one if a replacement was killed between renames."""
    previous = _previous(folder)
    return previous if previous.is_dir() and not os.path.lexists(folder) else folder


def move_into_place(temporary: Path, folder: Path) -> None:
    """Rename a complete, synced folder to its final name, replacing an existing one."""
    previous = _previous(folder)
    replacing = os.path.lexists(folder)
    if replacing:
        folder.rename(previous)
    try:
        temporary.rename(folder)
    except OSError:
        if replacing:
            previous.rename(folder)
        raise
    sync_folder(folder.parent)
    if replacing:
        shutil.rmtree(previous, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writes of this folder and its sibling generations, and restore set-aside folders."""
    for entry in sorted(folder.parent.iterdir()):
        match = _TEMPORARY.fullmatch(entry.name) or _PREVIOUS.fullmatch(entry.name)
        if match is None:
            continue
        target = folder.with_name(match[1])
        both_generations = _GENERATION.fullmatch(target.name) and _GENERATION.fullmatch(folder.name)
        if target != folder and not both_generations:
            continue
        if checkpoint_path(target) == entry:
            entry.rename(target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint atomically: rename it first."""
    doomed = folder.with_name(f".{folder.name}.temporary-{os.urandom(16).hex()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def check_overwrite(folder: Path, *, kind: str, replace: bool, written: Set[str]) -> None:
    """Raise CheckpointError unless `folder` is free, or holds a checkpoint that may be replaced, and nothing else.

    Args:
        folder: Where the checkpoint shall go.
        kind: The kind that shall be written.
        replace: Whether a complete checkpoint may be replaced.
        written: Names of the further files that shall be written.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Choose another path.")
    found = {entry.name for entry in folder.iterdir()}
    own = {MANIFEST_NAME, record_name(kind), *tensor_names(kind, found)}
    complete = False
    try:
        manifest = read_manifest(folder)
        own |= manifest.files.keys()
        if not replace:  # what may be replaced need not be read
            verify_files(folder, manifest)
            complete = True
    except OtherVersionError as error:
        if not replace:
            raise CheckpointError(f"{error} Or pass replace=True to replace it.") from error
    except CheckpointError:
        pass  # damaged: free to be replaced, as long as every file in it is one that a checkpoint wrote
    if complete:
        raise CheckpointError(
            f"{folder} already holds a complete checkpoint. Pass replace=True, or choose another folder."
        )
    if foreign := sorted(found - (own | written if replace else own)):
        raise CheckpointError(f"{folder} holds files of others: {', '.join(foreign[:5])}. Choose another folder.")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


__all__ = ["CheckpointError", "Manifest", "read_checkpoint", "read_record", "verify_checkpoint", "write_checkpoint"]


def write_checkpoint(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    files: Mapping[str, bytes | Callable[[], bytes]] | None = None,
    kind: str = "population",
    replace: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Save tensors and a record as one folder that is complete or absent, even if the process is killed.

    Everything is written and synced in a temporary folder next to `folder`, which is then renamed. A checkpoint that
    is replaced stays loadable until the new one is in its place. Leftovers of killed writes are removed on the way.
    Only one process may write a given folder, or the generations of a run, at a time.

    The memory taken is about three times what one tensor file holds, which is at most `file_bytes` and one tensor.

    Args:
        folder: Where the checkpoint goes; its parents are created.
        tensors: Dense tensors of any dtype, shape and device. Each is read once, when it is written, so a mapping
            that makes them on access never has all of them in memory.
        record: Strict JSON: text keys, finite numbers.
        files: Further files, by plain name: their bytes, or a function that is called for them when they are written.
        kind: What is saved, in one word; the reader must ask for the same kind.
        replace: Whether a complete checkpoint that is already there may be replaced. A damaged one always may.
        file_bytes: A tensor file that holds this many bytes of tensors takes no more of them, at least 1.

    Raises:
        CheckpointError: If `folder` holds a complete checkpoint and `replace` is False, or other files.
        ValueError: If a tensor, the record or a name cannot be stored; what was at `folder` is still there.
        OSError: If writing fails; what was at `folder` is still there.
    """
    folder = Path(folder).resolve()
    further = files or {}
    _check_names(kind, further)
    if file_bytes < 1:
        raise ValueError(f"file_bytes must be at least 1, got {file_bytes}.")
    record_bytes = dump_json(record, what="record").encode("ascii")
    make_folder(folder.parent)
    remove_leftovers(folder)
    check_overwrite(folder, kind=kind, replace=replace, written=further.keys())
    temporary = folder.with_name(f".{folder.name}.temporary-{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        entries = write_tensors(temporary, kind, tensors, file_bytes)
        entries[record_name(kind)] = write_entry(temporary / record_name(kind), record_bytes)
        for name, content in further.items():
            entries[name] = write_entry(temporary / name, content if isinstance(content, bytes) else content())
        write_synced(temporary / MANIFEST_NAME, dump_manifest(Manifest(kind=kind, files=entries)))
        sync_folder(temporary)
        move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_checkpoint(folder: Path | str, *, kind: str = "population") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load a checkpoint, after checking every file of it; no more than one tensor file is held besides its tensors.

    Args:
        folder: The checkpoint's folder.
        kind: What the checkpoint must hold.

    Returns:
        The tensors, on the CPU, by name; and the record.

    Raises:
        CheckpointError: If anything about the checkpoint is not as it was written.
    """
    place, manifest = _find(folder, kind)
    verify_files(place, manifest, besides=(record_name(kind), *tensor_names(kind, manifest.files)))
    record = _record(place, manifest)
    return read_tensors(place, manifest), record


def read_record(folder: Path | str, *, kind: str = "population") -> dict[str, Any]:
    """Load a checkpoint's record alone, after checking that one file.

    Raises:
        CheckpointError: If the manifest or the record is not as it was written.
    """
    return _record(*_find(folder, kind))


def _record(place: Path, manifest: Manifest) -> dict[str, Any]:
    path = place / record_name(manifest.kind)
    content = read_verified(path, manifest.files[path.name])
    try:
        record = load_json(content)
    except ValueError as error:
        raise damaged_error(path, f"is not strict JSON ({error})") from error
    if not isinstance(record, dict):
        raise damaged_error(path, f"holds no JSON object, but a {type(record).__name__}")
    return record


def verify_checkpoint(folder: Path | str, *, kind: str = "population") -> Manifest:
    """Check that every file of a checkpoint is there, whole and as written, without loading any.

    Args:
        folder: The checkpoint's folder.
        kind: What the checkpoint must hold.

    Returns:
        What the checkpoint holds.

    Raises:
        CheckpointError: If anything about the checkpoint is not as it was written.
    """
    place, manifest = _find(folder, kind)
    verify_files(place, manifest)
    return manifest


def _find(folder: Path | str, kind: str) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a checkpoint of this kind."""
    place = checkpoint_path(Path(folder).resolve())
    manifest = read_manifest(place)
    if manifest.kind != kind:
        raise CheckpointError(
            f"{place / MANIFEST_NAME} must be of a checkpoint of kind {kind!r}, got kind {manifest.kind!r}. Give the "
            "folder of the right kind."
        )
    return place, manifest


def _check_names(kind: str, further: Iterable[str]) -> None:
    """Refuse a kind, or further files, that have no name of their own in the folder."""
    record = record_name(kind)
    for name in further:
        if not is_safe_name(name) or name == record or tensor_names(kind, [name]):
            raise ValueError(
                f"{name!r} cannot name a further file of a checkpoint of kind {kind!r}. Use letters, digits, '.', '_' "
                f"and '-', and none of {tensor_name(kind)}, {tensor_name(kind, 1)}, {record} and {MANIFEST_NAME}."
            )


CHECKPOINTS = "checkpoints"
"""The folder in a run's that holds its generations."""

_GENERATION_FOLDER = re.compile(r"\.?generation-(\d{4,})(?:\.previous)?")


def generation_folder(run_dir: Path | str, generation: int) -> Path:
    """Return the checkpoint folder of one generation, at least 0; it need not exist."""
    if generation < 0:
        raise ValueError(f"generation must be at least 0, got {generation}.")
    return Path(run_dir) / CHECKPOINTS / f"generation-{generation:04d}"


def latest_checkpoint(run_dir: Path | str) -> int | None:
    """Return the newest generation with a complete, unchanged checkpoint; None if there is none."""
    for generation in stored_generations(run_dir):
        with suppress(CheckpointError):
            verify_checkpoint(generation_folder(run_dir, generation))
            return generation
    return None


def prune(run_dir: Path | str, written: int, keep: int = 2) -> tuple[int, ...]:
    """Remove old checkpoints without reading them; `written` and the `keep` - 1 before it stay.

    `written` is complete, so the run can be resumed even if all other checkpoints are damaged. Newer generations are
    checkpoints that a resumed run has skipped, such as damaged ones. They do not count, and stay until they are
    written again.

    Args:
        run_dir: Run directory.
        written: Generation whose checkpoint this process has just written.
        keep: Number of checkpoints to keep, at least 1.

    Returns:
        The generations that were removed, newest first.

    Raises:
        ValueError: If `keep` is below 1, or `written` has no checkpoint.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}.")
    older = [generation for generation in stored_generations(run_dir) if generation <= written]
    if written not in older:
        raise ValueError(f"generation {written} has no checkpoint in {run_dir}. Write it before old ones are removed.")
    removed = older[keep:]
    for generation in removed:
        remove_checkpoint(checkpoint_path(generation_folder(run_dir, generation)))
    return tuple(removed)


def stored_generations(run_dir: Path | str) -> list[int]:
    """Return the generations that have a folder, newest first."""
    parent = generation_folder(run_dir, 0).parent
    if not parent.is_dir():
        return []
    names = (_GENERATION_FOLDER.fullmatch(entry.name) for entry in parent.iterdir() if entry.is_dir())
    return sorted({int(match[1]) for match in names if match}, reverse=True)
