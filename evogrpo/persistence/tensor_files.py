"""Tensors in safetensors files of limited size, written and read one file at a time."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from evogrpo.persistence.manifest import (
    FileEntry,
    Manifest,
    damaged,
    read_checked,
    tensor_name,
    tensor_names,
    write_entry,
)

# Serialising takes twice as much again: small beside any model that is trained, and hundreds of files hold gigabytes.
FILE_BYTES = 16 * 2**20
MOST_TENSORS = 100_000  # of a file; a forged header may name any number of empty ones, which take long to parse


def write_tensors(folder: Path, kind: str, tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, FileEntry]:
    """Write tensors in the mapping's order; each is asked for once, when its file is filled, and then let go.

    Args:
        folder: Where the files go.
        kind: The kind of checkpoint, which names the files.
        tensors: Dense tensors; views and tied tensors are stored as separate whole tensors.
        file_bytes: A file that holds this many bytes of tensors takes no more of them.

    Returns:
        What the manifest says of each file.

    Raises:
        ValueError: If a tensor or its name cannot be stored.
        OSError: If the disk refuses.
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
            raise damaged(folder / file, f"must hold no tensor of another file, but holds {', '.join(repeated[:5])}")
        tensors.update(loaded)
    return tensors


def _read(path: Path, entry: FileEntry) -> dict[str, Tensor]:
    # Parsed from the very bytes that were checked: a file that changes in between cannot slip through.
    content = read_checked(path, entry)
    header = int.from_bytes(content[:8], "little")
    if header < len(content) and content.count(b'"dtype"', 8, 8 + header) > MOST_TENSORS:
        raise damaged(path, f"must hold at most {MOST_TENSORS:,} tensors, by their names")
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise damaged(path, f"must be in the safetensors format ({error})") from error


def _storable(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(name, str) or name == "__metadata__":
        raise ValueError(f"safetensors cannot hold a tensor called {name!r}: choose another name")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"a checkpoint holds dense tensors, but {name!r} is not one: convert or leave it out")
    # safetensors refuses tensors that share memory, and would write all of the storage behind a view.
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)


def _serialise(tensors: dict[str, Tensor]) -> bytes:
    try:
        return save_tensors(tensors)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"the tensors cannot be stored as safetensors: {error}") from error
