"""From dataset rows to prompt token ids: conversation templates, chat templates and tokenizing."""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

Message = dict[str, str]
Prompt = str | list[Message]

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

    return [{"role": message["role"], "content": _FIELD.sub(fill, message["content"])} for message in template]


def check_messages(messages: object, where: str) -> list[Message]:
    """Return a conversation as a list of plain messages.

    Raises:
        ValueError: If it is not a non-empty sequence of {"role": str, "content": str}; `where` names it.
    """
    rule = f'{where} must be a non-empty list of {{"role": str, "content": str}}'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise ValueError(f"{rule}, got {messages!r:.200}")
    for message in messages:
        fields = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(f"{rule}, got the message {message!r:.200}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def render(messages: list[Message], tokenizer: Tokenizer) -> str:
    """Return the text of a conversation, ready to be continued by the model.

    A conversation that ends with an assistant message is continued inside that message (a prefill); any other gets
    the opening of an assistant turn.
    """
    prefill = messages[-1]["role"] == "assistant"
    if prefill and not messages[-1]["content"]:  # an empty prefill is the same as a fresh assistant turn
        messages, prefill = messages[:-1], False
    mode = "continue_final_message" if prefill else "add_generation_prompt"
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **{mode: True}))


def tokenize(prompts: Iterator[Prompt], tokenizer: Tokenizer, where: str) -> list["array[int]"]:
    """Return the token ids of prompts, as compact integer arrays.

    Conversations are rendered by the tokenizer's chat template, which brings its own special tokens; plain texts get
    the special tokens that the tokenizer adds by default. Both as in TRL.

    Args:
        prompts: Texts, or conversations; all of one kind.
        tokenizer: A transformers tokenizer.
        where: Name of the dataset, for error messages.

    Raises:
        ValueError: If the kinds are mixed, a chat template is missing, or a prompt has no token.
    """
    tokenized: list[array[int]] = []
    kind: type | None = None
    while chunk := list(islice(prompts, _CHUNK)):
        kind = kind or type(chunk[0])
        if any(type(prompt) is not kind for prompt in chunk):
            raise ValueError(f"the prompts of {where} must be all texts or all lists of messages, got both")
        if kind is list and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"the prompts of {where} are messages, but the tokenizer has no chat_template: "
                "set tokenizer.chat_template, or use texts as prompts"
            )
        texts = [prompt if isinstance(prompt, str) else render(prompt, tokenizer) for prompt in chunk]
        options: dict[str, Any] = {} if kind is str else {"add_special_tokens": False}
        for ids in tokenizer(texts, **options)["input_ids"]:
            if len(ids) == 0:
                raise ValueError(f"a prompt must have at least one token, but row {len(tokenized)} of {where} has none")
            tokenized.append(array("i", ids))
    return tokenized
