"""Prompts of dataset rows: conversation templates, chat templates and tokenization."""

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from evogrpo.chat_templates import ANSWER, QUESTION, closing_token, render_chat
from evogrpo.validation import refuse_unknown

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model", "ipython", "environment", "documents")
Tokenizer = Any
"""A transformers tokenizer."""
Message = dict[str, Any]
Prompt = str | list[Message]
Options = Mapping[str, Any]
"""Keyword arguments of a chat template."""
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Column with keyword arguments of the chat template for one row, as in TRL."""
RESERVED_OPTIONS = {
    "conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
}  # fmt: skip

_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
_CHUNK = 1024  # prompts per call of the tokenizer


def check_template(template: Sequence[Mapping[str, str]]) -> tuple[Message, ...]:
    """Check a conversation template; return it as plain messages.

    Args:
        template: Messages {"role": ..., "content": ...} with the fields {question} and {answer} in their contents;
            doubled braces are literal ones.

    Raises:
        ValueError: If it is empty, a message is malformed, a field is unknown, or {question} is missing.
    """
    messages = tuple(check_messages(template, where="conversation_template"))
    fields = [field for message in messages for field in _FIELD.findall(message["content"]) if field]
    refuse_unknown("field of conversation_template", fields, ("question", "answer"))
    if "question" not in fields:
        raise ValueError(f"conversation_template must contain {{question}}, got {list(messages)}.")
    return messages


def fill_template(template: Sequence[Message], question: object, answer: object) -> list[Message]:
    """Insert a question and an answer into a conversation template.

    Uses a single pass instead of `str.format`: braces and field names inside the question are kept.
    """
    values = {"question": str(question), "answer": str(answer)}

    def fill(match: re.Match[str]) -> str:
        return values[match[1]] if match[1] else match[0][0]

    return [{**message, "content": _FIELD.sub(fill, message["content"])} for message in template]


def check_messages(messages: object, where: str) -> list[Message]:
    """Check a conversation; return it as a list of dicts, with any additional keys.

    Raises:
        ValueError: If it is not a non-empty sequence of {"role": str, "content": str}; content is optional with
            `tool_calls`. The message starts with `where`.
    """
    rule = f'{where} must be a non-empty list of {{"role": str, "content": str}}'
    if hasattr(messages, "tolist"):  # data frames store lists as arrays
        messages = messages.tolist()
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise ValueError(f"{rule}, got {messages!r:.200}.")
    plain = []
    for message in messages:
        # Arrow tables give every message the keys of all messages, with None for missing ones.
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        if fields.get("tool_calls"):
            fields.setdefault("content", "")
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{rule}, got the message {message!r:.200}.")
        refuse_unknown(f"role in {where}:", [fields["role"]], ROLES)
        plain.append(fields)
    return plain


def render(messages: list[Message], tokenizer: Tokenizer, options: Options | None = None) -> str:
    """Render a conversation for the model to continue.

    If the last message is from the assistant, the model continues it (prefill); otherwise an assistant turn is opened.

    Args:
        messages: The conversation.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If the template omits tool calls of the conversation.
    """
    last = messages[-1]
    prefill = last["role"] == "assistant" and not last.get("tool_calls")
    if prefill and not last["content"]:  # an empty prefill is the same as a fresh assistant turn
        messages, prefill = messages[:-1], False
    # 1. Render, with the last message open or an assistant turn opened.
    mode = "continue_final_message" if prefill else "add_generation_prompt"
    keywords = {**(options or {}), mode: True}
    text = render_chat(tokenizer, messages, **keywords)
    # 2. Tool calls must change the text.
    if any(message.get("tool_calls") for message in messages):
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        if render_chat(tokenizer, bare, **keywords) == text:
            raise ValueError("The tokenizer's chat_template does not render tool_calls. Set one that does.")
    return text


def render_reply(
    messages: list[Message], reply: Sequence[Message], tokenizer: Tokenizer, options: Options
) -> tuple[str, str]:
    """Return a conversation as text: without a reply, and with a reply and the start of the model's next turn.

    Args:
        messages: The conversation; ends with a message of the assistant.
        reply: Messages of the user or of tools.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If the template fails, or renders earlier turns differently when a reply follows.
    """
    try:
        before = render_chat(tokenizer, messages, **options)
        after = render_chat(tokenizer, [*messages, *reply], **options, add_generation_prompt=True)
    except Exception as error:  # templates may raise jinja2's errors or any others
        raise ValueError(f"The tokenizer's chat_template cannot render a further turn: {error}") from error
    if not after.startswith(before):
        raise ValueError(
            f"chat_template must leave earlier turns unchanged when a turn is added, but {before!r} becomes {after!r}. "
            "Set another tokenizer.chat_template; TRL has some (get_training_chat_template)."
        )
    return before, after


def reply_tokens(
    assistant: Message, reply: Sequence[Message], tokenizer: Tokenizer, options: Options, completion: Sequence[int]
) -> tuple[int, ...]:
    """Return the tokens between two completions: a reply with the markers of the chat template around it.

    Only this new text is rendered and tokenized; sampled tokens stay as they are.

    Args:
        assistant: Message that stands for the completion before the reply.
        reply: Messages of the user or of tools.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.
        completion: Token ids of the completion before the reply. If it ends with a special token or with the text that
            closes a turn, the markers do not close the turn once more.

    Raises:
        ValueError: If there is no template, or it renders earlier turns differently once another turn follows.
    """
    before, after = render_reply([QUESTION, assistant], reply, tokenizer, options)
    # 1. Find the markers that end a turn of the assistant: they follow the text of a plain answer.
    plain, answer = render_chat(tokenizer, [QUESTION, ANSWER], **options), ANSWER["content"]
    if answer not in plain:
        raise ValueError(
            f"chat_template must render the text of assistant messages, got {plain!r}. Set another template."
        )
    closing = plain[plain.rfind(answer) + len(answer) :]
    # 2. Some templates end a turn with tool calls differently; then only what follows it is rendered.
    if not before.endswith(closing):
        closing = ""
    # 3. The completion has closed its turn, with this or with another token that ends a turn.
    marker = closing_token(tokenizer, options)
    last = list(completion[-1:])
    if marker is not None and marker in closing and last and not tokenizer.decode(last, skip_special_tokens=True):
        closing = closing.partition(marker)[2]
    between = (closing + after[len(before) :]).removeprefix(str(tokenizer.decode(last)))
    return tuple(tokenizer([between], add_special_tokens=False)["input_ids"][0])


def numbered(number: int, where: str) -> str:
    """Return the name of a row in messages."""
    return f"Row {number} (counted from 0) of {where}"


def row_options(row: Mapping[str, Any]) -> Options:
    """Return the template options of a dataset row.

    Arrow tables give every row the keys of all rows, with None for missing ones.
    """
    return {name: value for name, value in (row.get(TEMPLATE_OPTIONS) or {}).items() if value is not None}


def check_options(options: object, where: str) -> Options:
    """Check keyword arguments of a chat template.

    Raises:
        ValueError: If they are not keyword arguments, or are set by the environment.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        example = '{"enable_thinking": False}'
        raise ValueError(f"{where} must be a mapping of keyword arguments, such as {example}, got {options!r:.200}.")
    reserved = sorted(RESERVED_OPTIONS & options.keys())
    if reserved:
        raise ValueError(f"{where} must not contain {', '.join(reserved)}, which the environment sets. Remove it.")
    return options


def tokenize(prompts: Sequence[tuple[Prompt, Options]], tokenizer: Tokenizer, where: str) -> list["array[int]"]:
    """Return the token ids of prompts, as compact integer arrays.

    Special tokens are those of TRL: messages get the chat template's, plain text the tokenizer's default ones.

    Args:
        prompts: Text or messages (the same for all), with keyword arguments of the chat template.
        tokenizer: A transformers tokenizer.
        where: Name of the dataset, for messages.

    Raises:
        ValueError: If text and messages are mixed, a chat template is missing or fails, or a prompt is empty.
    """
    tokenized: list[array[int]] = []
    kind: type | None = None
    for first in range(0, len(prompts), _CHUNK):
        chunk = prompts[first : first + _CHUNK]
        # 1. Prompts must have one type.
        kind = kind or type(chunk[0][0])
        if any(type(prompt) is not kind for prompt, _ in chunk):
            raise ValueError(f"Prompts of {where} must all be text or all be lists of messages, got both.")
        # 2. Render and tokenize.
        texts = [
            _text(prompt, tokenizer, kwargs, numbered(row, where)) for row, (prompt, kwargs) in enumerate(chunk, first)
        ]
        options: dict[str, Any] = {} if kind is str else {"add_special_tokens": False}
        for ids in tokenizer(texts, **options)["input_ids"]:
            if len(ids) == 0:
                raise ValueError(f"{numbered(len(tokenized), where)} has a prompt without tokens. Remove the row.")
            tokenized.append(array("i", ids))
    return tokenized


def _text(prompt: Prompt, tokenizer: Tokenizer, options: Options, where: str) -> str:
    try:
        text = prompt if isinstance(prompt, str) else render(prompt, tokenizer, options)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} must be valid text, got an incomplete character ({error}).") from error
    except Exception as error:  # templates may raise jinja2's errors or any others
        raise ValueError(f"{where} cannot be rendered by the chat template: {error}") from error
    return text
