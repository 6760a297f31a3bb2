"""The worker process of a verifier pool: a script that loads reward functions and answers one request after another.

Requests are pickles on standard input: they come from the process that started this one. Replies are lines of JSON on
what was standard output: nothing that a completion does in here can make the other side execute anything.
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
LARGE = 10**300  # a whole number beyond it is no reward, and JSON may not take it


def main() -> None:
    """Answer requests until the other side is gone."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what functions print must not look like a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, inbox), daemon=True).start()
    setup = pickle.loads(inbox.get())  # noqa: S301 (as above)
    try:
        functions, timeout = _load(setup), setup["timeout"]
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's modules run)
        _reply(replies, {"refused": f"{type(error).__name__}: {error}{_line(error)}"})
        return
    from evogrpo.envs.text.reward_calls import call_async, call_sync, is_async

    loop = asyncio.new_event_loop()
    _reply(replies, {"ready": True})
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
        _reply(replies, {"values": [plain(value) for value in values]})


def _listen(requests: BinaryIO, inbox: "SimpleQueue[bytes]") -> None:
    """Hand requests over; end the process, even in the middle of a function, once there is nobody left to ask."""
    while size := requests.read(8):
        inbox.put(requests.read(int.from_bytes(size, "big")))
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # this process leads its own group: what functions have started ends as well
    os._exit(0)


def _load(setup: dict[str, Any]) -> dict[str, Any]:
    sys.path[:] = setup["path"]
    for name, importable, file in setup["modules"]:
        if importable is not None:
            sys.modules[name] = importlib.import_module(importable)
            continue
        # The script that was started is loaded as multiprocessing does: under another name, so that what it keeps
        # behind `if __name__ == "__main__"` is not run.
        alias = "__mp_main__" if name == MAIN else name
        spec = importlib.util.spec_from_file_location(alias, file)
        assert spec is not None and spec.loader is not None  # Python files only
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = sys.modules[name] = module
        spec.loader.exec_module(module)
    return {name: pickle.loads(function) for name, function in setup["functions"].items()}  # noqa: S301 (as above)


def plain(value: Any) -> Any:
    """Return a reward function's result as JSON can say it; what is no reward is described."""
    from evogrpo.envs.text.reward_calls import shown

    try:
        return _plain(value)
    except Exception:  # noqa: BLE001 (a user's class: anything may come out of it)
        return {"other": shown(value)}


def _plain(value: Any) -> Any:
    from evogrpo.envs.text.reward_calls import said, shown

    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < LARGE else float(value)
    if type(value).__name__ in ("CallFailedError", "CallTimeoutError"):
        return {"failed": str(value)}
    if isinstance(value, BaseException):
        return {"raised": [type(value).__name__, said(value)[:10_000], _line(value)]}
    if hasattr(value, "tolist"):  # arrays and tensors
        return plain(value.tolist())
    if isinstance(value, Real):
        return float(value)
    if type(value).__name__ == "StepRewards":
        return {"steps": [list(value.values), list(value.positions), value.unit]}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return {"other": shown(value)}


def _line(error: BaseException) -> str:
    """Return where in the user's code an error was raised, such as ` (rewards.py, line 7)`."""
    here = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(here)]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _reply(replies: int, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(replies, line) :]


if __name__ == MAIN:
    main()
