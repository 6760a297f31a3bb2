"""The journal of a run: an append-only JSONL file, one event a line, that survives a kill at any byte."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.storage.atomic_files import (
    NotRegularFileError,
    errors_with_path,
    make_folder,
    open_regular_file,
    sync_folder,
)

# Every line that Journal writes begins so; opening refuses to touch a file that begins otherwise.
_LINE_START = b'{"event": '


class JournalError(ValueError):
    """A journal that cannot be read or continued; the message names the line and the remedy."""


class Journal:
    """Appends events to a JSONL file; when `append` returns, the event is on disk.

    Opening a file whose last line was cut off by a kill removes that fragment, which was never reported as written,
    so the next event starts on a fresh line. One process writes a journal at a time.

    Args:
        path: The file; it and its folder are created when missing.

    Raises:
        JournalError: If the file exists and is not a journal.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        make_folder(self.path.parent)
        created = not os.path.lexists(self.path)
        self._file = _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            _repair_tail(self._file, self.path)
            if created:
                sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, event: str, /, **fields: Any) -> dict[str, Any]:
        """Write one event and wait until it is on disk.

        Args:
            event: The kind of event, such as "generation".
            fields: Strict JSON values; a missing number is None, never NaN.

        Returns:
            The event as a reader will see it, with its time in unix seconds.

        Raises:
            ValueError: If a field is not strict JSON, is called "event" or "time", or the journal is closed; nothing
                is written then.
            OSError: If the disk refuses the write; the journal is left as it was before this event.
        """
        if self._file < 0:
            raise ValueError(f"the journal {self.path} is closed: open a new Journal to go on")
        if reserved := {"event", "time"} & fields.keys():
            raise ValueError(f"the field {reserved.pop()!r} is set by the journal itself: choose another name")
        line = dump_json({"event": event, "time": time.time(), **fields}, what=event) + "\n"
        remaining = memoryview(line.encode("ascii"))
        size_before = os.fstat(self._file).st_size
        try:
            with errors_with_path(self.path):
                while remaining:
                    remaining = remaining[os.write(self._file, remaining) :]
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size_before)
            raise
        written: dict[str, Any] = load_json(line)
        return written

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        """Return the journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def read_journal(path: Path | str) -> list[dict[str, Any]]:
    """Read every event of a journal, oldest first.

    A last line without its newline was cut off by a kill: it counts if it is whole and is left out otherwise.

    Args:
        path: The journal file.

    Returns:
        One dictionary per event, as it was appended.

    Raises:
        JournalError: If the file is missing, or any other line is not an event.
    """
    path = Path(path)
    try:
        with open(_opened(path, os.O_RDONLY), "rb") as file:
            content = file.read()
    except OSError as error:
        reason = error.strerror or error
        raise JournalError(f"cannot read the journal {path} ({reason}): name the folder of a run") from error
    *lines, tail = content.split(b"\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(_event(line))
        except ValueError as error:
            raise JournalError(
                f"line {number} of {path} is not an event ({error}): restore it from a copy or delete that line"
            ) from error
    try:
        return [*events, _event(tail)]
    except ValueError:
        return events


def _opened(path: Path, flags: int) -> int:
    try:
        return open_regular_file(path, flags)
    except NotRegularFileError as error:
        raise JournalError(f"{error}, and links are not followed: put the journal itself there") from error


def latest_generations(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the generation events that count, in order of generation.

    A resumed run may write a generation twice: the later line wins. Generations after the one that a run resumed from
    belong to a future that was given up, so they are left out until they are written again. Where finalists were
    evaluated after a generation, it names their winner as the run's best.

    Args:
        events: A journal's events, oldest first.

    Returns:
        One generation event per generation.

    Raises:
        JournalError: If a generation or resumed event has no whole number "generation".
    """
    latest: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "finalists" and latest:
            latest[max(latest)]["best_ever"] = [event.get("index"), event.get("generation")]
        if event["event"] not in ("generation", "resumed"):
            continue
        number = event.get("generation")
        if not isinstance(number, int) or isinstance(number, bool):
            raise JournalError(f'a {event["event"]} event needs a whole number "generation", got {number!r}')
        if event["event"] == "generation":
            latest[number] = dict(event)
        else:
            latest = {earlier: kept for earlier, kept in latest.items() if earlier <= number}
    return [latest[number] for number in sorted(latest)]


def _event(line: bytes) -> dict[str, Any]:
    """Read one line, or raise ValueError."""
    event = load_json(line)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError('an event is an object with a text "event"')
    return event


def _repair_tail(file: int, path: Path) -> None:
    """End the file with a newline: terminate a complete last line, remove an incomplete one."""
    with open(file, "rb", closefd=False) as reader:
        content = reader.read()
    if not content:
        return
    if not content[: len(_LINE_START)] == _LINE_START[: len(content)]:
        raise JournalError(f"{path} exists and is not a journal: choose another file")
    tail = content.rpartition(b"\n")[2]
    if not tail:
        return
    try:
        _event(tail)
    except ValueError:
        os.ftruncate(file, len(content) - len(tail))
    else:
        os.write(file, b"\n")
    os.fsync(file)
