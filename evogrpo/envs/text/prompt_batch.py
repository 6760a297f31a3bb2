"""Batches of dataset prompts: sampled conversations are rewarded, and reward functions may log about them."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.data import Conversation
from evogrpo.envs.protocol import REPLY, Scores
from evogrpo.envs.text.reward_calls import PendingJob, RewardRunner
from evogrpo.envs.text.reward_functions import OnRewardError, Reward, RewardInputs
from evogrpo.envs.text.scoring import RewardResult, compute_rewards
from evogrpo.envs.text.step_rewards import token_positions
from evogrpo.envs.text.templates import Tokenizer, check_messages
from evogrpo.interruption import NEVER, Stop

RESERVED_NAMES = ("slot", "index")
"""Keys beside the metrics in a journal."""


@dataclass(kw_only=True)
class TrainingProgress:
    """Training progress, for the `trainer_state` of reward functions.

    Attributes:
        step: Learning steps taken.
        total_steps: All learning steps; 0 if unknown.
    """

    step: int = 0
    total_steps: int = 0


@dataclass(kw_only=True)
class RewardLog:
    """Values that reward functions log about a batch of completions.

    Attributes:
        columns: Values per completion, by column of the completions table.
        metrics: Values about the whole batch, by metric.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add values to a column of the completions table, one per completion."""
        self.columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Add a value of a metric. Several values are averaged.

        Raises:
            ValueError: If the name is reserved, or the value is not a finite number.
        """
        value = value.tolist() if hasattr(value, "tolist") else value
        if str(name) in RESERVED_NAMES:
            raise ValueError(f"The log_metric name {name!r} is reserved. Choose another one.")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"log_metric values must be finite numbers, got {value!r:.80} for {name!r:.80}.")
        self.metrics.setdefault(str(name), []).append(float(value))

    def trainer_arguments(self, progress: TrainingProgress, *, in_process: bool) -> Mapping[str, Any]:
        """Return the trainer's arguments of reward functions; worker processes cannot log."""
        from transformers import TrainerState

        state = TrainerState(global_step=progress.step, max_steps=progress.total_steps)
        if not in_process:
            return {"trainer_state": SimpleNamespace(**vars(state))}  # pickled without transformers
        return {"trainer_state": state, "log_extra": self.log_extra, "log_metric": self.log_metric}


LogPart = tuple[Sequence[int], RewardLog]
"""Row indices of completions, and the values logged about them."""


def merge_columns(parts: Sequence[LogPart], count: int) -> dict[str, tuple[Any, ...]]:
    """Return the logged columns that have exactly one value for each of `count` completions."""
    merged: dict[str, tuple[Any, ...]] = {}
    for name in dict.fromkeys(name for _, log in parts for name in log.columns):
        logged = [(rows, log.columns[name]) for rows, log in parts if name in log.columns]
        if all(len(rows) == len(values) for rows, values in logged):
            pairs = (pair for each in logged for pair in zip(*each, strict=True))
            in_order = sorted(pairs, key=lambda pair: pair[0])
            if [row for row, _ in in_order] == list(range(count)):
                merged[name] = tuple(value for _, value in in_order)
    return merged


def merge_metrics(parts: Sequence[LogPart]) -> dict[str, float]:
    """Return the mean of each logged metric, weighted by the numbers of completions."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for _, log in parts for name in log.metrics):
        logged = [(len(rows), value) for rows, log in parts for value in log.metrics.get(name, ())]
        largest = max(count for count, _ in logged)
        weights = [count / largest for count, _ in logged]  # at most 1, so that sums are finite
        merged[name] = math.fsum(w * value for w, (_, value) in zip(weights, logged, strict=True)) / math.fsum(weights)
    return merged


@dataclass(frozen=True, kw_only=True)
class _StartedGroup:
    """A finished group whose rewards are being computed while others are sampled."""

    transcripts: Sequence[Conversation]
    log: RewardLog
    pending: Sequence[PendingJob]


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleTurnBatch:
    """A `PromptBatch` of single completions.

    Rewards of whole groups can be started while others are still being sampled: `start_scoring`, then `score` of all
    completions, or `cancel`.

    Attributes:
        prompts: Token ids of each prompt.
        rows: Dataset row of each prompt.
        rewards: The reward functions.
        runner: Calls them.
        tokenizer: Decodes completions.
        on_reward_error: "raise" or "exclude".
        progress: Training progress.
        max_turns: Maximum number of completions in a conversation.
        held_out: True for validation and test prompts. Failed rewards are computed once more before they are excluded.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]
    rewards: Sequence[Reward]
    runner: RewardRunner
    tokenizer: Tokenizer
    on_reward_error: OnRewardError
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    max_turns: int = 1
    held_out: bool = False
    _started: list[_StartedGroup] = field(default_factory=list, init=False, repr=False)

    @property
    def questions(self) -> tuple[str, ...]:
        """Question of each prompt; for messages the last user message."""
        return tuple(_question(row, "prompt" if self.rewards[0].batched else "question") for row in self.rows)

    def respond(self, transcripts: Sequence[Conversation]) -> Sequence[Sequence[int] | None]:
        """Return None for each conversation: there is only one turn."""
        return [None] * len(transcripts)

    @property
    def streams_rewards(self) -> bool:
        """True if any reward can be computed in the background."""
        return bool(self._background_rewards())

    def _background_rewards(self) -> list[Reward]:
        # Held-out prompts have no groups, which batched functions would be called with.
        return [
            reward
            for reward in self.rewards
            if self.runner.runs_in_background(reward.name) and not (self.held_out and reward.batched)
        ]

    def start_scoring(self, transcripts: Sequence[Conversation]) -> None:
        """Start to compute the rewards of a finished group in the background.

        Call `score` later with the conversations of all groups, in the order of their rows. Its result is the same as
        without this call.

        Raises:
            ValueError: If there is no conversation, or one has an invalid prompt index.
        """
        self._check(transcripts)
        log = RewardLog()
        inputs, group = self._reward_inputs(transcripts, log), range(len(transcripts))
        jobs = [job for reward in self._background_rewards() for job in reward.jobs(inputs, group, 1)]
        named = [replace(job, rows=tuple(transcripts[row].row for row in job.rows)) for job in jobs]
        self._started.append(_StartedGroup(transcripts=transcripts, log=log, pending=self.runner.submit(named)))

    def poll(self) -> None:
        """Start queued calls where workers have become free, without blocking."""
        self.runner.poll()

    def cancel(self) -> None:
        """Cancel all started groups."""
        self.runner.cancel([job for group in self._take_started() for job in group.pending])

    def _take_started(self) -> list[_StartedGroup]:
        started = list(self._started)
        self._started.clear()
        return started

    def score(self, transcripts: Sequence[Conversation], stop: Stop = NEVER) -> Scores:
        """Compute the rewards of conversations; see `PromptBatch.score`. `stop` is checked between calls.

        Raises:
            ValueError: If there is no conversation, one has an invalid prompt index, or one has changed since
                `start_scoring`.
            RewardError: If a reward function fails.
        """
        # 1. Groups that were started must be unchanged.
        self._check(transcripts)
        if any(one not in transcripts[one.row :][:1] for group in self._started for one in group.transcripts):
            self.cancel()
            raise ValueError("score got other transcripts than start_scoring. Pass the same ones, in row order.")
        # 2. Compute the other rewards, and wait for all.
        started, log = self._take_started(), RewardLog()
        inputs = self._reward_inputs(transcripts, log)
        pending = [job for group in started for job in group.pending]
        result = compute_rewards(
            self.rewards, inputs, self.on_reward_error, self.runner, retry=self.held_out, pending=pending, stop=stop
        )
        # 3. Merge the values that were logged for each group and for all.
        count = len(transcripts)
        logs = [([transcript.row for transcript in group.transcripts], group.log) for group in started]
        parts = [*logs, (range(count), log)]
        return Scores(
            rewards=result.rewards,
            components=result.components,
            completions=tuple(map(_display_text, inputs.turns or ())),
            weights=tuple(reward.weight for reward in self.rewards),
            step_rewards=self._step_rewards(result, inputs, transcripts) if result.steps else None,
            columns=merge_columns(parts, count),
            metrics=merge_metrics(parts),
        )

    def _reward_inputs(self, transcripts: Sequence[Conversation], log: RewardLog) -> RewardInputs:
        token_ids = [list(transcript.tokens) for transcript in transcripts]
        texts = tuple(self._text(ids) for ids in token_ids)
        in_process = self.runner.in_process
        return RewardInputs(
            rows=[self.rows[transcript.start] for transcript in transcripts],
            texts=texts,
            token_ids=token_ids,
            turns=[
                [text] if len(transcript.turns) == 1 else self._turn_texts(transcript)
                for text, transcript in zip(texts, transcripts, strict=True)
            ],
            trainer=log.trainer_arguments(self.progress, in_process=in_process) if self.rewards[0].batched else {},
        )

    def _check(self, transcripts: Sequence[Conversation]) -> None:
        starts = sorted({transcript.start for transcript in transcripts})
        if not starts:
            raise ValueError("transcripts must contain at least one conversation, got none.")
        if starts[0] < 0 or starts[-1] >= len(self.prompts):
            raise ValueError(f"starts must be in [0, {len(self.prompts) - 1}], got {starts}.")

    def _step_rewards(
        self, result: RewardResult, inputs: RewardInputs, transcripts: Sequence[Conversation]
    ) -> NDArray[np.float64]:
        """Return the `[n, t]` reward at each sampled token; rewards of whole completions are at the last one."""
        table = np.full((len(inputs.texts), max(1, *map(len, inputs.token_ids))), np.nan)
        last_sampled = [_last_sampled(transcript.sampled) for transcript in transcripts]

        def add(row: int, position: int, value: float) -> None:
            table[row, position] = value if np.isnan(table[row, position]) else table[row, position] + value

        for reward in self.rewards:
            values = result.components[reward.name]
            steps = result.steps.get(reward.name, [None] * len(values))
            for row in np.flatnonzero(~np.isnan(values) & ~np.isnan(result.rewards)).tolist():
                ids, row_steps = inputs.token_ids[row], steps[row]
                if row_steps is None:  # a reward of the whole completion
                    add(row, last_sampled[row][-1] if ids else -1, reward.weight * values[row])
                    continue
                positions = token_positions(row_steps, ids, inputs.texts[row], self._text)
                for position, value in zip(positions, row_steps.values, strict=True):
                    add(row, last_sampled[row][position], reward.weight * value)
        return table

    def _turn_texts(self, transcript: Conversation) -> list[str]:
        """Return the texts of completions and replies, in order."""
        return [self._text(list(part)) for part in transcript.turns]

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _display_text(turns: Sequence[str]) -> str:
    """Return completions as they are, and replies in lines with the prefix `REPLY`."""
    replies = ["".join(f"\n{REPLY}{line}" for line in reply.split("\n")) + "\n" for reply in turns[1::2]]
    return "".join(text + reply for text, reply in zip(turns[::2], [*replies, ""], strict=False))


def _last_sampled(sampled: Sequence[bool]) -> list[int]:
    """Return for each token the position of the last sampled token up to it."""
    positions, last = [], 0
    for position, is_sampled in enumerate(sampled):
        last = position if is_sampled else last
        positions.append(last)
    return positions


def _question(row: Mapping[str, Any], column: str) -> str:
    """Return a row's question as text; for messages the last user message."""
    prompt = row[column]
    if column == "question" or isinstance(prompt, str):
        return str(prompt)
    messages = check_messages(prompt, column)
    user = [message["content"] for message in messages if message["role"] == "user"]
    return str(user[-1] if user else messages[-1]["content"])
