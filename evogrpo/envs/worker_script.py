"""Script of worker processes: answers requests until its input ends.

A message consists of its number, its length and its content. Requests arrive on standard input, and
replies go to the original standard output; printed text goes to standard error. Nothing of this
package is imported before the import path of the parent process is known.
"""

import os
import pickle  # noqa: TID251 (settings from our own parent process, never a file)
import signal
import sys
import threading
import time
from functools import partial
from typing import BinaryIO

CHECK_SECONDS = 1.0  # between checks that the parent process still runs


def write_message(stream: BinaryIO, number: int, content: bytes) -> None:
    """Write a message."""
    length = len(content)
    stream.write(number.to_bytes(8, "big") + length.to_bytes(8, "big"))
    stream.write(content)
    stream.flush()


def read_bytes(stream: BinaryIO, length: int) -> bytes:
    """Return the next bytes; raise EOFError if the stream ends before."""
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return content


def read_integer(stream: BinaryIO) -> int:
    """Return the next integer: the number or the length of a message."""
    return int.from_bytes(read_bytes(stream, 8), "big")


def main() -> None:
    """Answer requests until the parent process closes the pipe or ends."""
    # 1. Keep the pipes for messages.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    # Processes that user code forks must not reply, or keep the pipes open.
    if hasattr(os, "register_at_fork"):
        for pipe in (requests, replies):
            os.register_at_fork(after_in_child=partial(os.dup2, nothing, pipe.fileno()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    # 2. End with the parent process, even during a call.
    watch = threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True)
    watch.start()
    # 3. Read the settings; packages can then be imported as in the parent process.
    read_integer(requests)  # the number 0
    setup = pickle.loads(read_bytes(requests, read_integer(requests)))  # noqa: S301 (as above)
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    handler = pickle.loads(setup["handler"])  # noqa: S301 (as above)
    # 4. Answer requests.
    try:
        while True:
            number = read_integer(requests)
            request = read_bytes(requests, read_integer(requests))
            write_message(replies, number, handler.answer(request))
    except (EOFError, BrokenPipeError):
        pass  # the parent process has closed its pipes
    # 5. End at once: the exit of an interpreter that has imported torch may take a second.
    handler.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _end()


def _end_with_parent(parent: int) -> None:
    """End this process once its parent process has ended."""
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    _end()


def _end() -> None:
    """End this process and its child processes."""
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # this process leads its group
    os._exit(0)


if __name__ == "__main__":
    main()
