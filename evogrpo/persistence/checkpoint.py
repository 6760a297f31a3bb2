"""Checkpoints: a folder of tensors (safetensors) and one record (JSON), written atomically and checked when read.

A checkpoint of kind "population" is a folder with these files:

- `population.safetensors`: the tensors; more than one file can take lie in `population-00001.safetensors`,
  `population-00002.safetensors` and so on, each a safetensors file of its own;
- `population.json`: the record;
- any further files the writer gave, such as an exported adapter;
- `manifest.json`: format, version, kind, and the size and SHA-256 of every other file.

Reading parses data and nothing else: there is no pickle, no code, and no path found in a file is ever followed.
"""

import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from evogrpo.persistence.durable import make_folder, sync_folder, write_synced
from evogrpo.persistence.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    check_files,
    damaged,
    dump_manifest,
    is_plain_name,
    read_checked,
    read_manifest,
    record_name,
    tensor_name,
    tensor_names,
    write_entry,
)
from evogrpo.persistence.placement import put_in_place, refuse_overwriting, stored_at, tidy
from evogrpo.persistence.strict_json import dump_json, load_json
from evogrpo.persistence.tensor_files import FILE_BYTES, read_tensors, write_tensors

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
    """Save tensors and a record as one folder that is complete or absent, at whatever byte the process is killed.

    Everything is written and synced in a temporary folder next to `folder`, which is then renamed. A checkpoint that
    is replaced stays loadable until the new one is in its place. Leftovers of killed writes are removed on the way.
    Only one process may write a given folder, or the generations of a run, at a time.

    The memory taken is about three times what one tensor file holds, which is at most `file_bytes` and one tensor.

    Args:
        folder: Where the checkpoint goes; its parents are created.
        tensors: Dense tensors of any dtype, shape and device. Each is asked for once, when it is written, so a mapping
            that makes them when asked never has all of them in memory.
        record: Strict JSON: text keys, finite numbers.
        files: Further files, by plain name: their bytes, or a function that is called for them when they are written.
        kind: What is saved, in one word; the reader must ask for the same kind.
        replace: Whether a complete checkpoint that is already there may be replaced. A damaged one always may.
        file_bytes: A tensor file that holds this many bytes of tensors takes no more of them, at least 1.

    Raises:
        CheckpointError: If `folder` holds a complete checkpoint and `replace` is False, or anything but a checkpoint.
        ValueError: If a tensor, the record or a name cannot be stored; what was at `folder` is still there.
        OSError: If the disk refuses; likewise.
    """
    folder = Path(folder).resolve()
    further = files or {}
    _check_names(kind, further)
    if file_bytes < 1:
        raise ValueError(f"file_bytes must be at least 1, got {file_bytes}: every tensor file holds something")
    record_bytes = dump_json(record, what="record").encode("ascii")
    make_folder(folder.parent)
    tidy(folder)
    refuse_overwriting(folder, kind=kind, replace=replace, written=further.keys())
    temporary = folder.with_name(f".{folder.name}.temporary-{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        entries = write_tensors(temporary, kind, tensors, file_bytes)
        entries[record_name(kind)] = write_entry(temporary / record_name(kind), record_bytes)
        for name, content in further.items():
            entries[name] = write_entry(temporary / name, content if isinstance(content, bytes) else content())
        write_synced(temporary / MANIFEST_NAME, dump_manifest(Manifest(kind=kind, files=entries)))
        sync_folder(temporary)
        put_in_place(temporary, folder)
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
    place = stored_at(Path(folder).resolve())
    manifest = _manifest_of_kind(place, kind)
    check_files(place, manifest, besides=(record_name(kind), *tensor_names(kind, manifest.files)))
    record = _record(place, manifest)
    return read_tensors(place, manifest), record


def read_record(folder: Path | str, *, kind: str = "population") -> dict[str, Any]:
    """Load a checkpoint's record alone, after checking that one file.

    Raises:
        CheckpointError: If the manifest or the record is not as it was written.
    """
    place = stored_at(Path(folder).resolve())
    return _record(place, _manifest_of_kind(place, kind))


def _record(place: Path, manifest: Manifest) -> dict[str, Any]:
    path = place / record_name(manifest.kind)
    content = read_checked(path, manifest.files[path.name])
    try:
        record = load_json(content)
    except ValueError as error:
        raise damaged(path, f"must be strict JSON ({error})") from error
    if not isinstance(record, dict):
        raise damaged(path, f"must hold a JSON object, not a {type(record).__name__}")
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
    place = stored_at(Path(folder).resolve())
    manifest = _manifest_of_kind(place, kind)
    check_files(place, manifest)
    return manifest


def _manifest_of_kind(place: Path, kind: str) -> Manifest:
    record_name(kind)  # refuses what is no kind
    manifest = read_manifest(place)
    if manifest.kind != kind:
        raise CheckpointError(
            f"{place / MANIFEST_NAME} describes a checkpoint of kind {manifest.kind!r}, but {kind!r} is needed here: "
            f"name a checkpoint of a {kind}"
        )
    return manifest


def _check_names(kind: str, further: Iterable[str]) -> None:
    """Refuse a kind, or further files, that have no name of their own in the folder."""
    record = record_name(kind)
    for name in further:
        if not is_plain_name(name) or name == record or tensor_names(kind, [name]):
            raise ValueError(
                f"{name!r} cannot be a further file of a {kind} checkpoint: use letters, digits, '.', '_' and '-', "
                f"and none of {tensor_name(kind)}, {tensor_name(kind, 1)} and so on, {record} and {MANIFEST_NAME}"
            )
