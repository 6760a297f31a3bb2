"""Atomic writes: files and folders are written completely or not at all."""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.temporary")


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk.

    Does nothing on Windows, which orders such changes itself, and on file systems that cannot sync
    a folder.
    """
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and missing parents, and sync them to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # The name of a new folder is an entry of its parent.
    for path in reversed(missing):
        sync_folder(path.parent)


@contextmanager
def errors_with_path(path: Path) -> Iterator[None]:
    """Add the path to system errors that name no file, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_synced(path: Path, content: bytes) -> None:
    """Create a new file and sync it to disk."""
    with errors_with_path(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old or the new bytes, also after a kill."""
    # After a kill, `remove_temporary_files` removes it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.temporary")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same process id
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files of killed writes; no other process may write into the folder."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if _TEMPORARY.fullmatch(entry.name) and not entry.is_dir():
            entry.unlink(missing_ok=True)


def refuse_links(*paths: Path) -> None:
    """Raise an error if one of these paths is a link, because writing would change files elsewhere.

    Raises:
        NotRegularFileError: With the path.
    """
    for path in paths:
        if path.is_symlink():
            raise NotRegularFileError(
                f"{path} is a link, and a run does not write through links in its directory. Put"
                f" the folder itself there: {path.resolve()}"
            )


class NotRegularFileError(OSError):
    """The path is a link, pipe, device or folder instead of a regular file."""


def _not_regular(path: Path) -> NotRegularFileError:
    """Return the error for a path that is not a regular file."""
    return NotRegularFileError(
        f"{path} must be a regular file, not a link, folder, pipe or device. Put the file itself"
        " there."
    )


def open_regular_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; links, pipes, devices and folders are refused.

    Raises:
        NotRegularFileError: If it is not a regular file.
        OSError: If it cannot be opened.
    """
    # Check before opening: opening a pipe or device can already have effects.
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise _not_regular(path)
    # Check again after opening: the file may have been replaced in between.
    safe_flags = (
        getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    descriptor = os.open(path, flags | safe_flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


MIN_FREE_BYTES = 1 << 26
"""Free disk space that a new run needs, in bytes."""


def check_new_folder(folder: Path, *, allowed: Collection[str] = ()) -> None:
    """Check that a new run can be written into a folder, without creating it.

    Args:
        folder: Folder that does not exist or has only hidden files.
        allowed: Names of files that it may have besides.

    Raises:
        ValueError: If it is not a folder, holds other files, cannot be written into, or its disk is
            full.
    """
    # 1. Find the folder itself, or its nearest parent that exists.
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ValueError(f"{existing} is not a folder. Choose another run directory than {folder}.")
    try:
        # 2. An existing folder must be empty.
        if existing == folder:
            names = sorted(
                path.name
                for path in folder.iterdir()
                if not path.name.startswith(".") and path.name not in allowed
            )
            if names:
                raise ValueError(
                    f"{folder} must be empty for a new run, but holds {', '.join(names[:3])}."
                )
        # 3. A written byte shows that the folder is writable and its disk not full.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
            file.flush()
            free = shutil.disk_usage(existing).free
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{existing} cannot be written into ({reason}). Choose another run directory."
        ) from error
    if free < MIN_FREE_BYTES:
        raise ValueError(
            f"A run needs {MIN_FREE_BYTES / 1e6:.0f} MB, but {folder} has {free / 1e6:.0f} MB free."
        )
