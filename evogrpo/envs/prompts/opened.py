"""Opened prompts of a dataset: their questions in words, and scoring what is said to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.groups import REPLY, Scores
from evogrpo.envs.prompts.rewards.offered import Advance, Logged
from evogrpo.envs.prompts.rewards.reward_functions import Answers, OnRewardError, Reward
from evogrpo.envs.prompts.rewards.scoring import Evaluated, evaluate
from evogrpo.envs.prompts.rewards.step_rewards import token_positions
from evogrpo.envs.prompts.rewards.verifiers.calling import Runner
from evogrpo.envs.prompts.templates import Tokenizer, check_messages
from evogrpo.records import Transcript


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedPrompts:
    """Opened prompts, each answered by any number of completions: `Conversations` of one turn.

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
    runner: Runner
    tokenizer: Tokenizer
    on_reward_error: OnRewardError
    pace: Advance = field(default_factory=Advance)
    max_turns: int = 1
    held_out: bool = False

    @property
    def questions(self) -> tuple[str, ...]:
        """The question of each opened start; of a conversation, what the user said last."""
        return tuple(_question(row, "prompt" if self.rewards[0].batched else "question") for row in self.rows)

    def respond(self, transcripts: Sequence[Transcript]) -> Sequence[Sequence[int] | None]:
        """Reply nothing."""
        return [None] * len(transcripts)

    def score(self, transcripts: Sequence[Transcript]) -> Scores:
        """Reward whole conversations; see `Conversations.score`.

        Raises:
            ValueError: If there are none, or one names a start that is not open.
            RewardError: If a reward function fails.
        """
        self._check(transcripts)
        token_ids = [list(transcript.tokens) for transcript in transcripts]
        texts = tuple(self._text(ids) for ids in token_ids)
        spoken = [
            [text] if len(transcript.turns) == 1 else self._spoken(transcript)
            for text, transcript in zip(texts, transcripts, strict=True)
        ]
        logged = Logged()
        answers = Answers(
            rows=[self.rows[transcript.start] for transcript in transcripts],
            texts=texts,
            token_ids=token_ids,
            turns=spoken,
            training=logged.offered(self.pace, here=self.runner.here) if self.rewards[0].batched else {},
        )
        evaluated = evaluate(self.rewards, answers, self.on_reward_error, self.runner, again=self.held_out)
        return Scores(
            rewards=evaluated.rewards,
            components=evaluated.components,
            completions=tuple(map(_shown, spoken)),
            weights=tuple(reward.weight for reward in self.rewards),
            step_rewards=self._step_rewards(evaluated, answers, transcripts) if evaluated.steps else None,
            columns=logged.whole_columns(len(texts)),
            metrics=logged.means(),
        )

    def _check(self, transcripts: Sequence[Transcript]) -> None:
        starts = sorted({transcript.start for transcript in transcripts})
        if not starts:
            raise ValueError("there must be at least one conversation, got none")
        if starts[0] < 0 or starts[-1] >= len(self.prompts):
            raise ValueError(f"starts must lie in [0, {len(self.prompts) - 1}], got {starts}")

    def _step_rewards(
        self, evaluated: Evaluated, answers: Answers, transcripts: Sequence[Transcript]
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

    def _spoken(self, transcript: Transcript) -> list[str]:
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
