"""Opened prompts of a dataset: their questions in words, and scoring what is said to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.data import Conversation
from evogrpo.envs.protocol import REPLY, Scores
from evogrpo.envs.text.reward_calls import PendingJob, RewardRunner
from evogrpo.envs.text.reward_functions import (
    OnRewardError,
    Reward,
    RewardInputs,
    RewardLog,
    TrainingProgress,
    merge_columns,
    merge_metrics,
)
from evogrpo.envs.text.scoring import RewardResult, compute_rewards
from evogrpo.envs.text.step_rewards import token_positions
from evogrpo.envs.text.templates import Tokenizer, check_messages


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group that is being rewarded before others are finished."""

    transcripts: Sequence[Conversation]
    logged: RewardLog
    begun: Sequence[PendingJob]

    @property
    def rows(self) -> list[int]:
        return [transcript.row for transcript in self.transcripts]


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleTurnBatch:
    """Opened prompts, each answered by any number of completions: `PromptBatch` of one turn.

    Attributes:
        prompts: Token ids per opened start.
        rows: Dataset row per opened start.
        rewards: The reward functions.
        runner: Calls them.
        tokenizer: Decodes completions.
        on_reward_error: What happens where a reward function fails.
        pace: How far training has come.
        max_turns: Most completions in one conversation.
        held_out: Whether members are compared by the rewards: what fails is then tried once more before it is left out.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]
    rewards: Sequence[Reward]
    runner: RewardRunner
    tokenizer: Tokenizer
    on_reward_error: OnRewardError
    pace: TrainingProgress = field(default_factory=TrainingProgress)
    max_turns: int = 1
    held_out: bool = False
    _groups: list[_Group] = field(default_factory=list, init=False, repr=False)

    @property
    def questions(self) -> tuple[str, ...]:
        """The question of each opened start; of a conversation, what the user said last."""
        return tuple(_question(row, "prompt" if self.rewards[0].batched else "question") for row in self.rows)

    def respond(self, transcripts: Sequence[Conversation]) -> Sequence[Sequence[int] | None]:
        """Reply nothing."""
        return [None] * len(transcripts)

    @property
    def begins(self) -> bool:
        """Whether any reward is found beside what this thread does; see `Beforehand`."""
        return bool(self._beforehand)

    @property
    def _beforehand(self) -> list[Reward]:
        """The functions that whole groups are handed to: a held-out question has no group to be judged in."""
        return [
            reward
            for reward in self.rewards
            if self.runner.runs_in_background(reward.name) and not (self.held_out and reward.batched)
        ]

    def begin(self, transcripts: Sequence[Conversation]) -> None:
        """Begin to reward a whole group; see `Beforehand.begin`.

        Raises:
            ValueError: If there is none, or one names a start that is not open.
        """
        self._check(transcripts)
        logged = RewardLog()
        answers, group = self._answers(transcripts, logged), range(len(transcripts))
        jobs = [job for reward in self._beforehand for job in reward.jobs(answers, group, 1)]
        named = [replace(job, rows=tuple(transcripts[place].row for place in job.rows)) for job in jobs]
        self._groups.append(_Group(transcripts=transcripts, logged=logged, begun=self.runner.begin(named)))

    def proceed(self) -> None:
        """Go on with what was begun; see `Beforehand.proceed`."""
        self.runner.proceed()

    def abandon(self) -> None:
        """Give up whatever was begun; see `Beforehand.abandon`."""
        self.runner.abandon([each for group in self._begun_groups() for each in group.begun])

    def _begun_groups(self) -> list[_Group]:
        """Return what was begun, which is nobody's any more then."""
        groups = list(self._groups)
        self._groups.clear()
        return groups

    def score(self, transcripts: Sequence[Conversation]) -> Scores:
        """Reward whole conversations; see `PromptBatch.score`.

        Raises:
            ValueError: If there are none, one names a start that is not open, or one that was begun is another now.
            RewardError: If a reward function fails.
        """
        self._check(transcripts)
        if any(each not in transcripts[each.row :][:1] for group in self._groups for each in group.transcripts):
            self.abandon()
            raise ValueError(
                "what was begun must be scored as it was, in the order of its rows, got other conversations"
            )
        groups, logged = self._begun_groups(), RewardLog()
        answers = self._answers(transcripts, logged)
        begun = [each for group in groups for each in group.begun]
        evaluated = compute_rewards(
            self.rewards, answers, self.on_reward_error, self.runner, again=self.held_out, begun=begun
        )
        count = len(transcripts)
        parts = [*((group.rows, group.logged) for group in groups), (range(count), logged)]
        return Scores(
            rewards=evaluated.rewards,
            components=evaluated.components,
            completions=tuple(map(_shown, answers.turns or ())),
            weights=tuple(reward.weight for reward in self.rewards),
            step_rewards=self._step_rewards(evaluated, answers, transcripts) if evaluated.steps else None,
            columns=merge_columns(parts, count),
            metrics=merge_metrics(parts),
        )

    def _answers(self, transcripts: Sequence[Conversation], logged: RewardLog) -> RewardInputs:
        """Return what reward functions may see of conversations, and where they may log to."""
        token_ids = [list(transcript.tokens) for transcript in transcripts]
        texts = tuple(self._text(ids) for ids in token_ids)
        return RewardInputs(
            rows=[self.rows[transcript.start] for transcript in transcripts],
            texts=texts,
            token_ids=token_ids,
            turns=[
                [text] if len(transcript.turns) == 1 else self._spoken(transcript)
                for text, transcript in zip(texts, transcripts, strict=True)
            ],
            training=logged.offered(self.pace, here=self.runner.here) if self.rewards[0].batched else {},
        )

    def _check(self, transcripts: Sequence[Conversation]) -> None:
        starts = sorted({transcript.start for transcript in transcripts})
        if not starts:
            raise ValueError("there must be at least one conversation, got none")
        if starts[0] < 0 or starts[-1] >= len(self.prompts):
            raise ValueError(f"starts must lie in [0, {len(self.prompts) - 1}], got {starts}")

    def _step_rewards(
        self, evaluated: RewardResult, answers: RewardInputs, transcripts: Sequence[Conversation]
    ) -> NDArray[np.float64]:
        """Return [n, t] what was earned at each token said; a whole conversation's reward stands at the last one."""
        table = np.full((len(answers.texts), max(1, *map(len, answers.token_ids))), np.nan)
        said = [_said_before(transcript.sampled) for transcript in transcripts]
        for reward in self.rewards:
            values = evaluated.components[reward.name]
            steps = evaluated.steps.get(reward.name, [None] * len(values))
            for row in np.flatnonzero(~np.isnan(values) & ~np.isnan(evaluated.rewards)).tolist():
                ids, inside = answers.token_ids[row], steps[row]
                if inside is None:
                    _earn(table, row, said[row][-1] if ids else -1, reward.weight * values[row])
                    continue
                places = token_positions(inside, ids, answers.texts[row], self._text)
                for place, value in zip(places, inside.values, strict=True):
                    _earn(table, row, said[row][place], reward.weight * value)
        return table

    def _spoken(self, transcript: Conversation) -> list[str]:
        """Return the texts of completions and replies, in order."""
        return [self._text(list(part)) for part in transcript.turns]

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _shown(spoken: Sequence[str]) -> str:
    """Return what was said as it is, and what was heard in marked lines."""
    said, heard = spoken[::2], spoken[1::2]
    replies = ["".join(f"\n{REPLY}{line}" for line in reply.split("\n")) + "\n" for reply in heard]
    return "".join(text + reply for text, reply in zip(said, [*replies, ""], strict=False))


def _said_before(sampled: Sequence[bool]) -> list[int]:
    """Return for each token the last one up to it that was said."""
    places, last = [], 0
    for place, said in enumerate(sampled):
        last = place if said else last
        places.append(last)
    return places


def _earn(table: NDArray[np.float64], row: int, place: int, value: float) -> None:
    table[row, place] = value if np.isnan(table[row, place]) else table[row, place] + value


def _question(row: Mapping[str, Any], column: str) -> str:
    """Return what a row asks, for people: of a conversation what the user said last."""
    asked = row[column]
    if column == "question" or isinstance(asked, str):
        return str(asked)
    messages = check_messages(asked, column)
    said = [message["content"] for message in messages if message["role"] == "user"]
    return str(said[-1] if said else messages[-1]["content"])
