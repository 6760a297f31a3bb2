"""Calls of functions of the user, which may raise anything, fork, or change settings of torch."""

import asyncio
import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from evogrpo.interruption import Interrupted
from evogrpo.validation import plain_list

Function = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class CallFailedError(Exception):
    """A call without a result.

    The message completes a sentence that starts with the function's name.
    """


def timeout_error(seconds: float) -> CallFailedError:
    """Return the error of a call that exceeded the time limit."""
    return CallFailedError(f"took longer than {seconds:g} s and was stopped")


def is_async(function: Function) -> bool:
    """Return True for `async def` functions and objects with an async `__call__`."""
    if inspect.iscoroutinefunction(function):
        return True
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call)


def call_sync(function: Function, call: Call) -> Any:
    """Return the result of a call, or the exception that it raised.

    Processes that the function forked off end. Settings of torch for the whole program, such as
    those for a reward model, are undone: the run has its own.
    """
    args, keywords = call
    # A fork that returns from the function would continue the run; see `end_fork`.
    process = os.getpid()
    with _torch_settings_kept():
        try:
            result = function(*args, **keywords)
        except BaseException as error:  # noqa: BLE001 (user code may raise anything)
            result = error
    if os.getpid() != process:
        end_fork(result)
    # Stops of the run are no failures of the function.
    if isinstance(result, KeyboardInterrupt | Interrupted):
        raise result
    return result


async def call_async(function: Function, call: Call, timeout: float | None) -> Any:
    """Return the result of a call within `timeout` seconds, or the exception that it raised."""
    args, keywords = call
    process = os.getpid()
    # The limit is an object, so that its own cancellation can be told from that of the user.
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            result = own_list(await function(*args, **keywords))
    # An exception that leaves a task could end the event loop.
    except BaseException as error:  # noqa: BLE001
        result = error
        if timeout is not None and limit.expired():
            result = timeout_error(timeout)
    if os.getpid() != process:
        end_fork(result)
    return result


def own_list(values: Any) -> Any:
    """Return a copy of a list, array or tensor as a list, and other values as they are."""
    listed = plain_list(values)
    return values if listed is None else listed


@contextlib.contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """Restore torch's gradient mode, default dtype and default device at the end."""
    torch = sys.modules.get("torch")
    if torch is None:  # worker processes import it only if a function does
        yield
        return
    enabled = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:  # setting a device slows down all operations
            torch.set_default_device(None if device.type == "cpu" else device)


def end_fork(outcome: Any) -> NoReturn:
    """End a process that user code forked off and that has left the user's function.

    It would continue the run a second time. As for a Python program, its exit code is 0, that of
    `sys.exit`, or 1 after an exception.

    Args:
        outcome: The value that the function returned, or the exception that it raised.
    """
    # 1. The exit code, as Python computes it.
    code: Any = 0
    if isinstance(outcome, SystemExit):
        code = 0 if outcome.code is None else outcome.code
    elif isinstance(outcome, BaseException):
        traceback.print_exception(outcome)
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    # 2. Write what is still open.
    if isinstance(outcome, BaseException):
        outcome.__traceback__ = None  # frees the function's variables, which writes its open files
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    # 3. End without the exit handlers of the parent process.
    os._exit(code & 0xFF)
