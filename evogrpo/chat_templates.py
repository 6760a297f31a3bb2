"""Chat templates of tokenizers: rendering within limits, and the tokens that end a turn."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

RENDER_SECONDS = 5.0
"""Time limit for rendering one conversation. Templates come with a model and may contain endless
loops.
"""
MAX_CHARACTERS = 10_000_000
"""Maximum length of a rendered conversation; beyond any model's context."""
QUESTION: dict[str, Any] = {"role": "user", "content": "What is asked?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "This is answered."}
"""Messages that stand for turns of which only the markers matter."""
TOOLS_TEMPLATE = """\
{%- if bos_token and bos_token not in ['<|im_start|>', eos_token] %}{{ bos_token }}{% endif %}
{%- set end = (eos_token or '<|im_end|>') + '\n' %}
{%- set rest = messages %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- system + '\n\n' if system else '' }}
    {{- 'You may call these functions:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\nTo call one, write its name and arguments as JSON:\n' }}
    {{- '<tool_call>\n{"name": NAME, "arguments": {ARGUMENT: VALUE}}\n</tool_call>' }}
    {{- end }}
{%- elif system %}
    {{- '<|im_start|>system\n' + system + end }}
{%- endif %}
{%- for message in rest %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n' if message.content or not loop.first else '' }}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- end }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Chat template with tools, for models that have none: ChatML, with the model's own EOS as the end
of a turn. Calls are JSON in <tool_call> tags, as Qwen and Hermes models write them.
"""


class RenderError(ValueError):
    """A chat template takes too long, or its text is too long."""


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render a conversation by the tokenizer's chat template.

    Rendering must end within `RENDER_SECONDS`, and the text must have at most `MAX_CHARACTERS`.

    Args:
        tokenizer: A transformers tokenizer.
        messages: The conversation.
        options: Keyword arguments of `apply_chat_template`, except `tokenize`.

    Raises:
        RenderError: If a limit is exceeded.
    """
    # 1. A trace function can interrupt a loop in any thread, without another process.
    deadline: float | None = None

    def on_line(frame: FrameType, event: str, value: Any) -> Any:
        """Raise RenderError at a line of the template after the deadline."""
        # Processor time, counted from the first line of the template: on a busy machine, compiling
        # it may already take seconds.
        nonlocal deadline
        now = time.thread_time()
        if deadline is None:
            deadline = now + RENDER_SECONDS
        if now > deadline:
            raise RenderError(
                f"chat_template must end within {RENDER_SECONDS:g} seconds. Does it have an endless"
                " loop?"
            )
        return on_line

    def on_call(frame: FrameType, event: str, value: Any) -> Any:
        """Trace function: return `on_line` for functions of the template, None for all others."""
        # Jinja compiles a template to Python code of this file name; lines of other functions need
        # no check.
        if frame.f_code.co_filename == "<template>":
            return on_line(frame, event, value)
        return None

    # 2. Render under the trace function, and restore that of a debugger.
    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        text = str(tokenizer.apply_chat_template(list(messages), **options, tokenize=False))
    finally:
        sys.settrace(previous)
    if len(text) > MAX_CHARACTERS:
        raise RenderError(
            f"chat_template must render at most {MAX_CHARACTERS} characters, got {len(text)}."
        )
    return text


def end_of_turn_ids(tokenizer: Any, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a turn: EOS, and the one that closes turns in the chat template.

    Args:
        tokenizer: A transformers tokenizer.
        options: Keyword arguments of the chat template.
    """
    closing = closing_token(tokenizer, options)
    # None if the tokenizer has no EOS.
    ids = {getattr(tokenizer, "eos_token_id", None)}
    if closing is not None:
        ids.add(tokenizer.convert_tokens_to_ids(closing))
    return tuple(sorted(number for number in ids if number is not None))


def closing_token(tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """Return the token that closes a turn in the chat template, such as "<|im_end|>".

    None if there is no template, or it closes a turn with ordinary text.

    Raises:
        RenderError: If the template exceeds the limits of `render_chat`.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    # 1. Render an answer that is the last message, and the same with the start of a further turn.
    answers = []
    endings = []
    for with_next_turn in (False, True):
        try:
            text = render_chat(
                tokenizer, [QUESTION, ANSWER], **options, add_generation_prompt=with_next_turn
            )
        except RenderError:
            raise
        except Exception:  # noqa: BLE001 (templates may raise anything; some open no turn after an answer)
            continue
        _, answer, ending = text.rpartition(ANSWER["content"])
        answers.append(answer)  # empty if the template changes or leaves out the answer
        endings.append(ending)
    # Longer tokens first, as one may begin with another.
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    if not endings or not tokens or not all(answers):
        return None
    # 2. Split what follows the answer at special tokens. The part that both endings begin with
    #    closes the turn; after it, some templates end the whole conversation with EOS.
    pattern = "|".join(map(re.escape, tokens))
    parts = [re.split(f"({pattern})", ending) for ending in endings]
    last = ""
    for part, other in zip(parts[0], parts[-1], strict=False):
        if part != other:
            break
        if part.strip():
            last = part
    # 3. The turn ends with the last common part, if that is a special token and not text.
    return last if last in tokens else None
