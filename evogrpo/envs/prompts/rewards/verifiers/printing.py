"""What the user's functions print: it may hold parts of a completion, and those never steer a terminal."""

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import IO, TextIO

LONGEST_LINE = 2**16  # characters that wait for their end


def visible(text: str) -> str:
    r"""Return a text in which what a terminal would act on is spelled out, such as `\x1b`; lines stay lines."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text.replace("\r\n", "\n").replace("\r", "\n")
    )


class VisibleText(io.TextIOBase):
    """A text stream that passes on what can be seen, and spells out the rest.

    Args:
        target: Where it goes: a terminal, a file, or a display that makes room for it.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the target."""
        return getattr(self._target, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        """Say yes."""
        return True

    def write(self, text: str) -> int:
        """Pass a text on."""
        shown = visible(text)
        try:
            self._target.write(shown)
        except UnicodeEncodeError:
            self._target.write(shown.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """Pass it on."""
        self._target.flush()

    def fileno(self) -> int:
        """Return the target's, for child processes."""
        return self._target.fileno()


@contextlib.contextmanager
def visible_prints() -> Iterator[None]:
    """Let whatever is printed inside a `with` be seen and do nothing else."""
    with contextlib.ExitStack() as stack:
        # A program without a console has no streams.
        if sys.stdout is not None and not isinstance(sys.stdout, VisibleText):
            stack.enter_context(contextlib.redirect_stdout(VisibleText(sys.stdout)))
        if sys.stderr is not None and not isinstance(sys.stderr, VisibleText):
            stack.enter_context(contextlib.redirect_stderr(VisibleText(sys.stderr)))
        yield


def pass_on(pipe: IO[bytes]) -> None:
    """Pass what another process prints on to this one's standard error until it ends, line by line."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    with contextlib.suppress(OSError, ValueError), pipe:
        while new := pipe.read(65536):
            whole, newline, rest = (rest + decoder.decode(new)).rpartition("\n")
            _show(whole + newline)
            if len(rest) > LONGEST_LINE:
                _show(rest)
                rest = ""
    _show(rest)


def _show(text: str) -> None:
    if text and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            VisibleText(sys.stderr).write(text)
            sys.stderr.flush()
