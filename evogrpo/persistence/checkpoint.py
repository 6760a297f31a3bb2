"""Checkpoints: a folder of tensors (safetensors) and one record (JSON), written atomically and checked when read.

A checkpoint of kind "population" is a folder with these files:

- `population.safetensors`: the tensors;
- `population.json`: the record;
- any further files the writer gave, such as an exported adapter;
- `manifest.json`: format, version, kind, and the size and SHA-256 of every other file.

Reading parses data and nothing else: there is no pickle, no code, and no path found in a file is ever followed.
"""

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from evogrpo.persistence.durable import make_folder, sync_folder, write_synced
from evogrpo.persistence.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    Manifest,
    check_file,
    damaged,
    dump_manifest,
    is_plain_name,
    main_names,
    read_checked,
    read_manifest,
)
from evogrpo.persistence.placement import put_in_place, refuse_overwriting, stored_at, tidy
from evogrpo.persistence.strict_json import dump_json, load_json

__all__ = ["CheckpointError", "Manifest", "read_checkpoint", "verify_checkpoint", "write_checkpoint"]


def write_checkpoint(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    kind: str = "population",
    replace: bool = False,
) -> None:
    """Save tensors and a record as one folder that is complete or absent, at whatever byte the process is killed.

    Everything is written and synced in a temporary folder next to `folder`, which is then renamed. A checkpoint that
    is replaced stays loadable until the new one is in its place. Leftovers of killed writes are removed on the way.
    Only one process may write a given folder, or the generations of a run, at a time.

    Args:
        folder: Where the checkpoint goes; its parents are created.
        tensors: Dense tensors of any dtype, shape and device.
        record: Strict JSON: text keys, finite numbers.
        files: Further files, by plain name.
        kind: What is saved, in one word; the reader must ask for the same kind.
        replace: Whether a complete checkpoint that is already there may be replaced. A damaged one always may.

    Raises:
        CheckpointError: If `folder` holds a complete checkpoint and `replace` is False, or anything but a checkpoint.
        ValueError: If a tensor, the record or a name cannot be stored.
        OSError: If the disk refuses; what was at `folder` is still there.
    """
    folder = Path(folder).resolve()
    tensors_name, record_name = main_names(kind)
    for name in files or {}:
        if not is_plain_name(name) or name in (tensors_name, record_name):
            raise ValueError(
                f"{name!r} cannot be a further file of a {kind} checkpoint: use letters, digits, '.', '_' and '-', "
                f"and none of {tensors_name}, {record_name} and {MANIFEST_NAME}"
            )
    contents = {
        tensors_name: _tensor_bytes(tensors),
        record_name: dump_json(record, what="record").encode("ascii"),
        **(files or {}),
    }
    contents[MANIFEST_NAME] = dump_manifest(kind, contents)

    make_folder(folder.parent)
    tidy(folder)
    refuse_overwriting(folder, kind=kind, replace=replace, written=contents.keys())
    temporary = folder.with_name(f".{folder.name}.temporary-{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        for name, content in contents.items():
            write_synced(temporary / name, content)
        sync_folder(temporary)
        put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_checkpoint(folder: Path | str, *, kind: str = "population") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load a checkpoint, after checking every file of it.

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
    tensors_path, record_path = (place / name for name in main_names(kind))
    for name, entry in manifest.files.items():
        if name not in main_names(kind):
            check_file(place / name, entry)
    # These are parsed from the bytes that were checked: a file that changes in between cannot slip through.
    tensor_bytes = read_checked(tensors_path, manifest.files[tensors_path.name])
    record_bytes = read_checked(record_path, manifest.files[record_path.name])
    try:
        record = load_json(record_bytes)
    except ValueError as error:
        raise damaged(record_path, f"must be strict JSON ({error})") from error
    if not isinstance(record, dict):
        raise damaged(record_path, f"must hold a JSON object, not a {type(record).__name__}")
    try:
        tensors = load_tensors(tensor_bytes)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise damaged(tensors_path, f"must be in the safetensors format ({error})") from error
    return tensors, record


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
    for name, entry in manifest.files.items():
        check_file(place / name, entry)
    return manifest


def _manifest_of_kind(place: Path, kind: str) -> Manifest:
    main_names(kind)
    manifest = read_manifest(place)
    if manifest.kind != kind:
        raise CheckpointError(
            f"{place / MANIFEST_NAME} describes a checkpoint of kind {manifest.kind!r}, but {kind!r} is needed here: "
            f"name a checkpoint of a {kind}"
        )
    return manifest


def _tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise tensors; views and tied tensors are stored as separate whole tensors."""
    storable: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ValueError(f"a checkpoint holds dense tensors, but {name!r} is not one: convert or leave it out")
        # safetensors refuses tensors that share memory, and would write all of the storage behind a view.
        storable[name] = (
            tensor.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)
        )
    try:
        return save_tensors(storable)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"the tensors cannot be stored as safetensors: {error}") from error
