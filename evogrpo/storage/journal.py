"""Journal: an append-only JSONL file with one event per line, valid after a kill at any byte."""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import (
    NotRegularFileError,
    errors_with_path,
    make_folder,
    open_regular_file,
    replace_file,
    sync_folder,
)
from evogrpo.text import shown

VERSION = 4
"""Version of the format, in the first event; only this one is read."""

# Start of every line of a journal. Other files are refused, so that they are not changed.
_LINE_START = b'{"event": '


class JournalError(ValueError):
    """A journal that cannot be read or continued.

    Attributes:
        events: Events before the damaged line, if there is one.
    """

    events: Sequence[dict[str, Any]] = ()


class Journal:
    """Appends events to a JSONL file; when `append` returns, the event is on disk.

    Opening removes an incomplete last line, left by a kill during `append`. One process writes a
    journal at a time. If another program, such as an editor, replaces, removes or changes the file
    meanwhile, it is written again.

    Args:
        path: The file; it is created with its folder if it does not exist.

    Attributes:
        path: As given.
        size: Length in bytes.

    Raises:
        JournalError: If the file exists and is not a journal.
    """

    def __init__(self, path: Path | str) -> None:
        # 1. Open the file, or create it.
        self.path = Path(path)
        make_folder(self.path.parent)
        created = not os.path.lexists(self.path)
        self._file = _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            with open(self._file, "rb", closefd=False) as reader:
                content = reader.read()
            if content[: len(_LINE_START)] != _LINE_START[: len(content)]:
                raise JournalError(f"{self.path} exists and is not a journal. Choose another file.")
            # 2. Keep whole lines, and cut off an incomplete one after the last newline. The content
            #    stays in memory, so that the file can be written again.
            self.size = content.rfind(b"\n") + 1
            self._content = bytearray(content[: self.size])
            self._digest = hashlib.sha256(self._content)
            if self.size < len(content):
                os.ftruncate(self._file, self.size)
                os.fsync(self._file)
            if created:
                sync_folder(self.path.parent)
            # 3. A file with a second hard link, such as a backup: appending would change both.
            if os.fstat(self._file).st_nlink > 1:
                self._write_again()
            self._state = _state(os.fstat(self._file))
        except BaseException:
            self.close()
            raise

    def check(self) -> str | None:
        """Check that the file is as it was written, or write it again.

        Called before every event and checkpoint.

        Returns:
            A warning if another program has removed or changed the file, else None.

        Raises:
            JournalError: If another process appended to the file.
            OSError: If the file cannot be written again.
        """
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            found = None
        if found is not None and _state(found) == self._state:
            return None
        # 1. The same file, with more bytes than this process has written: another process appends.
        opened = os.fstat(self._file)
        if found is not None and os.path.samestat(found, opened) and opened.st_size > self.size:
            raise JournalError(
                f"{self.path} was changed during the run: it has {opened.st_size} bytes instead of"
                f" {self.size}. Stop the other process that writes into it, and resume the run."
            )
        # 2. Keep content that is not the beginning of this journal, then write the file again.
        content = b""
        kept = ""
        if found is not None:
            try:
                content = read_bytes(self.path)
            except JournalError:  # a link, pipe or folder
                kept = f" It is kept as {set_aside(self.path).name}."
        same_file = found is not None and os.path.samestat(found, opened) and found.st_nlink == 1
        if found is not None and same_file and content == self._content:
            self._state = _state(found)  # only its times have changed
            return None
        # A beginning of this journal, such as an empty or cut file, holds nothing to keep.
        if not self._content.startswith(content):
            kept = f" The changed file is kept as {set_aside(self.path).name}."
        self._write_again()
        # Another file with equal content, as after a copy: nothing to warn about.
        if content == self._content:
            return None
        return f"{self.path} was removed or changed by another program, and is written again.{kept}"

    def _write_again(self) -> None:
        """Replace the file by a new one with the same events."""
        replace_file(self.path, bytes(self._content))
        os.close(self._file)
        self._file = -1  # closed, also if opening fails
        self._file = _opened(self.path, os.O_RDWR | os.O_APPEND)
        self._state = _state(os.fstat(self._file))

    @property
    def sha256(self) -> str:
        """Hash of the content; updated with every event, so it costs the same at any length."""
        return self._digest.hexdigest()

    def append(self, event: str, /, **fields: Any) -> None:
        """Write one event and wait until it is on disk.

        Args:
            event: The kind of event, such as "generation".
            fields: Strict JSON values; a missing number is None, never NaN. The time is added, in
                Unix seconds.

        Raises:
            ValueError: If a field is not strict JSON; nothing is written then.
            JournalError: If another process appended to the file.
            OSError: If writing fails; the journal is unchanged.
        """
        values: dict[str, Any] = {"event": event, "time": time.time()}
        if self.size == 0:
            values["journal_version"] = VERSION
        values |= fields
        content = (dump_json(values, what=event) + "\n").encode("ascii")
        self.check()
        remaining = memoryview(content)
        try:
            with errors_with_path(self.path):
                while remaining:  # the system may write only a part
                    remaining = remaining[os.write(self._file, remaining) :]
                os.fsync(self._file)
        except OSError:
            # A full disk may have taken a part of the line.
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(content)
        self._content += content
        self._digest.update(content)
        self._state = _state(os.fstat(self._file))

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _state(found: os.stat_result) -> tuple[int, ...]:
    """Return values of a file that differ after it was replaced or written to."""
    return found.st_dev, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns


def set_aside(path: Path) -> Path:
    """Rename a changed or damaged file, so that nothing of it is lost; return its new path."""
    number = 1
    target = path.with_name(f"{path.stem}-kept-{number}{path.suffix}")
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.stem}-kept-{number}{path.suffix}")
    path.rename(target)
    return target


def read_journal(path: Path | str) -> list[dict[str, Any]]:
    """Read the valid events of a journal, oldest first; see `parse_journal`.

    The file may grow meanwhile.

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
        advice = " Give the directory of a run." if isinstance(error, FileNotFoundError) else ""
        raise JournalError(
            f"cannot read the journal {path}: {error.strerror or error}.{advice}"
        ) from error


def parse_journal(content: bytes, path: Path | str) -> list[dict[str, Any]]:
    """Return the valid events of a journal, oldest first.

    A resumed run continues from a checkpoint. Its `resumed` event has the length of the journal at
    that checkpoint. Events between this offset and the `resumed` event are left out, an earlier
    `resumed` event with its effect included. An incomplete last line is left out as well.

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
                    f"{path} has journal version {shown(event.get('journal_version'))}, but this"
                    f" evogrpo reads version {VERSION}. Use the version that wrote it."
                )
            if event["event"] == "resumed":
                checkpoint = event.get("offset")
                if (
                    not isinstance(checkpoint, int)
                    or isinstance(checkpoint, bool)
                    or not 0 <= checkpoint <= offset
                ):
                    raise ValueError(
                        f"offset must be a whole number up to {offset}, got {shown(checkpoint)}"
                    )
            lines.append((offset, event))
        except JournalError:
            raise
        except ValueError as error:
            message = (
                f"line {number} of {path} is not an event: {error}. Restore it from a copy, or"
                " resume the run with `evogrpo resume`: if the line is after the newest"
                " checkpoint, it is not needed."
            )
            # It is raised below, unless a later `resumed` event removes it.
            lines.append((offset, JournalError(message)))
        offset += len(line) + 1
    # 2. Leave out what was undone, from the last line on: a `resumed` event that was undone itself
    #    undoes nothing.
    kept = []
    limit = offset
    for start, event in reversed(lines):
        if start < limit:
            kept.append(event)
            if not isinstance(event, JournalError) and event["event"] == "resumed":
                limit = event["offset"]
    # 3. Raise the first error that remains.
    events: list[dict[str, Any]] = []
    for event in reversed(kept):
        if isinstance(event, JournalError):
            event.events = events
            raise event
        events.append(event)
    return events


def all_events(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal in order, those that resuming has undone included.

    Lines that are no events are left out.
    """
    for line in content.split(b"\n")[:-1]:
        with suppress(ValueError):
            event = load_json(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event


def _opened(path: Path, flags: int) -> int:
    """Open the file of a journal, and return its descriptor; links and devices are refused."""
    try:
        return open_regular_file(path, flags)
    except NotRegularFileError as error:
        raise JournalError(str(error)) from error


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
