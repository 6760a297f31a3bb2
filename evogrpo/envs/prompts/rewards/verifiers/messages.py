"""What goes to a worker process and what comes back: functions and arguments one way, lines of JSON the other."""

import importlib.machinery
import io
import json
import pickle  # noqa: TID251 (sent to our own child process, never a file; what comes back is JSON)
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from evogrpo.envs.prompts.rewards.step_rewards import StepRewards
from evogrpo.envs.prompts.rewards.verifiers.calling import CallFailedError, Function, Job, Outcome


def setup_message(functions: Mapping[str, Function], timeout: float | None) -> bytes:
    """Return the first message to a worker: how to find the reward functions.

    Raises:
        ValueError: If a function cannot be sent to another process.
    """
    modules: dict[str, tuple[str, str | None, str | None]] = {}
    sent: dict[str, bytes] = {}
    for name, function in functions.items():
        sent[name], named = _pickled(name, function)
        for module in sorted(named):
            modules[module] = _found(name, module)
    own = {key: value for key, value in modules.items() if value[1:] != (key, None)}
    setup = {"path": list(sys.path), "modules": list(own.values()), "functions": sent, "timeout": timeout}
    return pickle.dumps(setup)


def _pickled(name: str, function: Function) -> tuple[bytes, set[str]]:
    """Return a function as bytes, and the modules in which functions and classes in it are defined."""
    modules: set[str] = set()

    class Recording(pickle.Pickler):
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, FunctionType | type):
                modules.add(item.__module__)
            return NotImplemented

    buffer = io.BytesIO()
    try:
        Recording(buffer).dump(function)
    except Exception as error:
        raise ValueError(
            f"reward function {name!r} cannot be sent to a worker process ({type(error).__name__}: {error}): define it "
            "with `def` at the top level of a module, not inside a function or as a lambda, or leave out "
            "reward_workers and reward_timeout"
        ) from error
    return buffer.getvalue(), modules - {"builtins"}


def _found(name: str, module: str) -> tuple[str, str | None, str | None]:
    """Return how another process finds a module: its name, what to import for it, or the file to run."""
    loaded = sys.modules.get(module)
    spec, file = getattr(loaded, "__spec__", None), getattr(loaded, "__file__", None)
    if module == "__main__":
        if spec is not None:  # python -m
            return module, str(spec.name), None
    elif file is None or "." in module:
        return module, module, None
    else:
        known = importlib.machinery.PathFinder.find_spec(module)
        origin = None if known is None else known.origin
        if origin is not None and Path(origin).exists() and Path(origin).samefile(file):
            return module, module, None
    if file is None:
        raise ValueError(
            f"reward function {name!r} cannot be sent to a worker process: it was defined in a notebook or at a "
            "prompt, where no other process can find it; put it into a module, or leave out reward_workers and "
            "reward_timeout"
        )
    return module, None, str(Path(file).absolute())


def request_message(job: Job) -> bytes:
    """Return a job as a worker reads it; raises whatever pickling an argument raises."""
    return pickle.dumps((job.name, job.calls))


class NoValue:
    """What a worker says of a result that cannot be a reward; its repr is that of the result."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_message(line: bytes) -> dict[str, Any] | None:
    """Return what a worker has said; None where it cannot be read."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def outcome_of(line: bytes) -> Outcome:
    """Return what a reply says; None where it cannot be read."""
    message = read_message(line)
    if message is None:
        return None
    if "unread" in message:
        return CallFailedError(f"cannot read its arguments in a worker process, {escaped(message['unread'])}")
    try:
        return [_value(value) for value in message["values"]]
    except (KeyError, TypeError, ValueError):
        return None


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return NoValue(f"{value!r:.240}") if isinstance(value, str) else value
    if "failed" in value:
        return CallFailedError(escaped(value["failed"]))
    if "raised" in value:
        kind, text, where = value["raised"]
        return CallFailedError(f"raised {escaped(kind)}: {str(text)!r:.400}{escaped(where)}")
    if "steps" in value:
        return StepRewards(*value["steps"])
    return NoValue(str(value.get("other")))


def escaped(text: object) -> str:
    """Return a short text without control codes: it may hold parts of a completion."""
    return f"{str(text)!r:.400}"[1:-1]
