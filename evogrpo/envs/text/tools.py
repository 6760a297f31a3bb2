"""Tools of language models: their schemas, and the parsing of calls."""

import asyncio
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from evogrpo.envs.text.templates import Message, Tokenizer
from evogrpo.envs.text.user_functions import end_fork

Tool = Callable[..., Any]
"""A function with type hints and a docstring that describes its arguments."""
Schema = dict[str, Any]
"""JSON schema of a tool, as chat templates take it."""

NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that the model cannot call."""
UNKNOWN_TOOL = "unknown"
"""Name of the tool that answers a malformed call."""


def tool_methods(environment: object) -> list[str]:
    """Return the names of an environment's tools: all public methods except `NOT_TOOLS`."""
    names = []
    for name, member in inspect.getmembers(type(environment)):
        # Class methods are methods of the class itself.
        is_method = inspect.isfunction(member) or inspect.ismethod(member)
        if is_method and not name.startswith("_") and name not in NOT_TOOLS:
            names.append(name)
    return names


def tool_schema(function: Tool) -> Schema:
    """Return the JSON schema of a function, from its type hints and its docstring.

    Raises:
        ValueError: If a type hint or the description of an argument is missing.
    """
    # Transformers takes seconds to import.
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: Schema = get_json_schema(function)
    except Exception as error:  # transformers raises several classes without a common base
        name = getattr(function, "__qualname__", repr(function))
        reason = str(error).strip().removesuffix(".")
        raise ValueError(
            f"{name} cannot be a tool: {reason}. A tool needs type hints and a docstring with Args."
            " Names of other methods start with an underscore."
        ) from error
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

    @classmethod
    def malformed(cls, text: str, reason: str) -> "ToolTurn":
        """Return a plain message that cannot be parsed."""
        message = {"role": "assistant", "content": text}
        return cls(message=message, error=f"malformed tool call: {reason}")


def hermes_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the response template of calls in <tool_call> tags, as of Qwen and Hermes models."""
    eos = getattr(tokenizer, "eos_token", None)
    # The content ends with the EOS token, or with the text.
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
    text = str(tokenizer.decode(list(completion)))
    plain = str(tokenizer.decode(list(completion), skip_special_tokens=True))
    template = getattr(tokenizer, "response_template", None)
    prefix_text = ""
    if template is not None:
        prefix_text = str(tokenizer.decode(list(prefix)))
    else:
        template = hermes_template(tokenizer)
        # Some chat templates begin the thinking part, so that the completion only ends it.
        thought, closing_tag, _ = text.partition("</think>")
        # The last tokens are enough to find the tag.
        end_of_prefix = str(tokenizer.decode(list(prefix[-10:])))
        is_opened = end_of_prefix.rstrip().endswith("<think>")
        if is_opened or (closing_tag and "<think>" not in thought):
            text = f"<think>{text}"
    try:
        message: Message = tokenizer.parse_response(
            text, schema=template, prefix=prefix_text, tools=list(schemas)
        )
    except Exception as error:  # noqa: BLE001 (sampled text may break a parser in any way)
        return ToolTurn.malformed(plain, str(error))
    # 2. Check the form of the calls, whose names and arguments are sampled text.
    calls = []
    for call in message.get("tool_calls") or ():
        function: Any = call.get("function") if isinstance(call, Mapping) else None
        # The model reads what is wrong with its call, and may try again.
        reason = _malformed(function)
        if reason is not None:
            return ToolTurn.malformed(plain, reason)
        # Llama models write "parameters". A call without either has no arguments.
        arguments = function.pop("parameters", None)
        if function.get("arguments") is None:
            function["arguments"] = {} if arguments is None else arguments
        calls.append((function["name"], function["arguments"]))
    # 3. Leave out a special token that ended the completion.
    content = message.get("content") or ""
    last = list(completion[-1:])
    if not tokenizer.decode(last, skip_special_tokens=True):
        content = content.removesuffix(str(tokenizer.decode(last)))
    return ToolTurn(message={**message, "content": content}, calls=tuple(calls))


def _malformed(function: Any) -> str | None:
    """Return the reason why a call is malformed, or None."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "it must be an object with name and arguments"
    try:  # to write it as JSON in UTF-8, which has no NaN and infinity
        json.dumps(function, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return "it must have valid text and finite numbers"
    unknown = sorted(function.keys() - _CALL_KEYS)
    if unknown:
        return f"it must have name and arguments, got {unknown[0]}"
    if {"arguments", "parameters"} <= function.keys():
        return "it must have name and arguments, got both arguments and parameters"
    return None


_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}
"""Keys of a call. Others are arguments in a wrong place or under a wrong name: the call would be
made without them.
"""


# ---- calls


def tool_call(name: str) -> Message:
    """Return a message of the assistant that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def finished(value: Any) -> Any:
    """Return a value, or the result of an awaitable. All awaitables run in one event loop."""
    if not inspect.isawaitable(value):
        return value

    own_process = os.getpid()

    async def result(awaitable: Awaitable[Any]) -> Any:
        """Await the result. A process that the tool has forked ends here, not in the event loop."""
        try:
            return await awaitable
        finally:
            if os.getpid() != own_process:
                end_fork(sys.exception())

    return asyncio.run_coroutine_threadsafe(result(value), _event_loop()).result()


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """Start the event loop of async tools, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="evogrpo async tools", daemon=True).start()
    return loop
