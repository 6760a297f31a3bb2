"""RewardHandler: answers the requests for rewards in a worker process.

Requests are pickles of the parent process. Replies are JSON, so that completions cannot make the
parent process execute code.
"""

import json
import pickle  # noqa: TID251 (requests of our own parent process, never a file)
from collections.abc import Mapping
from numbers import Real
from typing import Any

from evogrpo.envs.text.reward_functions import Reasoned, StepRewards, reasoned
from evogrpo.envs.text.user_functions import CallFailedError, Function, call_sync
from evogrpo.envs.worker_process import PackedCode
from evogrpo.text import class_name, one_line, printable, shown, text_of, user_line


class RewardHandler:
    """Calls reward functions in a worker process; see `evogrpo.envs.worker_process.Handler`.

    Args:
        functions: Reward functions by name.
    """

    def __init__(self, functions: Mapping[str, PackedCode]) -> None:
        self._packed = functions
        self._functions: dict[str, Function] = {}

    def answer(self, request: bytes) -> bytes:
        """Return the result of a call; an empty request loads the functions."""
        # The functions are loaded by a request, so that their errors have a reply.
        if not request:
            return encoded(self._load())
        try:
            name, call = pickle.loads(request)  # noqa: S301 (as above)
        except Exception as error:  # noqa: BLE001 (arguments may be objects of any class)
            reason = f"{class_name(error)}: {one_line(error)}"
            return encoded(
                CallFailedError(f"cannot read its arguments in a worker process, {reason}")
            )
        return encoded(call_sync(self._functions[name], call))

    def close(self) -> None:
        """Do nothing: functions hold no resources that must be released."""

    def _load(self) -> CallFailedError | None:
        """Load the functions; return the error if one cannot be loaded, otherwise None."""
        try:
            for name, packed in self._packed.items():
                self._functions[name] = packed.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (user modules may raise anything)
            return CallFailedError(f"{class_name(error)}: {one_line(error)}{user_line(error)}")
        return None


def encoded(value: Any) -> bytes:
    """Return the result of a call, or the exception that it raised, as JSON."""
    try:
        return json.dumps(_plain(value)).encode()
    # For example integers that are too long for JSON.
    except Exception:  # noqa: BLE001 (user classes may raise anything)
        return json.dumps(_not_numbers(value)).encode()


def decoded(reply: bytes) -> Any:
    """Return the value of a reply; failures are `CallFailedError`."""
    return json.loads(reply, object_hook=_from_dict)


def _plain(value: Any) -> Any:
    """Convert a result to JSON. Only failures, step rewards and reasons become mappings."""
    if isinstance(value, CallFailedError):
        return {"failed": str(value)}
    if isinstance(value, BaseException):
        reason = f"raised {class_name(value)}: {shown(text_of(value), 400)}{user_line(value)}"
        return {"failed": reason}
    if isinstance(value, StepRewards):
        return {"steps": [value.values, value.positions, value.unit]}
    # A list has the rewards of a group.
    with_reason = None if isinstance(value, list) else reasoned(value)
    if with_reason is not None:
        return {"reason": [_plain(with_reason.value), with_reason.reason]}
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    # Text is refused by the parent process, with the same message as without workers.
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Real):
        return float(value)
    return _not_numbers(value)


def _not_numbers(value: Any) -> dict[str, str]:
    return {"failed": f"must return numbers or None, got {shown(value, 240)}"}


def _from_dict(item: dict[str, Any]) -> StepRewards | Reasoned | CallFailedError:
    """Return the result that a mapping in a reply stands for."""
    # A mapping is one of the three that `_plain` writes: those of the user never get here.
    if "steps" in item:
        return StepRewards(*item["steps"])
    if "reason" in item:
        value, reason = item["reason"]
        return Reasoned(value=value, reason=reason)
    return CallFailedError(printable(str(item["failed"]))[:1000])
