"""MultiTurnGym: a prompt dataset whose questions are talked about, a function of the user's replying in between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.checks import names_unknown, whole_number
from evogrpo.data import Conversation
from evogrpo.envs.fingerprint import code_hash
from evogrpo.envs.protocol import Split
from evogrpo.envs.text.datasets import TEMPLATE_OPTIONS, AnyTable, PromptEnvironment, tables_by_split
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.reward_calls import escaped_prints, restored_torch_settings
from evogrpo.envs.text.reward_functions import OnRewardError, RewardFunc, as_messages, make_rewards
from evogrpo.envs.text.scoring import SAMPLE_COMPLETIONS, Preflight
from evogrpo.envs.text.templates import Message, Options, Tokenizer, check_messages

Reply = Callable[[Mapping[str, Any], list[Message]], str | None]
"""(dataset row, the conversation so far as messages) -> what the user says next; None ends the conversation."""

_ASKED, _ANSWERED = "What is asked?", "This is answered."


@dataclass(frozen=True, kw_only=True)
class TurnMarkers:
    """How a tokenizer's chat template renders what stands between two completions.

    Only what is new is rendered and tokenised: what was sampled stays the tokens that were sampled.

    Attributes:
        tokenizer: A transformers tokenizer with a chat template.
        options: Keyword arguments of the template.

    Raises:
        ValueError: If it has none, or its template renders a turn otherwise once the next one follows.
    """

    tokenizer: Tokenizer
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("conversations need a tokenizer with a chat_template: set tokenizer.chat_template")
        self._between("Go on.", self.options)

    def tokens(self, reply: str, *, ended: bool, options: Options | None = None) -> tuple[int, ...]:
        """Return what a model reads between its last completion and its next: markers, the reply, markers.

        Args:
            reply: What the user says.
            ended: Whether the completion ended with an EOS, which the markers then do not repeat.
            options: Keyword arguments of the chat template.
        """
        between = self._between(reply, options or {})
        if ended:
            between = between.removeprefix(str(self.tokenizer.decode([self.tokenizer.eos_token_id])))
        return tuple(self.tokenizer([between], add_special_tokens=False)["input_ids"][0])

    def _between(self, reply: str, options: Options) -> str:
        messages = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}]
        options = {**self.options, **options, "tokenize": False}
        before = str(self.tokenizer.apply_chat_template(messages, **options))
        messages.append({"role": "user", "content": reply})
        after = str(self.tokenizer.apply_chat_template(messages, **options, add_generation_prompt=True))
        end = before.rfind(_ANSWERED)
        if end < 0 or not after.startswith(before):
            raise ValueError(
                "the tokenizer's chat_template must render a conversation so that a further turn only adds text behind "
                f"it, but {before!r} becomes {after!r}: set a chat_template that leaves earlier turns as they are"
            )
        return after[end + len(_ANSWERED) :]


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiTurnBatch(SingleTurnBatch):
    """Opened prompts that are talked about: `PromptBatch` of several turns.

    Attributes:
        reply: What the user says next.
        markers: What stands around it.
    """

    reply: Reply
    markers: TurnMarkers
    _replies: dict[tuple[int, ...], str] = field(default_factory=dict, init=False)

    def respond(self, transcripts: Sequence[Conversation]) -> list[tuple[int, ...] | None]:
        """Let the user's function reply; see `PromptBatch.respond`.

        Raises:
            ValueError: If there are no conversations, one names a start that is not open, or a reply is no text.
        """
        self._check(transcripts)
        return [self._reply(transcript) for transcript in transcripts]

    def _reply(self, transcript: Conversation) -> tuple[int, ...] | None:
        row = self.rows[transcript.start]
        prompt = check_messages(row["prompt"], "prompt")
        with escaped_prints(), restored_torch_settings():
            said = self.reply(row, [*prompt, *as_messages(self._spoken(transcript))])
        if said is None:
            return None
        if not isinstance(said, str):
            raise ValueError(f"reply must return a text, or None to end the conversation, got {said!r:.200}")
        ended = transcript.completions[-1][-1:] == (self.tokenizer.eos_token_id,)
        own = {name: value for name, value in (row.get(TEMPLATE_OPTIONS) or {}).items() if value is not None}
        tokens = self.markers.tokens(said, ended=ended, options=own)
        self._replies[tokens] = said
        return tokens

    def _spoken(self, transcript: Conversation) -> list[str]:
        """Return the texts of completions and replies in order, without the markers around them."""
        spoken = []
        for number, part in enumerate(transcript.turns):
            if number % 2 and part not in self._replies:
                raise ValueError("what was heard must be what `respond` returned to the same opening")
            spoken.append(self._replies[part] if number % 2 else self._text(list(part)))
        return spoken


class MultiTurnGym(PromptEnvironment):
    """A prompt dataset whose questions are talked about: completions and replies take turns, then rewards are given.

    The dataset has a column `prompt` of messages. After each completion but the last that `max_turns` allows,
    `reply(row, messages)` says what the user says next, or None where the conversation is over; nobody learns from the
    tokens of replies. The tokenizer's chat template puts markers around them, and what was sampled is never tokenised
    again. Replies should be a function of the row and the messages alone.

    Rewards come in TRL's form, `f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`: a
    completion is the list of all messages after the prompt, the model's as "assistant", the replies as "user", and its
    ids are all tokens after the prompt. Positions of `StepRewards` count in these, or in the text they decode to; what
    stands at a reply belongs to the last token said before it. The splits are those of `HuggingFaceGym`.

    Args:
        train_dataset: As for `HuggingFaceGym`.
        test_dataset: PromptSplit for the final report; None draws them from the training dataset.
        tokenizer: A transformers tokenizer with a chat template.
        reply: What the user says next.
        max_turns: Most completions in one conversation, at least 2.
        reward_funcs: One or several rewards.
        reward_weights: Factor of each of `reward_funcs` in the sum; None means 1 each.
        validation_dataset: PromptSplit for selection; None draws them from the training dataset.
        validation_size: How many to draw; see `HuggingFaceGym`.
        test_size: How many to draw; see `HuggingFaceGym`.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template, such as {"enable_thinking": False}; a
            column of that name says otherwise for its row.
        max_prompt_length: Longest prompt used, in tokens; None keeps all.
        on_reward_error: "raise", or "exclude": the conversation gets a NaN reward, with a warning.
        reward_timeout: Seconds that one call of a reward function may take; None = no limit.
        reward_workers: Processes in which rewards are computed; see `HuggingFaceGym`.
        seed: Seed of the training order and of drawn splits.

    Attributes:
        tokenizer: As given.
        seed: As given.
        filtered: How many rows each split left out, and why.
        observation_space: One prompt, as a sequence of token ids.
        action_space: One completion, as a sequence of token ids.

    Raises:
        ValueError: If an argument, a column, a split or the chat template does not fit.
    """

    @names_unknown
    def __init__(
        self,
        train_dataset: AnyTable,
        test_dataset: AnyTable | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        reply: Reply,
        max_turns: int,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        reward_weights: Sequence[float] | None = None,
        validation_dataset: AnyTable | None = None,
        validation_size: int | None = None,
        test_size: int | None = None,
        chat_template_kwargs: Options | None = None,
        max_prompt_length: int | None = None,
        on_reward_error: OnRewardError = "raise",
        reward_timeout: float | None = None,
        reward_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        if whole_number("max_turns", max_turns) < 2:
            raise ValueError(f"max_turns must be at least 2, got {max_turns}: HuggingFaceGym asks for one completion")
        if not callable(reply):
            raise ValueError(f"reply must be a function of a row and messages, got {reply!r:.200}")
        tables = tables_by_split(train_dataset, validation_dataset, test_dataset)
        super().__init__(
            tables,
            tokenizer,
            rewards=make_rewards(None, reward_funcs, reward_weights),
            template=None,
            columns=("prompt",),
            sizes={"validation": validation_size, "test": test_size},
            chat_template_kwargs=chat_template_kwargs,
            max_prompt_length=max_prompt_length,
            on_reward_error=on_reward_error,
            reward_timeout=reward_timeout,
            reward_workers=reward_workers,
            seed=seed,
        )
        if isinstance(tables["train"][0]["prompt"], str):
            raise ValueError(
                f"prompts of conversations must be lists of messages, got {tables['train'][0]['prompt']!r:.200}: write "
                '[{"role": "user", "content": ...}]'
            )
        self._reply, self._max_turns = reply, max_turns
        self._markers = TurnMarkers(tokenizer=self.tokenizer, options=self._options)

    def fingerprint(self) -> dict[str, str]:
        """Return also who replies; see `SupportsFingerprint`."""
        return {**super().fingerprint(), "reply": code_hash(self._reply), "max_turns": str(self._max_turns)}

    def preflight(self) -> Preflight:
        """Try the reward functions, see `PromptEnvironment.preflight`, and one reply.

        Raises:
            RewardError: If a reward function fails, or returns something that is no reward.
            ValueError: If `reply` fails, or returns neither a text nor None.
        """
        try_rewards = super().preflight()
        row = self._splits["train"].table[self._splits["train"].rows[0]]
        messages = [*check_messages(row["prompt"], "prompt"), {"role": "assistant", "content": SAMPLE_COMPLETIONS[0]}]
        try:
            with escaped_prints(), restored_torch_settings():
                said = self._reply(row, messages)
        except Exception as error:
            raise ValueError(f"reply(row, messages) failed on a made-up completion: {error!r:.200}") from error
        if said is not None and not isinstance(said, str):
            raise ValueError(f"reply must return a text, or None to end the conversation, got {said!r:.200}")
        return try_rewards

    def open(self, split: Split, starts: Sequence[int]) -> MultiTurnBatch:
        """Open questions of a split, each in [0, size(split)).

        Raises:
            ValueError: If the split or a start does not exist.
        """
        return MultiTurnBatch(
            **self._opened(split, starts), max_turns=self._max_turns, reply=self._reply, markers=self._markers
        )
