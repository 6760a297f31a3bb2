"""Tools of language models: schemas, parsing and making of calls, and checks of chat templates."""

import asyncio
import inspect
import json
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from evogrpo.chat_templates import QUESTION, render_chat
from evogrpo.envs.text.compute_rewards import POLL_SECONDS
from evogrpo.envs.text.templates import Message, Options, Tokenizer, render_reply
from evogrpo.envs.text.user_functions import call_sync, end_fork, timeout_error
from evogrpo.interruption import NEVER, Stop

Tool = Callable[..., Any]
"""A function with type hints and a docstring that describes its arguments."""
Schema = dict[str, Any]
"""JSON schema of a tool, as chat templates take it."""

NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that the model cannot call."""
UNKNOWN_TOOL = "unknown"
"""Name of the tool that answers a malformed call."""


def tool_methods(environment: object) -> list[str]:
    """Return the names of the methods of an environment that are tools: all public ones except `NOT_TOOLS`."""
    members = inspect.getmembers(type(environment))
    # Class methods are methods of the class itself.
    names = [
        name for name, member in members if inspect.isfunction(member) or inspect.ismethod(member)
    ]
    return [name for name in names if not name.startswith("_") and name not in NOT_TOOLS]


def tool_schema(function: Tool) -> Schema:
    """Return the JSON schema of a function, from its type hints and its docstring.

    Raises:
        ValueError: If a type hint or the description of an argument is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: Schema = get_json_schema(function)
    except Exception as error:  # several classes of errors, one of them without a base class
        name = getattr(function, "__qualname__", repr(function))
        rule = (
            "A tool needs type hints and a docstring with Args. Names of other methods start with"
            " an underscore."
        )
        raise ValueError(f"{name} cannot be a tool: {error} {rule}") from error
    return schema


# ---- parsing


@dataclass(frozen=True, kw_only=True)
class ToolTurn:
    """A parsed completion.

    Attributes:
        message: The assistant message, with its `tool_calls` if there are any.
        calls: Name and arguments of each call; the arguments are unchecked.
        error: Reason why the completion cannot be parsed; None if it can.
    """

    message: Message
    calls: tuple[tuple[str, Any], ...] = ()
    error: str | None = None


def hermes_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the response template of tool calls as JSON in <tool_call> tags, as Qwen and Hermes models write them."""
    eos = getattr(tokenizer, "eos_token", None)
    ending = r"\Z" if eos is None else rf"{re.escape(eos)}\s*"
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<tool_call>",  # required; unused, as the prefix is empty
        "fields": {
            "reasoning_content": {
                "open": "<think>",
                "close_pattern": r"</think>\s*",
                "content": "text",
            },
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": ending, "content": "text"},
        },
    }


def parse_completion(
    tokenizer: Tokenizer,
    completion: Sequence[int],
    prefix: Sequence[int],
    schemas: Sequence[Schema],
) -> ToolTurn:
    """Parse the tool calls of a completion.

    The parser is the tokenizer's `response_template`; without one, calls are JSON in <tool_call>
    tags. Calls in the thinking part are not made.

    Args:
        tokenizer: A transformers tokenizer.
        completion: Token ids of the completion.
        prefix: All token ids before it.
        schemas: Schemas of the tools, by which arguments are converted.
    """
    # 1. Parse the text; a completion that cannot be parsed becomes a plain message with an error.
    template = getattr(tokenizer, "response_template", None)
    text = str(tokenizer.decode(list(completion)))
    plain = {
        "role": "assistant",
        "content": str(tokenizer.decode(list(completion), skip_special_tokens=True)),
    }
    if template is not None:
        prefix_text = str(tokenizer.decode(list(prefix)))
    else:
        # Some chat templates begin the thinking part, so that the completion only ends it.
        thought, ends, _ = text.partition("</think>")
        opening = str(tokenizer.decode(list(prefix[-10:]))).rstrip()
        if opening.endswith("<think>") or (ends and "<think>" not in thought):
            text = f"<think>{text}"
        template = hermes_template(tokenizer)
        prefix_text = ""
    try:
        parsed: Message = tokenizer.parse_response(
            text,
            schema=template,
            prefix=prefix_text,
            tools=list(schemas),
        )
    except Exception as error:  # noqa: BLE001 (sampled text may break a parser in any way)
        return ToolTurn(message=plain, error=f"malformed tool call: {error}")
    # 2. Check the form of the calls, whose names and arguments are sampled text.
    content = parsed.get("content") or ""
    last = list(completion[-1:])
    # a special token that ended the completion
    if not tokenizer.decode(last, skip_special_tokens=True):
        content = content.removesuffix(str(tokenizer.decode(last)))
    message = {**parsed, "content": content}
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function")
        else:
            function = None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return ToolTurn(
                message=plain,
                error="malformed tool call: it must be an object with name and arguments",
            )
        if not _is_json(function):
            return ToolTurn(
                message=plain,
                error="malformed tool call: it must have valid text and finite numbers",
            )
        unknown = sorted(function.keys() - _CALL_KEYS)
        if unknown or {"arguments", "parameters"} <= function.keys():
            if unknown:
                wrong = unknown[0]
            else:
                wrong = "both arguments and parameters"
            reason = f"malformed tool call: it must have name and arguments, got {wrong}"
            return ToolTurn(message=plain, error=reason)
        # Llama models write "parameters". A call without either has no arguments.
        arguments = function.pop("parameters", None)
        if function.get("arguments") is None:
            function["arguments"] = {} if arguments is None else arguments
        calls.append((function["name"], function["arguments"]))
    return ToolTurn(message=message, calls=tuple(calls))


_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}
"""Keys of a call. Others are arguments in a wrong place or under a wrong name: the call would be
made without them.
"""


def _is_json(value: Any) -> bool:
    """Return True if a value of a sampled call can be written as JSON in UTF-8, which has no NaN and infinity."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


# ---- chat templates


def tool_call(name: str) -> Message:
    """Return a message of the assistant that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def check_tool_template(tokenizer: Tokenizer, options: Options, schemas: Sequence[Schema]) -> None:
    """Raise ValueError if the chat template or the parser is not suitable for tools.

    Args:
        tokenizer: A transformers tokenizer.
        options: Keyword arguments of the template.
        schemas: Schemas of some tools.
    """
    # 1. The template must show tools, calls and results, and leave earlier turns unchanged once a
    #    result follows.
    name = "name_of_a_tool"
    content = "result_of_a_tool"
    result = {"role": "tool", "name": name, "content": content}
    before, after = render_reply([QUESTION, tool_call(name)], [result], tokenizer, options)
    shown = {  # one text if the template ignores tools
        render_chat(tokenizer, [QUESTION], **options, tools=tools)
        for tools in (None, schemas or None)
    }
    if name not in before or content not in after or len(shown) == 1:
        raise ValueError(
            "The tokenizer's chat_template does not render tools, calls and results. Set"
            " tokenizer.chat_template, or task.chat_template in a configuration, to one that does."
        )
    # 2. The parser must read the calls that it writes.
    if getattr(tokenizer, "response_template", None) is None:
        call = tokenizer([before[before.rfind("<tool_call>") :]], add_special_tokens=False)[
            "input_ids"
        ][0]
        if parse_completion(tokenizer, call, (), ()).calls != ((name, {}),):
            raise ValueError(
                "The tokenizer has no response_template, and its chat_template does not write tool"
                " calls as JSON in <tool_call> tags. Set task.response_template to a JSON file (in"
                " Python tokenizer.response_template);"
                " trl.chat_template_utils.add_response_schema(tokenizer) sets one for known models."
            )


# ---- calls

_MANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
"""Kinds of parameters that take any arguments, which the schema of a tool does not describe."""


def call_tool(tools: Mapping[str, Tool], name: str, arguments: Any) -> tuple[str, bool]:
    """Return the result of a call as text, or the text of its error, and True if there was one.

    The tool is not called if it or one of the arguments does not exist.

    Raises:
        ConnectionError: If the tool raises it: the server of the environment is lost.
    """
    try:
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"The arguments of {name} must be an object.")
        parameters = inspect.signature(tools[name]).parameters
        unknown = [
            each for each in arguments if each not in parameters or parameters[each].kind in _MANY
        ]
        if unknown:
            raise ValueError(
                f"Tool {name} has no argument {unknown[0]}. Its arguments are:"
                f" {', '.join(parameters)}."
            )
        result = str(finished(tools[name](**arguments)))
        failed = False
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 (the model reads it)
        result = str({"error": str(error)})
        failed = True
    return result.encode("utf-8", "replace").decode(), failed


def finished(value: Any) -> Any:
    """Return a value, or the result of an awaitable. All awaitables run in one event loop."""
    if not inspect.isawaitable(value):
        return value

    process = os.getpid()

    async def result(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        finally:
            if os.getpid() != process:
                end_fork(sys.exception())

    return asyncio.run_coroutine_threadsafe(result(value), _event_loop()).result()


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="evogrpo async tools", daemon=True).start()
    return loop


def run_calls(
    calls: Sequence[Callable[[], Any]], *, workers: int, timeout: float | None, stop: Stop = NEVER
) -> list[Any]:
    """Make calls in threads; return a value or exception for each.

    A call that exceeds the time limit is abandoned in its thread, which another one replaces.

    Args:
        calls: Functions without arguments.
        workers: Number of threads; 0 = the calling thread, without a time limit.
        timeout: Time limit of each call, in seconds; None = no limit.
        stop: Checked while waiting.
    """
    if workers == 0:
        results = []
        for call in calls:
            stop.check()
            results.append(call_sync(call, ((), {})))
        return results
    # 1. Daemon threads take calls from a queue; they never keep the program from ending.
    futures: list[Future[Any]] = [Future() for _ in calls]
    waiting = deque(enumerate(calls))
    started = dict[int, float]()

    def work() -> None:
        with suppress(IndexError, InvalidStateError):  # no call is left, or this one took too long
            while True:
                number, call = waiting.popleft()
                started[number] = time.monotonic()
                futures[number].set_result(call_sync(call, ((), {})))

    def start_thread() -> None:
        threading.Thread(target=work, name="evogrpo environments", daemon=True).start()

    for _ in range(min(workers, len(calls))):
        start_thread()
    # 2. Wait for all calls, and abandon those that take too long.
    limit = math.inf if timeout is None else timeout
    try:
        while wait(futures, timeout=POLL_SECONDS).not_done:
            stop.check()
            for number, begin in started.copy().items():
                if not futures[number].done() and time.monotonic() - begin > limit:
                    with suppress(InvalidStateError):  # it has just finished
                        futures[number].set_result(timeout_error(limit))
                        start_thread()
    finally:
        waiting.clear()
    return [future.result() for future in futures]
