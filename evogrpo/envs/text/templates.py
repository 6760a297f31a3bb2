"""From dataset rows to prompt token ids: conversation templates, chat templates and tokenizing."""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from evogrpo.config.checks import refuse_unknown

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model", "ipython", "environment", "documents")
Message = dict[str, Any]
Prompt = str | list[Message]
Options = Mapping[str, Any]
"""Keyword arguments of a chat template."""

_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
_FIELDS = ("question", "answer")
_CHUNK = 1024


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: Any
    pad_token_id: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize a list of texts into a mapping that holds "input_ids"."""

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """Render messages as text."""

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the text of token ids."""


def check_template(template: Sequence[Mapping[str, str]]) -> tuple[Message, ...]:
    """Return a conversation template as plain messages, or say what is wrong with it.

    Args:
        template: Messages {"role": ..., "content": ...} whose contents may hold the fields {question} and {answer};
            doubled braces stand for literal ones.

    Raises:
        ValueError: If it is empty, a message is malformed, a field is unknown, or no message holds {question}.
    """
    messages = tuple(check_messages(template, where="conversation_template"))
    fields = [field for message in messages for field in _FIELD.findall(message["content"]) if field]
    for field in fields:
        if field not in _FIELDS:
            raise ValueError(
                f"conversation_template may use the fields {{question}} and {{answer}}, got {{{field}}}: "
                f"write {{{{{field}}}}} for literal braces"
            )
    if "question" not in fields:
        raise ValueError(f"conversation_template must contain {{question}}, got {list(messages)}")
    return messages


def fill_template(template: Sequence[Message], question: object, answer: object) -> list[Message]:
    """Put a question and an answer into a conversation template.

    Filled in one pass and never with `str.format`: braces and field names inside the question stay as they are.
    """
    values = {"question": str(question), "answer": str(answer)}

    def fill(match: re.Match[str]) -> str:
        return values[match[1]] if match[1] else match[0][0]

    return [{**message, "content": _FIELD.sub(fill, message["content"])} for message in template]


def check_messages(messages: object, where: str) -> list[Message]:
    """Return a conversation as a list of plain messages; what a message holds beside role and content is kept.

    Raises:
        ValueError: If it is not a non-empty sequence of {"role": str, "content": str}, where a content may be missing
            beside `tool_calls`; `where` names it.
    """
    rule = f'{where} must be a non-empty list of {{"role": str, "content": str}}'
    if hasattr(messages, "tolist"):  # an array, as data frames keep lists
        messages = messages.tolist()
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise ValueError(f"{rule}, got {messages!r:.200}")
    plain = []
    for message in messages:
        # Tables give every message all the keys that one of them has, as None where it has none.
        fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        if fields.get("tool_calls"):
            fields.setdefault("content", "")
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{rule}, got the message {message!r:.200}")
        refuse_unknown(f"role in {where}:", [fields["role"]], ROLES)
        plain.append(fields)
    return plain


def render(messages: list[Message], tokenizer: Tokenizer, options: Options | None = None) -> str:
    """Return the text of a conversation, ready to be continued by the model.

    A conversation that ends with an assistant message is continued inside that message (a prefill); any other gets
    the opening of an assistant turn.

    Args:
        messages: The conversation.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If the template leaves out tool calls that the conversation holds.
    """
    last = messages[-1]
    prefill = last["role"] == "assistant" and not last.get("tool_calls")
    if prefill and not last["content"]:  # an empty prefill is the same as a fresh assistant turn
        messages, prefill = messages[:-1], False
    mode = "continue_final_message" if prefill else "add_generation_prompt"
    given = {**(options or {}), "tokenize": False, mode: True}
    text = str(tokenizer.apply_chat_template(messages, **given))
    if any(message.get("tool_calls") for message in messages):
        bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        if str(tokenizer.apply_chat_template(bare, **given)) == text:
            raise ValueError(
                "a message holds tool_calls, which the tokenizer's chat_template does not show: set a chat_template "
                "that does, or write the calls into content"
            )
    return text


def check_options(options: object, where: str) -> Options:
    """Return keyword arguments of a chat template; ValueError if they are none, or say what is said here anyway."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        example = '{"enable_thinking": False}'
        raise ValueError(f"{where} must be a mapping of keyword arguments, such as {example}, got {options!r:.200}")
    taken = sorted({"tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}.intersection(options))
    if taken:
        raise ValueError(f"{where} must leave {', '.join(taken)} to the environment: leave it out")
    return options


def tokenize(prompts: Iterator[tuple[Prompt, Options]], tokenizer: Tokenizer, where: str) -> list["array[int]"]:
    """Return the token ids of prompts, as compact integer arrays.

    Conversations are rendered by the tokenizer's chat template, which brings its own special tokens; plain texts get
    the special tokens that the tokenizer adds by default. Both as in TRL.

    Args:
        prompts: Texts, or conversations, with the keyword arguments of the chat template; all of one kind.
        tokenizer: A transformers tokenizer.
        where: Name of the dataset, for error messages.

    Raises:
        ValueError: If the kinds are mixed, a chat template is missing or fails, or a prompt has no token.
    """
    tokenized: list[array[int]] = []
    kind: type | None = None
    while chunk := list(islice(prompts, _CHUNK)):
        kind = kind or type(chunk[0][0])
        if any(type(prompt) is not kind for prompt, _ in chunk):
            raise ValueError(f"the prompts of {where} must be all texts or all lists of messages, got both")
        if kind is list and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"the prompts of {where} are messages, but the tokenizer has no chat_template: "
                "set tokenizer.chat_template, or use texts as prompts"
            )
        first = len(tokenized)
        texts = [
            _text(prompt, tokenizer, own, f"row {row} of {where}") for row, (prompt, own) in enumerate(chunk, first)
        ]
        options: dict[str, Any] = {} if kind is str else {"add_special_tokens": False}
        for ids in tokenizer(texts, **options)["input_ids"]:
            if len(ids) == 0:
                raise ValueError(f"a prompt must have at least one token, but row {len(tokenized)} of {where} has none")
            tokenized.append(array("i", ids))
    return tokenized


def _text(prompt: Prompt, tokenizer: Tokenizer, options: Options, where: str) -> str:
    try:
        text = prompt if isinstance(prompt, str) else render(prompt, tokenizer, options)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} must be text, got half of a character ({error}): mend or leave out the row"
        ) from error
    except Exception as error:  # templates raise errors of jinja2's, or whatever their own code raises
        raise ValueError(f"{where} cannot be asked through the chat template: {error}") from error
    return text
