"""Putting a finished folder in its place by renames, so that a kill at any moment leaves a whole one to read."""

import os
import re
import shutil
from collections.abc import Set
from pathlib import Path

from evogrpo.persistence.durable import sync_folder
from evogrpo.persistence.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    OtherVersionError,
    check_files,
    read_manifest,
    record_name,
    tensor_names,
)

_TEMPORARY = re.compile(r"\.(.+)\.temporary-[0-9a-f]{32}")
_PREVIOUS = re.compile(r"\.(.+)\.previous")
_GENERATION = re.compile(r"generation-\d+")


def stored_at(folder: Path) -> Path:
    """Return where a checkpoint lies: in its folder, or beside it when a kill fell between the renames of a replace."""
    previous = _previous(folder)
    return previous if previous.is_dir() and not os.path.lexists(folder) else folder


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a whole, synced folder to its final name; one that is there moves aside and is then removed."""
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


def tidy(folder: Path) -> None:
    """Remove what killed writes of this folder, or of any generation beside it, left; a set-aside folder comes back."""
    for entry in sorted(folder.parent.iterdir()):
        match = _TEMPORARY.fullmatch(entry.name) or _PREVIOUS.fullmatch(entry.name)
        if match is None:
            continue
        target = folder.with_name(match[1])
        both_generations = _GENERATION.fullmatch(target.name) and _GENERATION.fullmatch(folder.name)
        if target != folder and not both_generations:
            continue
        if stored_at(target) == entry:
            entry.rename(target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint so that it is never seen in part: it changes its name first."""
    doomed = folder.with_name(f".{folder.name}.temporary-{os.urandom(16).hex()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def refuse_overwriting(folder: Path, *, kind: str, replace: bool, written: Set[str]) -> None:
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
        raise CheckpointError(f"{folder} is not a folder: choose another place")
    found = {entry.name for entry in folder.iterdir()}
    own = {MANIFEST_NAME, record_name(kind), *tensor_names(kind, found)}
    complete = False
    try:
        manifest = read_manifest(folder)
        own |= manifest.files.keys()
        if not replace:  # what may be replaced need not be read
            check_files(folder, manifest)
            complete = True
    except OtherVersionError as error:
        if not replace:
            raise CheckpointError(f"{error}, or pass replace=True to lose it") from error
    except CheckpointError:
        pass  # damaged: free to be replaced, as long as every file in it is one that a checkpoint wrote
    if complete:
        raise CheckpointError(f"{folder} already holds a complete checkpoint: pass replace=True or name another folder")
    if foreign := sorted(found - (own | written if replace else own)):
        raise CheckpointError(
            f"{folder} holds {', '.join(foreign[:5])}, which no checkpoint wrote there: choose another folder"
        )


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")
