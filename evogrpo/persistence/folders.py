"""Whether a folder can take what is going to be written, asked before anything expensive."""

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

LEAST_ROOM = 1 << 26
"""Bytes that must be free: less than a journal, a report and the checkpoints of the smallest run."""


def check_new_folder(folder: Path, what: str, *, room: int = LEAST_ROOM, left_over: Collection[str] = ()) -> None:
    """Refuse a folder that is no place for new files; nothing is left in it, and it is not made.

    Args:
        folder: It may exist, if nothing is in it but hidden files, and so may the folders it is in.
        what: It is, for messages.
        room: Bytes that must be free there.
        left_over: Names in it that do not count.

    Raises:
        ValueError: If it is not a folder, holds files, cannot be written into, or has no room.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise ValueError(f"{existing} is no folder{_for(folder, existing, what)}: choose another {what}")
    try:
        if existing == folder:
            found = sorted(path.name for path in folder.iterdir() if not (_hidden(path) or path.name in left_over))
            if found:
                raise ValueError(
                    f"a new {what} must be empty, but {folder} holds {', '.join(found[:3])}"
                    f"{' and more' if len(found) > 3 else ''}: empty it, or choose another"
                )
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
            file.flush()
            free = shutil.disk_usage(existing).free
    except OSError as error:
        raise ValueError(
            f"{existing} cannot be written into{_for(folder, existing, what)} ({error.strerror or error}): choose "
            f"another {what}"
        ) from error
    if free < room:
        raise ValueError(
            f"a {what} needs at least {room / 1e6:.0f} MB to begin with, but where {folder} is only "
            f"{free / 1e6:.0f} MB are free: make room, or choose another"
        )


def left_by_kill(folder: Path) -> bool:
    """Whether a folder holds nothing but hidden files: of writing that was broken off before anything was complete."""
    return folder.is_dir() and all(map(_hidden, folder.iterdir()))


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _for(folder: Path, existing: Path, what: str) -> str:
    return "" if existing == folder else f", and the {what} {folder} would be in it"
