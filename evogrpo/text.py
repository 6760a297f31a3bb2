"""Formatting for messages and tables: numbers, records, and untrusted text made printable."""

import contextlib
import io
import itertools
import json
import os
import re
import reprlib
import sys
import sysconfig
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO

# Control and format characters (which hide or reorder text), lone surrogates, private use, line
# separators.
_UNSAFE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_MISSING = "–"
_MAX_REPR = 60  # characters of a value in a `short_repr`
_MAX_PATH = 4000  # bytes; Linux allows 4,096
_MAX_JSON = 4000  # characters
MAX_SHOWN = 80
"""Maximum number of characters of a value in a message."""

USER_MODULE_PREFIX = "evogrpo_user_"
"""Prefix of the names of modules that are loaded from a user's file."""


def relative_path(path: Path) -> str:
    """Return a path relative to the working directory if it lies inside, otherwise unchanged."""
    # The working directory may have been removed.
    with contextlib.suppress(FileNotFoundError):
        if path.is_absolute() and path.is_relative_to(Path.cwd()):
            return os.path.relpath(path)
    return str(path)


def expand_user(path: str | os.PathLike[str], what: str = "path") -> Path:
    """Return a path with a leading `~` or `~user` replaced by the home directory.

    Args:
        path: Path of a file or folder.
        what: Name of the argument, for the message.

    Raises:
        ValueError: If it cannot be a path, or there is no such user.
    """
    try:
        # An object of a user's class may raise anything here. All faults have one message.
        text = os.fspath(path)
        if len(os.fsencode(text)) > _MAX_PATH or "\0" in text:
            raise ValueError
        found = Path(text)
    except Exception:  # noqa: BLE001 - raised by an object of a user
        raise ValueError(
            f"{what} must be the path of a file or folder, got {shown(path)}."
        ) from None
    try:
        return found.expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"The home directory in {shown(text)} is unknown. Write the whole path."
        ) from error


def printable(text: str) -> str:
    r"""Return text with control and invisible characters escaped, as in `\x1b` or `\u202e`.

    Newlines and tabs stay.
    """
    return "".join(
        (
            character
            if character in "\n\t" or unicodedata.category(character) not in _UNSAFE_CATEGORIES
            else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        )
        for character in text
    )


class EscapingStream(io.TextIOBase):
    """A text stream that escapes control characters before it writes to another stream.

    Args:
        target: A terminal, a file, or a live display.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    def write(self, text: str) -> int:
        """Write escaped text."""
        # A carriage return alone would let text overwrite its line.
        escaped = printable(text.replace("\r\n", "\n").replace("\r", "\n"))
        try:
            self._target.write(escaped)
        except UnicodeEncodeError:
            # For example a terminal in ASCII.
            self._target.write(escaped.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """Flush the target."""
        self._target.flush()

    def fileno(self) -> int:
        """Return the target's file descriptor, for child processes."""
        return self._target.fileno()


@contextlib.contextmanager
def escaped_prints() -> Iterator[None]:
    """Escape control characters in text that user code prints."""
    with contextlib.ExitStack() as stack:
        for stream, redirect in (
            (sys.stdout, contextlib.redirect_stdout),
            (sys.stderr, contextlib.redirect_stderr),
        ):
            # Programs without a console have no streams.
            if stream is not None and not isinstance(stream, EscapingStream):
                stack.enter_context(redirect(EscapingStream(stream)))
        yield


def shorten(text: str, limit: int) -> str:
    """Cut text to `limit` characters and append the number of characters left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit} more characters)"


class _ShortRepr(reprlib.Repr):
    """Repr of the beginning of nested and long collections, long text and large integers."""

    def __init__(self) -> None:
        super().__init__()
        # Enough to recognise a value, and bounded for any value.
        self.maxlevel = 4
        for kind in ("tuple", "list", "set", "frozenset", "deque", "dict", "array"):
            setattr(self, f"max{kind}", 16)

    def repr_str(self, x: str, level: int) -> str:
        return self._beginning(x)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return self._beginning(x)

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of thousands of digits.
        if x.bit_length() < 2000:
            return repr(x)
        return f"<integer of {x.bit_length():,} bits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # In the order of the dict; that of reprlib is sorted.
        if x and level <= 0:
            return "{...}"
        parts = []
        for key, value in itertools.islice(x.items(), self.maxdict):
            key_text = self.repr1(key, level - 1)
            parts.append(f"{key_text}: {self.repr1(value, level - 1)}")
        if len(x) > self.maxdict:
            parts.append("...")
        return f"{{{', '.join(parts)}}}"

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            return repr(x)
        except Exception:  # noqa: BLE001 - raised by user code
            return f"<{class_name(x)} object>"

    @staticmethod
    def _beginning(value: str | bytes) -> str:
        """Return the repr of a text; of a long one, of its beginning."""
        limit = 4 * MAX_SHOWN
        if len(value) <= limit:
            return repr(value)
        return f"{value[:limit]!r}…"


_short_repr = _ShortRepr()


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """Return the beginning of the repr of a user's value as one line with escapes, for messages.

    A value that cannot be shown becomes `<MyClass object>`.

    Args:
        value: Any object.
        limit: Maximum number of characters of the repr.
    """
    try:
        # Of a long text, only the beginning is formatted, and its length is added.
        if type(value) is str and len(value) > limit:
            beginning = _single_line(repr(value[:limit]), limit + 2)
            return f"{beginning}… ({len(value) - limit:,} more characters)"
        return _single_line(_short_repr.repr(value), limit)
    except Exception:  # noqa: BLE001 - raised by user code
        return f"<{class_name(value)} object>"


def one_line(text: object, limit: int = 300) -> str:
    """Return text, or the message of an error, as one short line, for messages.

    Args:
        text: Text or an error.
        limit: Maximum number of characters.
    """
    return _single_line(text_of(text), limit)


def text_of(value: object) -> str:
    """Return an object as text; `<MyClass object>` if it cannot be shown."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - raised by user code
        return f"<{class_name(value)} object>"


def class_name(value: object) -> str:
    """Return the name of the class of an object, for messages."""
    try:
        return _single_line(type(value).__name__, MAX_SHOWN)
    except Exception:  # noqa: BLE001 - raised by a metaclass of a user
        return "object"


def _single_line(text: str, limit: int) -> str:
    """Cut text to `limit` characters, with spaces for line breaks and escapes."""
    # Escaping a long text takes long; four times the limit is enough.
    beginning = text[: 4 * limit]
    line = printable(re.sub(r"\s*[\n\t]\s*", " ", beginning))
    if len(line) <= limit and len(beginning) == len(text):
        return line
    return f"{line[: limit - 1]}…"


def number_text(value: float | str | None) -> str:
    """Format a float with three significant digits and an integer in full.

    A float close to 1 has six, so that a discount of 0.9995 is not shown as 1. Text stays, None
    becomes a dash.
    """
    if value is None:
        return _MISSING
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int):
        return str(value)
    text = f"{value:.3g}"
    if text == "1":
        return f"{value:.6g}"
    return text


def distinct_number_texts(numbers: Sequence[float]) -> list[str]:
    """Format different numbers with three significant digits, or in full if two texts are equal."""
    texts = [number_text(number) for number in numbers]
    if len(set(texts)) < len(texts):
        texts = [repr(number) for number in numbers]
    return texts


def count_text(count: float | None) -> str:
    """Format a count with thousands separators; None becomes a dash."""
    return _MISSING if count is None else f"{count:,.0f}"


def value_text(value: object) -> str:
    """Format a value of a configuration as one line of text, without braces or brackets.

    A range becomes `0.001 to 0.03 (log)`, a mapping `size 2, elitism yes`. Text that is JSON of a
    list or a mapping is formatted as that.
    """
    if isinstance(value, str):
        return _json_value_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float | None):
        return number_text(value)
    if isinstance(value, list | tuple):
        texts = []
        for each in value:
            # Quotation marks separate texts of several words.
            is_phrase = isinstance(each, str) and (" " in each or not each)
            texts.append(f'"{each}"' if is_phrase else value_text(each))
        return ", ".join(texts) or "none"
    if not isinstance(value, Mapping):
        return str(value)
    given = {name: each for name, each in value.items() if each is not None}
    parts = []
    if given.keys() >= {"min", "max"}:
        low = given.pop("min")
        high = given.pop("max")
        parts.append(f"{value_text(low)} to {value_text(high)}")
        if given.pop("scale", "linear") == "log":
            parts[0] += " (log)"
    parts += [f"{name} {value_text(each)}" for name, each in given.items()]
    return ", ".join(parts) or "none"


def _json_value_text(text: str) -> str:
    """Return text as it is, but JSON of a list or a mapping, True and False as values."""
    if text in ("True", "False"):
        return value_text(text == "True")
    if not text.startswith(("{", "[")) or len(text) > _MAX_JSON:
        return text
    try:
        return value_text(json.loads(text))
    except (ValueError, RecursionError):
        return text


def changes_text(changes: Mapping[str, tuple[float | str | None, float | str | None]]) -> str:
    """Format changed hyperparameters, such as `lr 0.0001 → 0.0002, group_size 8 → 4`."""
    parts = []
    for name, (old, new) in changes.items():
        parts.append(f"{name} {number_text(old)} → {number_text(new)}")
    return ", ".join(parts)


def origin_text(
    parent: int | None, changes: Mapping[str, tuple[float | str | None, float | str | None]]
) -> str:
    """Describe the origin of a member, such as `founder` or `clone of #3 with lr 1 → 2`."""
    if parent is None:
        return "founder"
    if not changes:
        return f"clone of #{parent}, unchanged"
    return f"clone of #{parent} with {changes_text(changes)}"


def pluralize(number: int, noun: str, plural: str = "s") -> str:
    """Format a count with its noun, such as `1 group` or `3 groups`."""
    return f"{count_text(number)} {noun}{'' if number == 1 else plural}"


def score_text(mean: float | None, standard_error: float | None) -> str:
    """Format a fitness and its standard error, such as `0.412 ± 0.031` or `2.3e-05 ± 1e-06`."""
    if mean is None:
        return _MISSING
    # About three significant digits.
    digits = 1
    if abs(mean) < 10:
        digits = 3
    elif abs(mean) < 100:
        digits = 2
    # Both numbers have the same form.
    size = max(abs(mean), standard_error or 0.0)
    form = ".3g"
    if size == 0 or 1e-3 <= size < 1e6:
        form = f".{digits}f"
    if standard_error is None:
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {standard_error:{form}}"


def duration_text(seconds: float | None) -> str:
    """Format a duration in its two largest units, such as `1 h 05 min`."""
    if seconds is None:
        return _MISSING
    # Rounded first, so that 59.7 s are 1 min 00 s.
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s"


def user_line(error: BaseException) -> str:
    """Return the file and line of user code that raised an error, such as ` (rewards.py, line 7)`.

    Empty if unknown.
    """
    # User code lies outside this package, the standard library and installed packages.
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    folders = tuple(f"{each}{os.sep}" for each in (Path(__file__).parent, *installed))
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "importlib" not in frame.filename and not frame.filename.startswith(folders):
            line = f" ({frame.filename}, line {frame.lineno})"
    return line


def short_repr(record: Any) -> str:
    """Return a dataclass on one line, with arrays as dtype and shape and long values shortened.

    Used as `__repr__`.
    """
    parts = []
    for field in fields(record):
        value = getattr(record, field.name)
        if field.repr and value is not None:
            parts.append(f"{field.name}={_short_value(value)}")
    return f"{type(record).__name__}({', '.join(parts)})"


def _short_value(value: Any) -> str:
    """Return a value for `short_repr`, such as dtype and shape of an array."""
    # Arrays of numpy and tensors of torch.
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"
    if is_dataclass(value):
        return f"{type(value).__name__}(…)"
    if isinstance(value, str):
        if len(value) > _MAX_REPR:
            value = f"{value[: _MAX_REPR - 1]}…"
        return repr(value)
    if isinstance(value, Mapping):
        parts = [f"{key}: {_short_value(each)}" for key, each in value.items()]
        inner = f"{{{', '.join(parts)}}}"
    elif isinstance(value, Sequence):
        inner = f"({', '.join(map(_short_value, value[:_MAX_REPR]))})"
    else:
        return repr(value)
    return inner if len(inner) <= _MAX_REPR else f"<{len(value)} entries>"


def reference_to(thing: Callable[..., Any]) -> str:
    """Return the reference of a user's function or class: `path.py:name` or `module:name`."""
    module = thing.__module__
    # A module that was loaded from a file is named by its path.
    source: str | None = module
    if module.startswith(USER_MODULE_PREFIX):
        source = sys.modules[module].__file__
    return f"{source}:{thing.__qualname__}"
