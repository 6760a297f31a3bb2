"""MultiTurnGym: a prompt dataset with conversations, in which a user function replies."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from evogrpo.chat_templates import ANSWER, QUESTION
from evogrpo.config.task_settings import TaskSettings
from evogrpo.envs.fingerprint import code_hash
from evogrpo.envs.protocol import Split
from evogrpo.envs.text.datasets import AnyTable
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.envs.text.prompt_settings import PromptOptions
from evogrpo.envs.text.reward_functions import (
    Reward,
    RewardFunc,
    Weights,
    as_messages,
    make_rewards,
    own_copy,
    own_row,
)
from evogrpo.envs.text.templates import (
    Message,
    Options,
    Tokenizer,
    check_messages,
    render_reply,
    reply_tokens,
    row_options,
)
from evogrpo.envs.text.user_functions import call_sync, is_async
from evogrpo.records import Conversation
from evogrpo.text import escaped_prints, shown
from evogrpo.validation import lists_options, names_unknown, whole_between
from evogrpo.warnings import warn

Reply = Callable[[Mapping[str, Any], list[Message]], str | None]
"""(dataset row, conversation so far) -> next user message, or None to end the conversation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiTurnBatch(SingleTurnBatch):
    """A `PromptBatch` of multi-turn conversations.

    Attributes:
        reply: Returns the next user message.
        options: Keyword arguments of the chat template.
    """

    reply: Reply
    options: Options
    # Texts of replies by row, number of the turn and tokens: different texts may have the same
    # tokens.
    _replies: dict[tuple[int, int, tuple[int, ...]], str] = field(default_factory=dict, init=False)

    def respond(self, conversations: Sequence[Conversation]) -> list[tuple[int, ...] | None]:
        """Call the user's function; see `PromptBatch.respond`.

        Raises:
            ValueError: If the function fails or returns no text.
        """
        replies: list[tuple[int, ...] | None] = []
        for conversation in conversations:
            row = self.rows[conversation.start]
            text = self._reply_text(row, self._turn_texts(conversation))
            if text is None:
                replies.append(None)
                continue
            # Options of the row override those of the environment.
            options = {**self.options, **row_options(row)}
            completion = conversation.completions[-1]
            message = {"role": "user", "content": text}
            tokens = reply_tokens(ANSWER, [message], self.tokenizer, options, completion)
            # Decoding the tokens would add the markers of the template.
            self._replies[conversation.row, len(conversation.turns), tokens] = text
            replies.append(tokens)
        return replies

    def _reply_text(self, row: Mapping[str, Any], turns: Sequence[str]) -> str | None:
        """Return the next message of the user, or None if the conversation is over."""
        # Copies, which the function may change.
        prompt = check_messages(own_copy(row["prompt"], "prompt"), "prompt")
        messages = [*prompt, *as_messages(turns)]
        with escaped_prints():
            result = call_sync(self.reply, ((own_row(row), messages), {}))
        if isinstance(result, BaseException):
            raise ValueError(f"reply raised {shown(result, 200)}") from result
        if result is None:
            return None
        if not isinstance(result, str):
            raise ValueError(
                "reply must return text, or None to end the conversation, got"
                f" {shown(result, 200)}."
            )
        try:
            # Lone surrogates cannot be tokenized.
            result.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"reply must return valid text, got an incomplete character ({error})."
            ) from error
        return result

    def _turn_texts(self, conversation: Conversation) -> list[str]:
        """Return the texts of completions and replies in order, without the markers of replies."""
        texts = []
        for number, part in enumerate(conversation.turns):
            # Completions and replies alternate.
            if number % 2:
                text = self._replies.get((conversation.row, number, part))
            else:
                text = self._text(list(part))
            if text is None:
                raise ValueError(
                    "replies of conversations must come from `respond` of the same batch."
                )
            texts.append(text)
        return texts


def _check_reply(reply: object) -> None:
    """Raise ValueError if `reply` is not a plain function of a row and messages, in this order."""
    rule = "reply must be a function of (row, messages)"
    if not callable(reply):
        raise ValueError(f"{rule}, got {shown(reply, 200)}.")
    if is_async(reply):
        raise ValueError(
            f"{rule} without async, got {shown(reply, 200)}. Use asyncio.run inside it."
        )
    try:
        signature = inspect.signature(reply)
    except (TypeError, ValueError):  # some functions in C have none
        return
    try:
        signature.bind({}, [])
    except TypeError as error:
        raise ValueError(f"{rule}, got {signature}.") from error
    # Swapped names would be called without an error.
    names = list(signature.parameters)
    if names[:1] == ["messages"] or names[1:2] == ["row"]:
        raise ValueError(f"{rule} in this order, got {signature}. Swap its parameters.")


class MultiTurnGym(PromptEnvironment):
    """A prompt dataset with multi-turn conversations, in which completions and replies alternate.

    The dataset has a column `prompt` of messages. After each completion except the last that
    `max_turns` allows, `reply(row, messages)` returns the next user message, or None to end the
    conversation. It should be a function of its arguments alone, which are copies. Tokens of
    replies are masked in the loss. The tokenizer's chat template renders the markers around
    replies; sampled tokens are never tokenized again.

    Rewards have TRL's form, `f(prompts=, completions=, completion_ids=, **columns) -> list[float |
    None]`. A completion is the list of all messages after the prompt, with roles "assistant"
    (model) and "user" (replies), and its ids are all tokens after the prompt. Positions of
    `StepRewards` refer to these tokens, or to the text they decode to. Rewards at tokens of a reply
    count for the last sampled token before it. Splits are those of `HuggingFaceGym`.

    Args:
        train_dataset: As for `HuggingFaceGym`.
        test_dataset: Questions for the final report; None = draw them from the training dataset.
        tokenizer: A transformers tokenizer with a chat template.
        reply: Function that returns the next user message.
        max_turns: Maximum number of completions in a conversation, at least 2.
        reward_funcs: One or several rewards.
        reward_weights: Factor of each of `reward_funcs` in the sum, in their order or by name; 1 if
            not given.
        options: Other options; see `evogrpo.envs.text.prompt_settings.PromptOptions`.

    Attributes:
        tokenizer: The tokenizer.
        seed: The seed.
        filtered: Number of rows left out by split and reason, as `Filtered`.
        observation_space: One prompt, as a sequence of token ids.
        action_space: One completion, as a sequence of token ids.

    Raises:
        ValueError: If an argument, a column, a split or the chat template is invalid.
    """

    @names_unknown
    @lists_options(PromptOptions.__annotations__, PromptEnvironment.__init__)
    def __init__(
        self,
        train_dataset: AnyTable,
        test_dataset: AnyTable | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        reply: Reply,
        max_turns: int,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        reward_weights: Weights | None = None,
        **options: Unpack[PromptOptions],
    ) -> None:
        max_turns = whole_between("max_turns", max_turns, 2)
        _check_reply(reply)
        rewards = make_rewards(None, reward_funcs, reward_weights)
        self._reply = reply
        self._max_turns = max_turns
        # Hashed before the first call, which may change variables that the function refers to.
        self._reply_code = code_hash(reply)
        super().__init__(train_dataset, test_dataset, tokenizer, rewards=rewards, **options)
        # Raises if the template is not suitable.
        message = {"role": "user", "content": "Go on."}
        tokens = reply_tokens(ANSWER, [message], self.tokenizer, self._options, ())
        if message["content"] not in self.tokenizer.decode(tokens):
            raise ValueError(
                "The tokenizer's chat_template must render replies of the user. Set one that does."
            )
        # Sampled tokens stay as they are, but other programs render earlier turns with the
        # template.
        thoughts = {"role": "assistant", "content": "<think>\nWhy?\n</think>\n\nSo."}
        try:
            render_reply([QUESTION, thoughts], [message], self.tokenizer, self._options)
        except ValueError:
            warn(
                "The chat template removes <think> blocks of earlier turns, but training keeps"
                " them. Other programs will show the model other prompts. Set a template that keeps"
                " them; TRL has some (get_training_chat_template)."
            )

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of the questions, prompts, reward functions and reply.

        See `SupportsFingerprint`.
        """
        return {
            **super().fingerprint(),
            "reply": self._reply_code,
            "max_turns": str(self._max_turns),
        }

    def _check_read(self, name: str, functions: Sequence[Reward]) -> None:
        """Accept every setting: `reply` gets the whole row."""

    def _measures(self, name: str) -> bool:
        """Return True for every setting: `reply` gets the whole row."""
        return True

    def make_batch(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings] = ()
    ) -> MultiTurnBatch:
        """Return a batch of prompts of a split; see `PromptEnvironment.make_batch`.

        Raises:
            ValueError: If the split or an index does not exist.
        """
        return MultiTurnBatch(
            **self._batch_fields(split, starts, settings),
            max_turns=self._max_turns,
            reply=self._reply,
            options=self._options,
        )
