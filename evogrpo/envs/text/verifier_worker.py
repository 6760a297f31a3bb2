"""Script of verifier workers: loads reward functions and processes requests until its input ends.

Requests are pickles on standard input, from the parent process. Replies are lines of JSON on the original standard
output, so that completions cannot make the parent process execute code.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import pickle  # noqa: TID251 (requests of our own parent process, never a file)
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

MAIN = "__main__"
MAX_INTEGER = 10**300  # larger ones are no rewards, and JSON readers may reject them


def main() -> None:
    """Process requests until the parent process ends."""
    # 1. Keep the pipes for messages; printed text goes to standard error.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, inbox), daemon=True).start()
    # 2. Load the reward functions.
    setup = pickle.loads(inbox.get())  # noqa: S301 (as above)
    try:
        functions, timeout = _load(setup), setup["timeout"]
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user modules may raise anything)
        _reply(replies, {"refused": f"{type(error).__name__}: {error}{_line(error)}"})
        return
    from evogrpo.envs.text.reward_calls import call_async, call_sync, is_async

    loop = asyncio.new_event_loop()
    _reply(replies, {"ready": True})
    # 3. Process requests.
    while True:
        request = inbox.get()
        try:
            name, calls = pickle.loads(request)  # noqa: S301 (as above)
        except Exception as error:  # noqa: BLE001 (arguments may be objects of any class)
            _reply(replies, {"unread": f"{type(error).__name__}: {error}"})
            continue
        if is_async(functions[name]):
            values = loop.run_until_complete(call_async(functions[name], calls, timeout))
        else:
            values = call_sync(functions[name], calls)
        _reply(replies, {"values": [to_json(value) for value in values]})


def _listen(requests: BinaryIO, inbox: "SimpleQueue[bytes]") -> None:
    """Queue requests; end the process, even during a call, once the parent process has ended."""
    while size := requests.read(8):
        inbox.put(requests.read(int.from_bytes(size, "big")))
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # this process leads its group, so its child processes end too
    os._exit(0)


def _load(setup: dict[str, Any]) -> dict[str, Any]:
    sys.path[:] = setup["path"]
    for name, importable, file in setup["modules"]:
        if importable is not None:
            sys.modules[name] = importlib.import_module(importable)
            continue
        # The main script gets another name, as in multiprocessing, so that code under `if __name__ == "__main__"` does
        # not run.
        alias = "__mp_main__" if name == MAIN else name
        spec = importlib.util.spec_from_file_location(alias, file)
        assert spec is not None and spec.loader is not None  # Python files only
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = sys.modules[name] = module
        spec.loader.exec_module(module)
    return {name: pickle.loads(function) for name, function in setup["functions"].items()}  # noqa: S301 (as above)


def to_json(value: Any) -> Any:
    """Return a reward function's result as a JSON value, invalid rewards as their repr."""
    from evogrpo.envs.text.reward_calls import safe_repr

    try:
        return _to_json(value)
    except Exception:  # noqa: BLE001 (user classes may raise anything)
        return {"other": safe_repr(value)}


def _to_json(value: Any) -> Any:
    from evogrpo.envs.text.reward_calls import safe_repr, safe_str

    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < MAX_INTEGER else float(value)
    if type(value).__name__ in ("CallFailedError", "CallTimeoutError"):
        return {"failed": str(value)}
    if isinstance(value, BaseException):
        return {"raised": [type(value).__name__, safe_str(value)[:10_000], _line(value)]}
    if hasattr(value, "tolist"):  # arrays and tensors
        return to_json(value.tolist())
    if isinstance(value, Real):
        return float(value)
    if type(value).__name__ == "StepRewards":
        return {"steps": [list(value.values), list(value.positions), value.unit]}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_json(item) for item in value]
    return {"other": safe_repr(value)}


def _line(error: BaseException) -> str:
    """Return the file and line of user code that raised an error, such as ` (rewards.py, line 7)`."""
    here = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(here)]
    user_frames = [frame for frame in frames if "importlib" not in frame.filename]
    return f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""


def _reply(replies: int, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(replies, line) :]


if __name__ == MAIN:
    main()
