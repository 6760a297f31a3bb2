"""Lock of a run directory for one writer; released by the system when the process ends."""

import errno
import json
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

from evogrpo.storage.atomic_files import NotRegularFileError, open_regular_file
from evogrpo.warnings import warn

try:
    import fcntl
except ImportError:  # Windows: no locking
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_BUSY = (errno.EACCES, errno.EAGAIN)
_held: "weakref.WeakValueDictionary[tuple[int, int], DirectoryLock]" = weakref.WeakValueDictionary()


class LockLostError(OSError):
    """The locked folder was removed or replaced, or the lock belongs to another process."""


class DirectoryLock:
    """Exclusive lock on a folder, held until released or garbage-collected, or the process ends.

    A second lock in the same process replaces the first, which is then `lost`. A run can therefore
    be resumed in the process that started it.

    Args:
        folder: An existing folder; a file `.lock` is created in it and stays.

    Attributes:
        folder: The absolute path of the folder.
        lost: True if the lock was released or replaced.

    Raises:
        ValueError: If another process holds the lock.
        OSError: If the folder cannot be written into.
    """

    def __init__(self, folder: Path) -> None:
        # 1. Lock the file, unless this process has it locked already.
        folder = folder.absolute()  # the program may change its working directory
        self.folder = folder
        self.lost = False
        path = folder / LOCK
        earlier = _held_by_this_process(path)
        if earlier is None:
            self._descriptor = _lock_file(path, folder)
        else:
            # Reuse its descriptor: closing any descriptor of the file would release the lock.
            self._descriptor = earlier._give_up_descriptor()
        # 2. Release it with this object. At exit the system does, after the last write.
        self._pid = os.getpid()
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False
        _held[_identity(os.fstat(self._descriptor))] = self
        # 3. Write the owner into the file, for error messages only.
        owner = {"pid": self._pid, "host": socket.gethostname()}
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)  # Windows has no pwrite
            os.write(self._descriptor, json.dumps(owner).encode())

    def check(self) -> None:
        """Check that this process still holds the lock of this folder, or lock it again.

        Called before every write.

        Raises:
            ValueError: If the lock was released or replaced.
            LockLostError: If the folder or its lock was removed, renamed or replaced, this process
                is a fork, or another process has the lock.
        """
        # 1. This object has the lock, and this process is the one that took it.
        if self.lost:
            raise ValueError(
                f"This run no longer writes into {self.folder}: it was opened again. Use the newer"
                " run."
            )
        if self._pid != os.getpid():
            raise LockLostError(
                f"{self.folder} is locked by process {self._pid}. Its fork {os.getpid()} must not"
                " write."
            )
        # 2. The path still leads to the file that is locked.
        try:
            found = _identity((self.folder / LOCK).lstat())
        except OSError:
            found = None
        if found != _identity(os.fstat(self._descriptor)):
            raise LockLostError(
                f"{self.folder} or its {LOCK} was moved, removed or replaced, so nothing more is"
                " written. Put the folder back, or resume from its new place."
            )
        # 3. Lock it again: POSIX releases the lock once this process closes any descriptor of the
        #    file, as after copying the folder.
        if fcntl is None:
            return
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:  # other errors: a file system without locks, see `_lock_file`
                raise LockLostError(
                    f"{self.folder} is in use by {_holder(self._descriptor)}, so nothing more is"
                    " written. Stop that process, and resume the run."
                ) from None

    def release(self) -> None:
        """Release the lock."""
        if not self.lost:
            self.lost = True
            self._close()

    def _give_up_descriptor(self) -> int:
        """Return the descriptor, which another lock of this process takes over."""
        self.lost = True
        self._close.detach()
        return self._descriptor


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _held_by_this_process(path: Path) -> DirectoryLock | None:
    """Return the lock of this process on the file, or None."""
    try:
        lock = _held.get(_identity(path.lstat()))
    except FileNotFoundError:
        return None
    # A forked process has its parent's lock objects in memory, but not the locks.
    if lock is None or lock.lost or lock._pid != os.getpid():
        return None
    return lock


def _lock_file(path: Path, folder: Path) -> int:
    """Open and lock a file, and return its descriptor.

    Raise ValueError if another process has locked it.
    """
    # 1. Open the file.
    descriptor = open_regular_file(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:  # writing the owner would overwrite the other file
        os.close(descriptor)
        raise NotRegularFileError(
            f"{path} is a hard link: another file has the same content. Remove {path}, and keep the"
            " other file."
        )
    if fcntl is None:
        return descriptor
    # 2. Lock it.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock counts only if the path still leads to the file that was opened.
        if _identity(os.fstat(descriptor)) == _identity(path.lstat()):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in _BUSY:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ValueError(
                f"{folder} is in use by {holder}. Wait until it ends, stop it, or choose another"
                " run directory."
            ) from None
        warn(
            f"Files cannot be locked on this file system ({error.strerror}). Make sure that only"
            f" one process writes into {folder}.",
            rank_zero_only=False,
        )
        return descriptor
    # 3. The folder was removed or replaced after the file was opened: lock the file that is there
    #    now.
    os.close(descriptor)
    folder.mkdir(parents=True, exist_ok=True)
    return _lock_file(path, folder)


def _holder(descriptor: int) -> str:
    """Describe the holder of a lock; the content of the file is untrusted."""
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(owner['pid'])} on {str(owner['host'])[:100]!a}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
