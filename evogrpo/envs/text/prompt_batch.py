"""SingleTurnBatch: a batch of dataset prompts, and the scores of their completions."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import eq
from types import SimpleNamespace
from typing import Any

import numpy as np

from evogrpo.arrays import FloatArray
from evogrpo.envs.protocol import REPLY, Scores
from evogrpo.envs.text.compute_rewards import (
    KnownValues,
    RewardCall,
    RewardResult,
    StartedCall,
    compute_rewards,
)
from evogrpo.envs.text.reward_functions import OnRewardError, Reward, RewardInputs, StepRewards
from evogrpo.envs.text.reward_runner import RewardRunner
from evogrpo.envs.text.templates import Tokenizer, question_of
from evogrpo.extras import require
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Conversation
from evogrpo.text import printable, shown
from evogrpo.validation import FLOAT32_LIMIT, float32_number

MAX_NAME = 200
"""Maximum number of characters in the name of a metric."""
RESERVED_NAMES = {
    "slot", "index", "loss", "learning_rate", "step_kl", "step_target", "step_passes",
    "calibrated_lr", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "kl", "kl_coef",
    "entropy", "optimizer_steps", "tokens", "num_tokens", "step_time",
}  # fmt: skip
RESERVED_PREFIXES = ("rewards/", "completions/", "clip_ratio/", "sampling/", "tools/")
"""Names of built-in metrics and keys of a journal entry, which logged metrics cannot have."""


@dataclass(kw_only=True, eq=False)
class RewardLog:
    """Values that reward functions log by `log_extra` and `log_metric`, in TRL's form.

    Attributes:
        columns: Values of the completions table, by column and row.
        metrics: Values of each metric, with the number of completions of the call.
    """

    columns: dict[str, dict[int, Any]] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def log_extra(self, rows: Sequence[int], column: str, values: Sequence[Any]) -> None:
        """Add a value for each of these rows to a column."""
        if len(values) != len(rows):
            raise ValueError(
                f"log_extra needs {len(rows)} values, got {len(values)} for {shown(column)}."
            )
        values_by_row = self.columns.setdefault(str(column), {})
        values_by_row.update(zip(rows, values, strict=True))

    def log_metric(self, rows: Sequence[int], name: str, value: Any) -> None:
        """Add a value of a metric of these rows."""
        number = float32_number(value)
        if not isinstance(name, str) or len(name) > MAX_NAME or printable(name) != name:
            raise ValueError(
                f"The name of log_metric must be printable text of at most {MAX_NAME}"
                f" characters, got {shown(name)}."
            )
        if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"The log_metric name {name!r} is reserved. Choose another one.")
        if number is None:
            raise ValueError(
                f"log_metric values must be finite numbers of at most {FLOAT32_LIMIT:g}, got"
                f" {shown(value)} for {shown(name)}."
            )
        self.metrics.setdefault(name, []).append((len(rows), number))

    def take(self, count: int) -> tuple[dict[str, tuple[Any, ...]], dict[str, float]]:
        """Return the columns of `count` rows and the means of the metrics, and forget them."""
        # Rows without a value, such as those of failed calls, get None.
        columns = {}
        for name, values in self.columns.items():
            columns[name] = tuple(values.get(row) for row in range(count))
        means = {}
        for name, pairs in self.metrics.items():
            sizes, numbers = zip(*pairs, strict=True)
            # Each call counts by its number of completions.
            means[name] = float(np.average(numbers, weights=sizes))
        self.columns.clear()
        self.metrics.clear()
        return columns, means


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleTurnBatch:
    """A batch of dataset prompts; each conversation is one completion.

    Base class of the batches with several turns.

    Call `start_scoring` for finished groups, then `score` for all completions, or `cancel`.

    Attributes:
        prompts: Token ids of each prompt.
        rows: Dataset row of each prompt.
        rewards: The reward functions.
        weights: Weight of each reward function for each prompt.
        runner: Calls the functions.
        tokenizer: Decodes completions.
        skip_special_tokens: Leave special tokens out of the texts of completions.
        on_reward_error: "raise" or "exclude".
        progress: Number of learning steps taken, and of all learning steps (0 if unknown).
        max_turns: 1, except in subclasses with several turns.
        held_out: True for validation and test prompts. Failed rewards are computed once more before
            they are excluded.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]
    rewards: Sequence[Reward]
    weights: Sequence[Sequence[float]]
    runner: RewardRunner
    tokenizer: Tokenizer
    on_reward_error: OnRewardError
    progress: tuple[int, int] = (0, 0)
    max_turns: int = 1
    skip_special_tokens: bool = True
    held_out: bool = False
    # The rows of started calls are numbers in the whole batch (`Conversation.row`), not in a group.
    _started: list[StartedCall] = field(default_factory=list, init=False, repr=False)
    _log: RewardLog = field(default_factory=RewardLog, init=False, repr=False)

    @property
    def questions(self) -> tuple[str, ...]:
        """Question of each prompt; for messages the last user message."""
        texts = []
        for row in self.rows:
            if self.rewards[0].batched:
                texts.append(question_of(row["prompt"]))
            else:
                texts.append(str(row["question"]))
        return tuple(texts)

    def respond(self, conversations: Sequence[Conversation]) -> Sequence[Sequence[int] | None]:
        """Return None for each conversation: there is only one turn."""
        return [None] * len(conversations)

    @property
    def background_rewards(self) -> list[Reward]:
        """Rewards that can be computed in the background."""
        return [reward for reward in self.rewards if self.runner.in_background(reward.name)]

    def start_scoring(self, conversations: Sequence[Conversation]) -> None:
        """Start to compute the rewards of a finished group in the background.

        Call `score` later with the conversations of all groups, in the order of their rows. Its
        result is the same as without this call.
        """
        inputs = self._reward_inputs(conversations)
        # One call for each group and function; others are called by `score`.
        for reward in self.background_rewards:
            for group in reward.groups(inputs, range(len(conversations))):
                in_worker = self.runner.in_worker(reward.name)
                arguments = reward.arguments(inputs, group, in_worker=in_worker)
                # `score` gets the conversations in the order of their rows.
                rows = tuple(conversations[number].row for number in group)
                outcome = self.runner.submit(reward.name, arguments)
                self._started.append((RewardCall(reward, rows), outcome))

    def cancel(self) -> None:
        """Cancel all started groups."""
        self.runner.cancel([outcome for _, outcome in self._started])
        self._started.clear()

    def score(self, conversations: Sequence[Conversation], stop: Stop = NEVER) -> Scores:
        """Compute the rewards of conversations; see `PromptBatch.score`.

        `stop` is checked between calls.

        Raises:
            RewardError: If a reward function fails.
        """
        return self._score(conversations, {}, stop)

    def _score(
        self, conversations: Sequence[Conversation], known: KnownValues, stop: Stop
    ) -> Scores:
        """Compute the rewards of conversations, except for the values that are known."""
        # Started calls are used once: another `score` calls all functions again.
        started = list(self._started)
        self._started.clear()
        inputs = self._reward_inputs(conversations)
        result = compute_rewards(
            self.rewards,
            inputs,
            self.on_reward_error,
            self.runner,
            weights=np.array([self.weights[each.start] for each in conversations]),
            retry=self.held_out,
            started=started,
            known=known,
            stop=stop,
        )
        step_rewards = None
        if result.steps:
            step_rewards = self._step_rewards(result, inputs, conversations)
        columns, metrics = self._log.take(len(conversations))
        return Scores(
            rewards=result.rewards,
            components=result.components,
            completions=tuple(_display_text(turns) for turns in inputs.turns or ()),
            weights=result.weights,
            step_rewards=step_rewards,
            columns=columns,
            metrics=metrics,
            feedback=result.feedback if any(result.feedback) else (),
        )

    def _reward_inputs(self, conversations: Sequence[Conversation]) -> RewardInputs:
        """Return the arguments from which reward functions choose theirs."""
        turns = [self._turn_texts(conversation) for conversation in conversations]
        token_ids = [list(conversation.tokens) for conversation in conversations]
        texts = []
        for parts, ids in zip(turns, token_ids, strict=True):
            # A conversation of several turns is decoded as a whole, with the markers of replies.
            texts.append(parts[0] if len(parts) == 1 else self._text(ids))

        def trainer(numbers: Sequence[int], in_worker: bool) -> Mapping[str, Any]:
            rows = [conversations[number].row for number in numbers]
            return self._trainer_arguments(rows, in_worker=in_worker)

        return RewardInputs(
            rows=[self.rows[conversation.start] for conversation in conversations],
            texts=texts,
            token_ids=token_ids,
            groups=[(conversation.member, conversation.start) for conversation in conversations],
            turns=turns,
            trainer=trainer,
        )

    def _trainer_arguments(self, rows: Sequence[int], *, in_worker: bool) -> Mapping[str, Any]:
        """Return the trainer's arguments of a call for these rows, in TRL's form."""
        require("A reward function in TRL's form", "transformers")
        from transformers import TrainerState

        state = TrainerState(global_step=self.progress[0], max_steps=self.progress[1])
        if in_worker:  # a worker process cannot log, and need not import transformers
            return {"trainer_state": SimpleNamespace(**vars(state))}
        return {
            "trainer_state": state,
            "log_extra": lambda column, values: self._log.log_extra(rows, column, values),
            "log_metric": lambda name, value: self._log.log_metric(rows, name, value),
        }

    def _step_rewards(
        self, result: RewardResult, inputs: RewardInputs, conversations: Sequence[Conversation]
    ) -> FloatArray:
        """Return the `[n, t]` weighted reward at each sampled token.

        Rewards of whole completions are at the last one.
        """
        longest = max(map(len, inputs.token_ids))
        table = np.full((len(conversations), max(1, longest)), np.nan)
        for row, conversation in enumerate(conversations):
            ids = inputs.token_ids[row]
            # A user's own loop may give a completion without tokens.
            if np.isnan(result.rewards[row]) or not ids:
                continue
            # The last sampled token up to each position: rewards at tokens of a reply belong to it.
            positions_of_sampled = np.where(conversation.sampled, np.arange(len(ids)), 0)
            last_sampled = np.maximum.accumulate(positions_of_sampled)
            for number, (name, values) in enumerate(result.components.items()):
                if np.isnan(values[row]):
                    continue
                # A reward of the whole completion is at its last token.
                steps = StepRewards([values[row]], [len(ids) - 1])
                if name in result.steps:
                    steps = result.steps[name][row] or steps
                positions = token_positions(steps, ids, inputs.texts[row], self._text)
                for position, value in zip(positions, steps.values, strict=True):
                    column = last_sampled[position]
                    weighted = result.weights[row, number] * value
                    # NaN is "no reward here", so the first value replaces it.
                    table[row, column] = np.nansum([table[row, column], weighted])
        return table

    def _turn_texts(self, conversation: Conversation) -> list[str]:
        """Return the texts of completions and replies, in order."""
        return [self._text(list(part)) for part in conversation.turns]

    def _text(self, token_ids: list[int]) -> str:
        skip = self.skip_special_tokens
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip))


def _display_text(turns: Sequence[str]) -> str:
    """Return completions as they are, and replies in lines with the prefix `REPLY`."""
    parts = []
    for number, text in enumerate(turns):
        if number % 2:
            text = "\n" + REPLY + text.replace("\n", f"\n{REPLY}") + "\n"  # noqa: PLW2901
        parts.append(text)
    return "".join(parts)


def token_positions(
    rewards: StepRewards, token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]
) -> list[int]:
    """Return the token position of each value of a completion's step rewards.

    A character belongs to the token that completes it: if its bytes are spread over several tokens,
    to the last one.

    Args:
        rewards: The step rewards.
        token_ids: Tokens of the completion.
        text: `decode(token_ids)`.
        decode: The function that decoded the tokens to `text`.
    """
    if rewards.unit == "token" or not rewards.positions:
        return list(rewards.positions)
    # 1. Numbers of complete characters after each token, if tokens decode to the same text alone as
    #    in context.
    pieces = [decode([token]) for token in token_ids]
    ends = list(accumulate(map(len, pieces)))
    if "".join(pieces) != text:
        # Slower: decode every prefix, as spaces between words and parts of characters depend on
        # context.
        complete = []
        for count in range(1, len(token_ids)):
            prefix = decode(list(token_ids[:count]))
            # A prefix that ends within a character decodes to a replacement character, so only
            # leading characters that agree with the text are complete.
            complete.append(sum(takewhile(bool, map(eq, prefix, text))))
        # The running maximum keeps the counts sorted for `bisect_right`.
        ends = [*accumulate(complete, max), len(text)]
    # 2. The first token after which each character is complete.
    return [bisect_right(ends, position) for position in rewards.positions]
