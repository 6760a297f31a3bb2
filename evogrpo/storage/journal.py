"""Journal of a run: an append-only JSONL file with one event per line, valid after a kill at any byte."""

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import (
    NotRegularFileError,
    errors_with_path,
    make_folder,
    open_regular_file,
    sync_folder,
)

VERSION = 4
"""Version of the format, in the first event; only this one is read."""

# Start of every line of a journal. Other files are refused, so that they are not changed.
_LINE_START = b'{"event": '


class JournalError(ValueError):
    """A journal that cannot be read or continued."""


class Journal:
    """Appends events to a JSONL file; when `append` returns, the event is on disk.

    Opening removes an incomplete last line, left by a kill during `append`. One process writes a journal at a time.

    Args:
        path: The file; it is created with its folder if it does not exist.

    Attributes:
        path: As given.
        size: Length in bytes.

    Raises:
        JournalError: If the file exists and is not a journal.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        make_folder(self.path.parent)
        created = not os.path.lexists(self.path)
        self._file = _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            with open(self._file, "rb", closefd=False) as reader:
                content = reader.read()
            if content[: len(_LINE_START)] != _LINE_START[: len(content)]:
                raise JournalError(f"{self.path} exists and is not a journal. Choose another file.")
            self.size = content.rfind(b"\n") + 1
            self._digest = hashlib.sha256(content[: self.size])
            if self.size < len(content):
                os.ftruncate(self._file, self.size)
                os.fsync(self._file)
            if created:
                sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def sha256(self) -> str:
        """Hash of the content; updated with every event, so it costs the same at any length."""
        return self._digest.hexdigest()

    def append(self, event: str, /, **fields: Any) -> None:
        """Write one event and wait until it is on disk.

        Args:
            event: The kind of event, such as "generation".
            fields: Strict JSON values; a missing number is None, never NaN. The time is added, in Unix seconds.

        Raises:
            ValueError: If a field is not strict JSON; nothing is written then.
            JournalError: If another process changed the file.
            OSError: If writing fails; the journal is unchanged.
        """
        version = {} if self.size else {"journal_version": VERSION}
        values = {"event": event, "time": time.time(), **version, **fields}
        content = (dump_json(values, what=event) + "\n").encode("ascii")
        if (actual := os.fstat(self._file).st_size) != self.size:
            raise JournalError(f"{self.path} was changed during the run: it has {actual} bytes instead of {self.size}.")
        remaining = memoryview(content)
        try:
            with errors_with_path(self.path):
                while remaining:  # the system may write only a part
                    remaining = remaining[os.write(self._file, remaining) :]
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(content)
        self._digest.update(content)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_journal(path: Path | str) -> list[dict[str, Any]]:
    """Read the valid events of a journal, oldest first; see `parse_journal`. The file may grow meanwhile.

    Raises:
        JournalError: If the file is missing or is not a journal.
    """
    return parse_journal(read_bytes(path), path)


def read_bytes(path: Path | str) -> bytes:
    """Return the content of a journal's file.

    Raises:
        JournalError: If there is none.
    """
    try:
        with open(_opened(Path(path), os.O_RDONLY), "rb") as file:
            return file.read()
    except OSError as error:
        reason = error.strerror or error
        raise JournalError(f"cannot read the journal {path}: {reason}. Give the directory of a run.") from error


def parse_journal(content: bytes, path: Path | str) -> list[dict[str, Any]]:
    """Return the valid events of a journal, oldest first.

    A resumed run continues from a checkpoint. Its `resumed` event has the length of the journal at that checkpoint.
    Events between this offset and the `resumed` event are left out, an earlier `resumed` event with its effect
    included. An incomplete last line is left out as well.

    Args:
        content: Content of the file, or any prefix of it.
        path: Path for messages.

    Raises:
        JournalError: If a line is not an event, or the journal has another version.
    """
    # 1. Read the lines. The text after the last newline is an incomplete line, or empty.
    lines: list[tuple[int, dict[str, Any] | JournalError]] = []  # with the offset of each
    offset = 0
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            event = load_json(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError('an event is an object with a text "event"')
            if number == 1 and event.get("journal_version") != VERSION:
                raise JournalError(
                    f"{path} has journal version {event.get('journal_version')!r:.80}, but this evogrpo reads version "
                    f"{VERSION}. Use the version that wrote it."
                )
            if event["event"] == "resumed":
                checkpoint = event.get("offset")
                if not isinstance(checkpoint, int) or isinstance(checkpoint, bool) or not 0 <= checkpoint <= offset:
                    raise ValueError(f"offset must be a whole number up to {offset}, got {checkpoint!r:.80}")
            lines.append((offset, event))
        except JournalError:
            raise
        except ValueError as error:
            message = f"line {number} of {path} is not an event: {error}. Restore it from a copy, or delete that line."
            lines.append((offset, JournalError(message)))  # raised below, unless a later `resumed` event removes it
        offset += len(line) + 1
    # 2. Leave out what was undone, from the last line on: a `resumed` event that was undone itself undoes nothing.
    kept, limit = [], offset
    for start, event in reversed(lines):
        if start < limit:
            kept.append(event)
            if not isinstance(event, JournalError) and event["event"] == "resumed":
                limit = event["offset"]
    # 3. Raise the first error that remains.
    events = []
    for event in reversed(kept):
        if isinstance(event, JournalError):
            raise event
        events.append(event)
    return events


def _opened(path: Path, flags: int) -> int:
    """Open the file of a journal, and return its descriptor; links and devices are refused."""
    try:
        return open_regular_file(path, flags)
    except NotRegularFileError as error:
        raise JournalError(f"{error}. Links are not followed. Put the file itself there.") from error


def latest_generations(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the generation events in order, with the plans of later events.

    The last generation of a run has no plan. If the run is extended, a `plan` event adds it.

    Args:
        events: Result of `read_journal`, which does not validate the events.
    """
    generations: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "generation":
            generations.append(dict(event))
        elif event["event"] == "plan" and generations:
            generations[-1]["plan"] = event.get("plan")
    return generations
