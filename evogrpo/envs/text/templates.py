"""Prompts of dataset rows: conversation templates, chat templates and tokenization."""

import json
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from evogrpo.chat_templates import ANSWER, QUESTION, closing_token, render_chat
from evogrpo.text import pluralize, shown
from evogrpo.validation import plain_list, refuse_unknown, without_none
from evogrpo.warnings import warn, warn_of_literal_newline

ROLES = (
    "system", "developer", "user", "assistant", "tool", "function", "model", "ipython",
    "environment", "documents",
)  # fmt: skip
Tokenizer = Any
"""A transformers tokenizer."""
Message = dict[str, Any]
Prompt = str | list[Message]
Options = Mapping[str, Any]
"""Keyword arguments of a chat template."""
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Column with keyword arguments of the chat template for one row, as in TRL."""
RESERVED_OPTIONS = {
    "conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message",
    "return_dict",
}  # fmt: skip

_FIELD_LIKE = re.compile(r"(?<![\w{])\{([^\W\d]\w*)\}(?!\})")
"""A name in single braces that follow no word: not those of `\\boxed{answer}`."""
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
"""A doubled brace, or a field with its name as the group."""
_DATE_LETTERS = "aAbBcdDeFGhHIjklmMnpPrRsStTuUVwWxXyYzZ"  # of the directives of `strftime`
_CHUNK = 1024  # prompts per call of the tokenizer


def check_template(template: Sequence[Mapping[str, str]]) -> tuple[Message, ...]:
    """Check a conversation template; return it as plain messages.

    Args:
        template: Messages {"role": ..., "content": ...} with fields in their contents: {question},
            {answer} and other columns or task settings. Doubled braces are literal ones.

    Raises:
        ValueError: If it is empty, a message is malformed, or {question} is missing.
    """
    messages = tuple(check_messages(template, where="conversation_template"))
    if "question" not in template_fields(messages):
        raise ValueError(f"conversation_template must contain {{question}}, got {list(messages)}.")
    return messages


def system_message(text: str, names: Collection[str]) -> Message:
    """Return a system prompt as a message of a template.

    Only {NAME} of these names are fields; all other braces are literal. Warn of other names in
    braces that look like fields, unlike those of JSON and LaTeX, and of a backslash with an n where
    a line break is meant.
    """
    warn_of_literal_newline("system_prompt", text)
    others = [name for name in _FIELD_LIKE.findall(text) if name not in names]
    if others:
        warn(
            f"system_prompt: {{{others[0]}}} stays as it is, because only task settings are fields"
            f" there. To insert a text, make {others[0]} a setting."
        )
    escaped = text.replace("{", "{{").replace("}", "}}")

    def restore(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[1] in names else match[0]

    return {"role": "system", "content": re.sub(r"\{\{(\w+)\}\}", restore, escaped)}


def template_fields(template: Sequence[Message]) -> list[str]:
    """Return the names of the fields of a template, in order."""
    text = " ".join(message["content"] for message in template)
    return list(filter(None, _FIELD.findall(text)))


def literal_names(template: Sequence[Message]) -> list[str]:
    """Return the words in doubled braces of a template, which are literal text and no fields."""
    text = " ".join(message["content"] for message in template)
    return re.findall(r"\{\{(\w+)\}\}", text)


def fill_template(template: Sequence[Message], values: Mapping[str, Any]) -> list[Message]:
    """Insert values by name into the fields of a template.

    Uses a single pass instead of `str.format`: braces and field names inside values are kept.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        # Without a name: an escaped brace.
        return str(values[name]) if name else match[0][0]

    return [{**message, "content": _FIELD.sub(fill, message["content"])} for message in template]


def check_messages(messages: object, where: str) -> list[Message]:
    """Check a conversation; return it as a list of dicts, with any additional keys.

    Raises:
        ValueError: If it is not a non-empty sequence of {"role": str, "content": str}; content is
            optional with `tool_calls`, and may be a list of parts {"type": "text", "text": str},
            which are joined. The error starts with `where`.
    """
    rule = f'{where} must be a non-empty list of {{"role": str, "content": str}}'
    listed = plain_list(messages)  # data frames store lists as arrays
    if not listed:
        raise ValueError(f"{rule}, got {shown(messages, 200)}.")
    plain = []
    for message in listed:
        fields = {}
        if isinstance(message, Mapping):
            # Arrow tables give every message the keys of all messages, with None for missing ones.
            fields = without_none(message)
        # A message that only calls tools may have no text.
        if fields.get("tool_calls"):
            fields.setdefault("content", "")
        parts = plain_list(fields.get("content"))
        if parts:
            fields["content"] = "".join(_text_of_part(part, where) for part in parts)
        is_text = [isinstance(fields.get(key), str) for key in ("role", "content")]
        if not all(is_text):
            raise ValueError(f"{rule}, got the message {shown(message, 200)}.")
        refuse_unknown(f"role in {where}:", [fields["role"]], ROLES)
        plain.append(fields)
    return plain


def _text_of_part(part: object, where: str) -> str:
    """Return the text of one part of a content; raise ValueError for images and other parts."""
    text: object = part
    if isinstance(part, Mapping):
        is_text = part.get("type", "text") == "text"
        text = part.get("text") if is_text else None
    if not isinstance(text, str):
        raise ValueError(
            f'{where} may have contents with parts {{"type": "text", "text": str}} only, got'
            f" {shown(part, 200)}. Models get text: remove images, audio and files."
        )
    return text


def check_prompt(prompt: Any, row_name: str) -> Prompt:
    """Return a value of the column prompt: text, or messages.

    Raises:
        ValueError: If messages are malformed, or written as text.
    """
    if not isinstance(prompt, str):
        return check_messages(prompt, f"{row_name}: prompt")
    # CSV files contain messages as text, which the chat template would not see.
    if re.match(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""", prompt):
        raise ValueError(
            f"{row_name} has messages that are written as text as prompt: {shown(prompt, 80)}. Read"
            " them with json.loads, so that they get the chat template."
        )
    return prompt


def question_of(prompt: Prompt) -> str:
    """Return the text of a prompt: of messages the last one of the user, or the last one."""
    if isinstance(prompt, str):
        return prompt
    messages = check_messages(prompt, "prompt")
    of_user = [message for message in messages if message["role"] == "user"]
    return str((of_user or messages)[-1]["content"])


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens of a tokenizer, which it finds in any text."""
    # Some are declared, others added with a flag.
    tokens = set(getattr(tokenizer, "all_special_tokens", ()))
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    tokens.update(token.content for token in added.values() if token.special)
    return sorted(token for token in tokens if token)


def _is_prefill(last: Message) -> bool:
    """Return True for a message that the model continues."""
    return last["role"] == "assistant" and not last.get("tool_calls")


def render(messages: list[Message], tokenizer: Tokenizer, options: Options | None = None) -> str:
    """Render a conversation for the model to continue.

    If the last message is from the assistant, the model continues it (prefill); otherwise an
    assistant turn is opened.

    Args:
        messages: The conversation.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If the template omits tool calls of the conversation.
    """
    # 1. Render, with the last message open or an assistant turn opened.
    mode = "add_generation_prompt"
    if _is_prefill(messages[-1]):
        if messages[-1]["content"]:
            mode = "continue_final_message"
        else:  # an empty prefill is the same as a fresh assistant turn
            messages = messages[:-1]
    keywords = {**(options or {}), mode: True}
    text = render_chat(tokenizer, messages, **keywords)
    # 2. Tool calls must change the text.
    # A template may ignore keys that it does not have.
    has_calls = any(message.get("tool_calls") for message in messages)
    if has_calls and render_chat(tokenizer, _without(messages, "tool_calls"), **keywords) == text:
        raise ValueError(
            "The tokenizer's chat_template does not render tool_calls. Set one that does."
        )
    return text


def render_reply(
    messages: list[Message], reply: Sequence[Message], tokenizer: Tokenizer, options: Options
) -> tuple[str, str]:
    """Return a conversation as text, without and with a reply and the start of the next turn.

    Args:
        messages: The conversation; ends with a message of the assistant.
        reply: Messages of the user or of tools.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If the template fails, or renders earlier turns differently when a reply
            follows.
    """
    try:
        before = render_chat(tokenizer, messages, **options)
        after = render_chat(tokenizer, [*messages, *reply], **options, add_generation_prompt=True)
    except Exception as error:  # templates may raise jinja2's errors or any others
        raise ValueError(
            f"The tokenizer's chat_template cannot render a further turn: {error}. Set another"
            " tokenizer.chat_template."
        ) from error
    # Sampled tokens are kept, so the text before them must stay as it was.
    if not after.startswith(before):
        raise ValueError(
            f"chat_template must leave earlier turns unchanged when a turn is added, but {before!r}"
            f" becomes {after!r}. Set another tokenizer.chat_template; TRL has some"
            " (get_training_chat_template)."
        )
    return before, after


def reply_tokens(
    assistant: Message,
    reply: Sequence[Message],
    tokenizer: Tokenizer,
    options: Options,
    completion: Sequence[int],
) -> tuple[int, ...]:
    """Return the tokens between two completions: a reply with the markers around it.

    Only this new text is rendered and tokenized; sampled tokens stay as they are.

    Args:
        assistant: Message that stands for the completion before the reply.
        reply: Messages of the user or of tools.
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.
        completion: Token ids of the completion before the reply. If it ends with a special token or
            with the text that closes a turn, the markers do not close the turn once more.

    Raises:
        ValueError: If there is no template, or it renders earlier turns differently once another
            turn follows.
    """
    before, after = render_reply([QUESTION, assistant], reply, tokenizer, options)
    # 1. Find the markers that end a turn of the assistant: they follow the text of a plain answer.
    plain = render_chat(tokenizer, [QUESTION, ANSWER], **options)
    answer = ANSWER["content"]
    if answer not in plain:
        raise ValueError(
            f"chat_template must render the text of assistant messages, got {shown(plain)}. Set"
            " another template."
        )
    # An answer may occur in a system message too: the last one counts.
    closing = plain[plain.rfind(answer) + len(answer) :]
    # 2. Some templates end a turn with tool calls differently; then only what follows it is
    #    rendered.
    if not before.endswith(closing):
        closing = ""
    # 3. Leave out what the completion has already written of the closing markers. It may end with
    #    the token of the template, or with another token that ends a turn.
    last = list(completion[-1:])
    ending = str(tokenizer.decode(last))
    is_special = bool(last) and not tokenizer.decode(last, skip_special_tokens=True)
    if is_special and not closing.startswith(ending):
        # Another token has ended the turn: only what follows the template's own one is missing.
        marker = closing_token(tokenizer, options)
        if marker is not None and marker in closing:
            closing = closing.partition(marker)[2]
    # The completion may end with the marker itself, or with a part of the closing text.
    between = (closing + after[len(before) :]).removeprefix(ending)
    # 4. Warn of replies that the model reads as something else.
    for message in reply:
        if not _contains(between, message["content"]):
            warn(
                f"The chat template changes the text of replies ({message['role']}), so the model"
                " reads another text. Set tokenizer.chat_template to one that keeps it.",
                rank_zero_only=False,
            )
        for token in special_tokens(tokenizer):
            if token in message["content"]:
                warn(
                    f"A reply ({message['role']}) contains {token!r}, which the model reads as a"
                    " special token. Remove it from the reply.",
                    rank_zero_only=False,
                )
    return tuple(tokenizer([between], add_special_tokens=False)["input_ids"][0])


def numbered(number: int, where: str) -> str:
    """Return the name of a row in messages."""
    return f"Row {number} (counted from 0) of {where}"


def row_options(row: Mapping[str, Any]) -> Options:
    """Return the template options of a dataset row.

    Arrow tables give every row the keys of all rows, with None for missing ones.
    """
    options = row.get(TEMPLATE_OPTIONS) or {}
    return without_none(options)


def check_options(options: object, where: str) -> Options:
    """Check keyword arguments of a chat template.

    Raises:
        ValueError: If they are not keyword arguments, are set by the environment, or have the text
            "true" or "false" instead of a boolean.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        example = '{"enable_thinking": False}'
        raise ValueError(
            f"{where} must be a mapping of keyword arguments, such as {example}, got"
            f" {shown(options, 200)}."
        )
    # These are arguments of `apply_chat_template`.
    reserved = sorted(RESERVED_OPTIONS & options.keys())
    if reserved:
        raise ValueError(
            f"{where} must not contain {', '.join(reserved)}, which the environment sets."
            " Remove it."
        )
    for name, value in options.items():
        # A template takes any text as true, "false" too.
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            raise ValueError(f"{where}: {name} must be True or False, got the text {value!r}.")
    return options


def inserts_date(template: object) -> bool:
    """Return True if a chat template inserts the date, by `strftime_now` of transformers."""
    return isinstance(template, str) and "strftime_now" in template


def dated_template(template: str, date: datetime) -> str:
    """Return a chat template in which `strftime_now` formats this date."""
    # transformers passes no functions to templates, so the function is a macro that replaces each
    # directive. A loop compiles in milliseconds; a chain of filters, one inside the other, takes
    # seconds.
    pairs = []
    for letter in _DATE_LETTERS:
        for directive in (f"%{letter}", f"%-{letter}"):
            with suppress(ValueError):  # one that this system does not have
                pairs.append((directive, date.strftime(directive)))
    # The empty text keeps a newline at the start of the template, which would be removed after a
    # block.
    return (
        "{% macro strftime_now(format) %}{% set ns = namespace(text=format) %}{% for"
        f" directive, value in {pairs} %}}{{% set ns.text = ns.text | replace(directive, value)"
        f" %}}{{% endfor %}}{{{{ ns.text }}}}{{% endmacro %}}{{{{ '' }}}}{template}"
    )


def tokenize(
    prompts: Sequence[tuple[Prompt, Options]],
    tokenizer: Tokenizer,
    where: str,
    *,
    check: bool = True,
) -> list["array[int]"]:
    """Return the token ids of prompts, as compact integer arrays.

    Special tokens are those of TRL: messages get the chat template's, plain text the tokenizer's
    default ones. Warns of prompts that the chat template or the tokenizer changes, once for each
    kind of change.

    Args:
        prompts: Text or messages (the same for all), with keyword arguments of the chat template.
        tokenizer: A transformers tokenizer.
        where: Name of the dataset, for messages.
        check: Look for changes of the prompts.

    Raises:
        ValueError: If text and messages are mixed, a chat template is missing, fails or leaves a
            message out, or a prompt is empty.
    """
    kinds = {type(prompt) for prompt, _ in prompts}
    if len(kinds) > 1:
        raise ValueError(
            f"Prompts of {where} must all be text or all be lists of messages, got both."
        )
    tokenized: list[array[int]] = []
    changes = _Changes(tokenizer=tokenizer, where=where)
    for first in range(0, len(prompts), _CHUNK):
        # 1. Render and tokenize.
        texts = []
        chunk = prompts[first : first + _CHUNK]
        for row, (prompt, options) in enumerate(chunk, first):
            text = _text(prompt, tokenizer, options, numbered(row, where))
            if check and not isinstance(prompt, str):
                changes.check(row, prompt, options, text)
            texts.append(text)
        ids_of_texts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if str in kinds:
            ids_of_texts = _with_special_tokens(texts, ids_of_texts, tokenizer)
        # 2. Compare the tokens with the texts.
        for row, (text, ids) in enumerate(zip(texts, ids_of_texts, strict=True), first):
            if len(ids) == 0:
                raise ValueError(
                    f"{numbered(row, where)} has a prompt without tokens. Remove the row."
                )
            if check:
                changes.check_tokens(row, text, ids)
            tokenized.append(array("i", ids))
    # 3. Warn of changes, and of arguments of the template that have no effect.
    if check:
        changes.warn()
        _warn_of_unused_options(prompts, tokenizer, where)
    return tokenized


def _warn_of_unused_options(
    prompts: Sequence[tuple[Prompt, Options]], tokenizer: Tokenizer, where: str
) -> None:
    """Warn of arguments of the chat template that it does not contain."""
    names: set[str] = set()
    # The option chat_template is the template itself.
    words = {"chat_template"}
    problem = "text prompts do not use"
    # A word of a template may be the name of an option; words of all templates count.
    templates = set()
    for prompt, options in prompts:
        for name, value in options.items():
            if value is not None:
                names.add(name)
        if not isinstance(prompt, str):
            problem = "the chat template does not contain"
            templates.add(str(options.get("chat_template") or tokenizer.chat_template))
    for template in templates:
        words.update(re.findall(r"\w+", template))
    unused = sorted(names - words)
    if unused:
        warn(
            f"{TEMPLATE_OPTIONS} of {where}: {problem} {', '.join(unused)}. Check the name, or"
            " remove it."
        )


def _with_special_tokens(
    texts: list[str], plain: list[list[int]], tokenizer: Tokenizer
) -> list[list[int]]:
    """Return the token ids of texts with the tokenizer's special tokens.

    A text that has its BOS gets no second one.

    Raises:
        ValueError: If the tokenizer adds tokens after a text: the model would continue after the
            end.
    """
    added: list[list[int]] = tokenizer(texts)["input_ids"]
    # A tokenizer adds the same tokens to all texts, so the first text is enough.
    extra = len(added[0]) - len(plain[0])
    if extra > 0 and added[0][extra:] != plain[0]:
        raise ValueError(
            "The tokenizer must add no tokens after a prompt, got"
            f" {tokenizer.decode(added[0][-1:])!r}. Set tokenizer.add_eos_token = False."
        )
    bos = getattr(tokenizer, "bos_token", None)
    result = []
    for text, ids, plain_ids in zip(texts, added, plain, strict=True):
        # A user may have written the BOS token into the text.
        has_bos = bos and text.startswith(bos)
        result.append(plain_ids if has_bos else ids)
    return result


_UNSEEN_KEYS = {"role", "content", "tool_calls", "tool_call_id"}
"""Keys of messages that templates show in another way, or that only link messages."""


@dataclass(kw_only=True)
class _Changes:
    """Changes of prompts on their way to tokens, found row by row.

    Attributes:
        tokenizer: A transformers tokenizer.
        where: Name of the dataset, for messages.
        found: Row and description of each change, by kind.
    """

    tokenizer: Tokenizer
    where: str
    found: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    _shapes: set[str] = field(default_factory=set)
    _special: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._special = special_tokens(self.tokenizer)

    def add(self, kind: str, row: int, description: str) -> None:
        """Record a change of one row."""
        self.found.setdefault(kind, []).append((row, description))

    def warn(self) -> None:
        """Warn once of each kind of change."""
        for changes in self.found.values():
            row, description = changes[0]
            more = ""
            others = len({number for number, _ in changes}) - 1
            if others:
                more = f" {pluralize(others, 'other row')} changed in the same way."
            warn(f"{numbered(row, self.where)}: {description}.{more}")

    def check(self, row: int, messages: list[Message], options: Options, text: str) -> None:
        """Compare a conversation with its rendered text.

        Raises:
            ValueError: If the chat template leaves out a message.
        """
        # 1. Once for messages of the same roles and keys: find messages and keys that are left out.
        shape = [(each["role"], bool(each["content"]), sorted(each)) for each in messages]
        # Rendering takes long, and what is left out depends on the shape alone.
        key = repr((shape, options))
        if key not in self._shapes:
            self._shapes.add(key)
            self._check_shape(row, messages, options)
        # 2. For each row: find contents that are changed, and special tokens in them.
        for number, message in enumerate(messages):
            name = _named(messages, number)
            content = message["content"]
            if not _contains(text, content):
                change = f"the chat template changes the content of {name}: {shown(content)}"
                self.add("content", row, change)
            for token in self._special:
                if token in content:
                    change = f"{name} contains {token!r}, which the model reads as a special token"
                    self.add("token", row, change)
        last = messages[-1]
        if _is_prefill(last) and not text.endswith(last["content"]):
            change = (
                f"the chat template changes the end of the last message {shown(last['content'])}"
            )
            self.add("prefill", row, change)

    def _check_shape(self, row: int, messages: list[Message], options: Options) -> None:
        """Find messages and keys that the chat template leaves out."""
        missing = _left_out(messages, self.tokenizer, options)
        if missing:
            raise ValueError(
                f"{numbered(row, self.where)}: the chat template leaves out"
                f" {_named(messages, missing[0])}. Remove the message, or set a chat template that"
                " renders it."
            )
        for name in _unused_keys(messages, self.tokenizer, options):
            change = f"the chat template does not use the key {shown(name)} of messages"
            self.add(f"key {name}", row, change)

    def check_tokens(self, row: int, text: str, ids: Sequence[int]) -> None:
        """Record a change if the tokens of a rendered text do not decode to it."""
        # Spaces may differ: some tokenizers begin with one, or drop those beside special tokens.
        read = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if "".join(text.split()) in "".join(read.split()):
            return
        # Show both from the first character that differs.
        begin = 0
        for position, (character, decoded) in enumerate(zip(text, read, strict=False)):
            if character != decoded:
                begin = position
                break
        before = shown(text[begin:], 40)
        change = f"the tokenizer changes the text {before} to {shown(read[begin:], 40)}"
        self.add("tokens", row, change)


def _named(messages: Sequence[Message], number: int) -> str:
    return f"message {number} ({messages[number]['role']})"


def _left_out(messages: list[Message], tokenizer: Tokenizer, options: Options) -> list[int]:
    """Return the positions of messages that the chat template leaves out."""
    # Contents of real messages may occur elsewhere in the text by chance.
    markers = {}
    marked = []
    for number, message in enumerate(messages):
        content = ""
        if message["content"]:
            content = f"content-{number}-of-a-message"
            markers[number] = content
        marked.append({**message, "content": content})
    try:
        text = render(marked, tokenizer, options)
    except Exception:  # noqa: BLE001 (a template may refuse other contents)
        return []
    return [number for number, marker in markers.items() if marker not in text]


def _unused_keys(messages: list[Message], tokenizer: Tokenizer, options: Options) -> list[str]:
    """Return the keys of messages without which the rendered text is the same."""
    names: set[str] = set()
    for message in messages:
        names |= message.keys()
    names -= _UNSEEN_KEYS
    if all(message["role"] == "tool" for message in messages if "name" in message):
        names.discard("name")  # of a tool: most templates show the result alone
    if not names:
        return []
    text = render(messages, tokenizer, options)
    unused = []
    for name in sorted(names):
        with suppress(Exception):  # a template may require the key
            if render(_without(messages, name), tokenizer, options) == text:
                unused.append(name)
    return unused


def _without(messages: Sequence[Message], key: str) -> list[Message]:
    """Return messages without a key."""
    others = [dict(message) for message in messages]
    for message in others:
        message.pop(key, None)
    return others


def _contains(text: str, content: str) -> bool:
    """Return True if a text contains a content, without spaces around it or as a JSON string."""
    # Templates strip contents, or write arguments and results as JSON.
    stripped = content.strip()
    as_json = json.dumps(stripped)
    as_unicode_json = json.dumps(stripped, ensure_ascii=False)
    # Without the quotation marks.
    forms = (stripped, as_json[1:-1], as_unicode_json[1:-1])
    return any(form in text for form in forms)


def _text(prompt: Prompt, tokenizer: Tokenizer, options: Options, where: str) -> str:
    """Return a prompt as text; `where` names its row in errors."""
    try:
        text = prompt if isinstance(prompt, str) else render(prompt, tokenizer, options)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} must be valid text, got an incomplete character ({error})."
        ) from error
    except Exception as error:  # templates may raise jinja2's errors or any others
        raise ValueError(f"{where} cannot be rendered by the chat template: {error}") from error
    return text
