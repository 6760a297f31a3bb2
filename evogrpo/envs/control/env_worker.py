"""Script of environment processes: creates one environment and calls it until its input ends.

Messages are pickles with their length before them. Requests arrive on standard input. Replies go to
the original standard output; what the environment prints goes to standard error.
"""

import importlib
import importlib.util
import os
import pickle  # noqa: TID251 (messages between our own processes, never a file)
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

CLOSE = "close"
"""Method of the last request."""
CHECK_SECONDS = 1.0  # between checks that the parent process still runs
_LENGTH_BYTES = 8


def write_message(stream: BinaryIO, message: bytes) -> None:
    """Write a message and its length."""
    stream.write(len(message).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(message)
    stream.flush()


def read_message(stream: BinaryIO) -> bytes:
    """Return the next message; raise EOFError at the end of the stream."""
    length = int.from_bytes(_read(stream, _LENGTH_BYTES), "big")
    return _read(stream, length)


def _read(stream: BinaryIO, length: int) -> bytes:
    part = stream.read(length)
    if len(part) < length:
        raise EOFError
    return part


def main() -> None:
    """Create an environment and call it until the parent process closes it or ends."""
    # 1. Keep the pipes for messages.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    if hasattr(os, "register_at_fork"):
        pipes = (requests.fileno(), replies.fileno())
        os.register_at_fork(after_in_child=lambda: _disconnect(pipes))
    # 2. End with the parent process, even during a call.
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # 3. Read the settings; packages can then be imported as in the parent process.
    setup = pickle.loads(read_message(requests))  # noqa: S301 (as above)
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    # 4. Answer requests.
    environment = _Environment(setup)
    try:
        while True:
            number, method, value = pickle.loads(read_message(requests))  # noqa: S301 (as above)
            if method == CLOSE:
                break
            write_message(replies, _reply(environment, number, method, value))
    except (EOFError, BrokenPipeError):
        pass  # the parent process has ended
    # 5. End at once: the exit of an interpreter that has imported torch takes a second on a busy
    #    machine.
    environment.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _disconnect(pipes: tuple[int, ...]) -> None:
    """Replace the pipes of a child process that the environment forks: it must not reply, or keep them open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in pipes:
        os.dup2(nothing, pipe)
    os.close(nothing)


def _end_with_parent(parent: int) -> None:
    """Kill this process and its child processes once the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # this process leads its group
    os._exit(0)


def _reply(environment: "_Environment", number: int, method: str, value: Any) -> bytes:
    """Return the pickled reply to a request: its number, the result, and the traceback if it failed."""
    import cloudpickle

    try:
        reply = (number, environment.call(method, value), None)
        try:
            return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
        except (
            pickle.PicklingError
        ):  # a class of the user's script, which cloudpickle sends with its code
            return bytes(cloudpickle.dumps(reply))
    except (Exception, SystemExit):  # noqa: BLE001 (raised again by the parent process)
        return pickle.dumps((number, None, traceback.format_exc()))


class _Environment:
    """The environment of this process, created before its first reset.

    Args:
        setup: Settings of `evogrpo.envs.control.env_process.process_setup`.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._make: Any = None
        self._env: Any = None

    def call(self, method: str, value: Any) -> Any:
        """Reset or step the environment; see `evogrpo.envs.control.single_env.call_env`."""
        from evogrpo.envs.control.single_env import EndForkedChildren, call_env

        with EndForkedChildren():
            if self._make is None:
                self._make = _load(self._setup)
            if self._env is None or (self._setup["recreate_env"] and method == "reset"):
                self.close()
                self._env = self._make()
        return call_env(self._env, method, value)  # type: ignore[arg-type]  # "reset" or "step"

    def close(self) -> None:
        """Close the environment, if there is one."""
        env = self._env
        self._env = None
        if env is not None:
            env.close()


def _load(setup: dict[str, Any]) -> Any:
    """Return the function that creates the environment, after the user's files and registrations that it may need."""
    import gymnasium

    for name, file in setup["files"].items():
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # Python files only
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    make = pickle.loads(setup["make"])  # noqa: S301 (as above)
    # Modules register their environments when they are imported, and Gymnasium warns of a second
    # registration.
    env_id = getattr(make, "env", None)
    if isinstance(env_id, str):
        registering_module = env_id.rpartition(":")[0]
    else:
        registering_module = ""
    if registering_module:
        importlib.import_module(registering_module)
    for name, registered in setup["registered"].items():
        if name not in gymnasium.registry:
            gymnasium.registry[name] = pickle.loads(registered)  # noqa: S301 (as above)
    return make


if __name__ == "__main__":
    main()
