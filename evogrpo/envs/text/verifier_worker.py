"""Script of verifier workers: loads reward functions and processes requests until its input ends.

Requests are pickles on standard input, from the parent process. Replies are lines of JSON on the
original standard output, so that completions cannot make the parent process execute code. A reply
has the number of its request. A process that a reward function forks off this one cannot use the
pipes, and ends when it leaves the function.
"""

import asyncio
import importlib.util
import json
import os
import pickle  # noqa: TID251 (requests of our own parent process, never a file)
import signal
import sys
import threading
from functools import partial
from numbers import Real
from queue import SimpleQueue
from typing import Any, BinaryIO

from evogrpo.text import class_name, one_line, shown, text_of


def main() -> None:
    """Process requests until the parent process ends."""
    # 1. Keep the pipes for messages; printed text goes to standard error.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if hasattr(os, "register_at_fork"):
        for pipe in (requests, replies):
            os.register_at_fork(after_in_child=partial(os.dup2, nothing, pipe.fileno()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    inbox: SimpleQueue[tuple[int, bytes]] = SimpleQueue()

    def send(number: int, text: str) -> None:
        print(f"[{number}, {text}]", file=replies, flush=True)

    threading.Thread(target=_listen, args=(requests, inbox), daemon=True).start()
    # 2. Load the reward functions.
    number, request = inbox.get()
    setup = pickle.loads(request)  # noqa: S301 (as above)
    sys.path[:] = setup["path"]
    from evogrpo.envs.text.reward_functions import CallFailedError, call_async, call_sync, is_async
    from evogrpo.text import user_line

    try:
        functions = _load(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user modules may raise anything)
        failure = CallFailedError(f"{class_name(error)}: {one_line(error)}{user_line(error)}")
        send(number, encoded(failure))
        return
    send(number, "[]")
    # 3. Process requests.
    loop = asyncio.new_event_loop()
    while True:
        number, request = inbox.get()
        try:
            name, calls = pickle.loads(request)  # noqa: S301 (as above)
        except Exception as error:  # noqa: BLE001 (arguments may be objects of any class)
            reason = f"{class_name(error)}: {one_line(error)}"
            failure = CallFailedError(f"cannot read its arguments in a worker process, {reason}")
            send(number, encoded(failure))
            continue
        if is_async(functions[name]):
            values = loop.run_until_complete(call_async(functions[name], calls, setup["timeout"]))
        else:
            values = [call_sync(functions[name], call) for call in calls]
        send(number, f"[{', '.join(map(encoded, values))}]")


def _listen(requests: BinaryIO, inbox: "SimpleQueue[tuple[int, bytes]]") -> None:
    """Queue requests with their numbers.

    End the process, even during a call, once the parent process has ended.
    """
    while size := requests.read(8):
        number = int.from_bytes(requests.read(8), "big")
        inbox.put((number, requests.read(int.from_bytes(size, "big"))))
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # this process leads its group, so its child processes end too
    os._exit(0)


def _load(setup: dict[str, Any]) -> dict[str, Any]:
    """Run the files of the user that a configuration names, then load the functions."""
    for name, file in setup["files"].items():
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # Python files only
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return {name: pickle.loads(function) for name, function in setup["functions"].items()}  # noqa: S301 (as above)


def encoded(value: Any) -> str:
    """Return the result of a call, or the exception that it raised, as JSON.

    Failures as `{"failed": reason}`.
    """
    try:
        return json.dumps(_without_dicts(value), default=_plain)
    except Exception:  # noqa: BLE001 (user classes may raise anything)
        return json.dumps({"failed": f"must return numbers or None, got {shown(value, 240)}"})


def _without_dicts(value: Any) -> Any:
    """Replace dicts of the user by failures: a dict in a reply stands for a failure or for step rewards."""
    if isinstance(value, dict):
        from evogrpo.envs.text.reward_functions import CallFailedError

        return CallFailedError(f"must return numbers or None, got {shown(value, 240)}")
    if isinstance(value, list | tuple):
        return [_without_dicts(each) for each in value]
    return value


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent to one that it can.

    Raise TypeError for other values.
    """
    from evogrpo.envs.text.reward_functions import CallFailedError, StepRewards
    from evogrpo.text import user_line

    if isinstance(value, CallFailedError):
        return {"failed": str(value)}
    if isinstance(value, BaseException):
        return {
            "failed": f"raised {class_name(value)}: {shown(text_of(value), 400)}{user_line(value)}"
        }
    if isinstance(value, StepRewards):
        return {"steps": [value.values, value.positions, value.unit]}
    if hasattr(value, "tolist"):  # arrays and tensors
        return _without_dicts(value.tolist())
    if isinstance(value, Real):
        return float(value)
    raise TypeError


if __name__ == "__main__":
    main()
