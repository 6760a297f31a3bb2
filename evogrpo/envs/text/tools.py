"""Tools of language models: schemas, parsing and making of calls, and rendering of results."""

import asyncio
import inspect
import math
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from evogrpo.envs.text.prompt_batch import POLL_SECONDS
from evogrpo.envs.text.reward_functions import call_sync, timeout_error
from evogrpo.envs.text.templates import Message, Options, Tokenizer
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
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
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
        raise ValueError(
            f"{name} cannot be a tool: {error} A tool needs type hints and a docstring that describes each argument "
            "under Args. Rename methods that are no tools to start with an underscore."
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


def hermes_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the response template of tool calls as JSON in <tool_call> tags, as Qwen and Hermes models write them."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<tool_call>",  # required; unused, as the prefix is empty
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": rf"{re.escape(str(tokenizer.eos_token))}\s*", "content": "text"},
        },
    }


def parse_completion(
    tokenizer: Tokenizer, completion: Sequence[int], prefix: Sequence[int], schemas: Sequence[Schema]
) -> ToolTurn:
    """Parse the tool calls of a completion.

    The parser is the tokenizer's `response_template`; without one, calls are JSON in <tool_call> tags.

    Args:
        tokenizer: A transformers tokenizer.
        completion: Token ids of the completion.
        prefix: All token ids before it.
        schemas: Schemas of the tools, by which arguments are converted.
    """
    own = getattr(tokenizer, "response_template", None)
    before = "" if own is None else str(tokenizer.decode(list(prefix)))
    plain = {"role": "assistant", "content": str(tokenizer.decode(list(completion), skip_special_tokens=True))}
    try:
        parsed: Message = tokenizer.parse_response(
            str(tokenizer.decode(list(completion))),
            schema=hermes_template(tokenizer) if own is None else own,
            prefix=before,
            tools=list(schemas),
        )
    except Exception as error:  # noqa: BLE001 (sampled text may break a parser in any way)
        return ToolTurn(message=plain, error=f"malformed tool call: {error}")
    content = parsed.get("content")
    message = {**parsed, "content": content.removesuffix(tokenizer.eos_token or "") if content else ""}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return ToolTurn(message=plain, error="malformed tool call: it must be an object with name and arguments")
        if function.get("arguments") is None:
            function["arguments"] = {}
        calls.append((function["name"], function["arguments"]))
    return ToolTurn(message=message, calls=tuple(calls))


# ---- rendering


@dataclass(frozen=True, kw_only=True)
class ToolMarkers:
    """Rendering of tool results with the markers of a tokenizer's chat template.

    Only the new text between two completions is rendered and tokenized; sampled tokens stay as they are.

    Attributes:
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If there is no template, it does not render tool calls and their results, it renders earlier turns
            differently once a result follows, or it writes calls in a form that cannot be parsed.
    """

    tokenizer: Tokenizer
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        name, content = "name_of_a_tool", "result_of_a_tool"
        before, after = self._render([{"role": "tool", "name": name, "content": content}], self.options)
        if name not in before or content not in after:
            raise ValueError(
                "The tokenizer's chat_template does not render tool calls and their results. Set one that does."
            )
        if getattr(self.tokenizer, "response_template", None) is None:
            call = self.tokenizer([before[before.rfind("<tool_call>") :]], add_special_tokens=False)["input_ids"][0]
            if parse_completion(self.tokenizer, call, (), ()).calls != ((name, {}),):
                raise ValueError(
                    "The tokenizer has no response_template, and its chat_template does not write tool calls as JSON "
                    "in <tool_call> tags. Set tokenizer.response_template, which parses them."
                )

    def tokens(self, results: Sequence[Message], *, ended: bool, options: Options | None = None) -> tuple[int, ...]:
        """Return the tokens between two completions: tool results with the markers around them.

        Args:
            results: Messages with the role "tool".
            ended: True if the completion ended with an EOS, which the markers then leave out.
            options: Keyword arguments of the chat template.
        """
        before, after = self._render(results, options or {})
        # The turn of the call ends with an EOS, or with other markers, after which the results follow.
        eos = str(self.tokenizer.eos_token)
        end = before.rfind(eos, before.rfind(str(results[0]["name"])))
        end = len(before) if end < 0 else end + len(eos) * ended
        return tuple(self.tokenizer([after[end:]], add_special_tokens=False)["input_ids"][0])

    def _render(self, results: Sequence[Message], options: Options) -> tuple[str, str]:
        """Return a conversation with a tool call as text, without and with the results."""
        call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
        messages = [
            {"role": "user", "content": "What is asked?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        keywords = {**self.options, **options, "tokenize": False}
        try:
            before = str(self.tokenizer.apply_chat_template(messages, **keywords))
            after = str(
                self.tokenizer.apply_chat_template([*messages, *results], **keywords, add_generation_prompt=True)
            )
        except Exception as error:  # templates may raise jinja2's errors or any others
            raise ValueError(
                f"The tokenizer's chat_template cannot render tool calls and their results: {error}"
            ) from error
        if not after.startswith(before):
            raise ValueError(
                f"chat_template must leave earlier turns unchanged when a tool result is added, but {before!r} becomes "
                f"{after!r}. Set another tokenizer.chat_template; TRL has some (get_training_chat_template)."
            )
        return before, after


# ---- calls


def call_tool(tools: Mapping[str, Tool], name: str, arguments: Any) -> tuple[str, bool]:
    """Return the result of a call as text, or the text of its error, and True if there was one.

    Raises:
        ConnectionError: If the tool raises it: the server of the environment is lost.
    """
    try:
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        result, failed = str(finished(tools[name](**arguments))), False
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 (the model reads it)
        result, failed = str({"error": str(error)}), True
    return result.encode("utf-8", "replace").decode(), failed


def finished(value: Any) -> Any:
    """Return a value, or the result of an awaitable. All awaitables run in one event loop."""
    if not inspect.isawaitable(value):
        return value

    async def result(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

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
    waiting, started = deque(enumerate(calls)), dict[int, float]()

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
