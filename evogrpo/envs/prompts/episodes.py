"""Opened prompts of a dataset: their questions in words, and scoring the completions that answer them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.groups import Scores
from evogrpo.envs.prompts.reward_functions import Answers, OnRewardError, Reward
from evogrpo.envs.prompts.scoring import Evaluated, evaluate
from evogrpo.envs.prompts.step_rewards import token_positions
from evogrpo.envs.prompts.templates import Tokenizer
from evogrpo.envs.prompts.verifiers.calling import Runner


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptEpisodes:
    """Opened prompts, each answered by any number of completions.

    Attributes:
        prompts: Token ids per opened start.
        rows: Dataset row per opened start.
        rewards: The reward functions.
        runner: Calls them.
        tokenizer: Decodes completions.
        on_reward_error: What happens where a reward function fails.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]
    rewards: Sequence[Reward]
    runner: Runner
    tokenizer: Tokenizer
    on_reward_error: OnRewardError

    @property
    def questions(self) -> tuple[str, ...]:
        """The question of each opened start; of a conversation, what the user said last."""
        return tuple(_question(row, "prompt" if self.rewards[0].batched else "question") for row in self.rows)

    def score(self, starts: Sequence[int], completions: Sequence[Sequence[int]]) -> Scores:
        """Reward one completion per row; see `Episodes.score`.

        Raises:
            ValueError: If the two arguments differ in length, are empty, or name a start that is not open.
            RewardError: If a reward function fails.
        """
        if len(starts) != len(completions) or len(starts) == 0:
            raise ValueError(f"score takes one start per completion, got {len(starts)} for {len(completions)}")
        if not all(0 <= start < len(self.prompts) for start in starts):
            raise ValueError(f"starts must lie in [0, {len(self.prompts) - 1}], got {sorted(set(starts))}")
        token_ids = [[int(token) for token in completion] for completion in completions]
        texts = tuple(self._text(ids) for ids in token_ids)
        answers = Answers(rows=[self.rows[start] for start in starts], texts=texts, token_ids=token_ids)
        evaluated = evaluate(self.rewards, answers, self.on_reward_error, self.runner)
        return Scores(
            rewards=evaluated.rewards,
            components=evaluated.components,
            completions=texts,
            weights=tuple(reward.weight for reward in self.rewards),
            step_rewards=self._step_rewards(evaluated, answers) if evaluated.steps else None,
        )

    def _step_rewards(self, evaluated: Evaluated, answers: Answers) -> NDArray[np.float64]:
        """Return [n, t] what was earned at each token: a reward for a whole completion stands at its last one."""
        table = np.full((len(answers.texts), max(1, *map(len, answers.token_ids))), np.nan)
        for reward in self.rewards:
            values = evaluated.components[reward.name]
            steps = evaluated.steps.get(reward.name, [None] * len(values))
            for row in np.flatnonzero(~np.isnan(values) & ~np.isnan(evaluated.rewards)).tolist():
                ids, inside = answers.token_ids[row], steps[row]
                if inside is None:
                    _earn(table, row, len(ids) - 1, reward.weight * values[row])
                    continue
                places = token_positions(inside, ids, answers.texts[row], self._text)
                for place, value in zip(places, inside.values, strict=True):
                    _earn(table, row, place, reward.weight * value)
        return table

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _earn(table: NDArray[np.float64], row: int, place: int, value: float) -> None:
    table[row, place] = value if np.isnan(table[row, place]) else table[row, place] + value


def _question(row: Mapping[str, Any], column: str) -> str:
    asked = row[column]
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        return str(asked)
    said = [message["content"] for message in asked if message["role"] == "user"]
    return str(said[-1] if said else asked[-1]["content"])
