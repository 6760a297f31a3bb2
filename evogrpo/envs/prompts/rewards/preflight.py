"""One call of every reward function on made-up completions, before anything expensive."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evogrpo.envs.prompts.rewards.reward_functions import Answers, OnRewardError, Reward, RewardError
from evogrpo.envs.prompts.rewards.scoring import evaluate
from evogrpo.envs.prompts.rewards.verifiers.calling import Runner

MADE_UP = ("This is a made-up completion: 42.", "This is another made-up completion.")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was tried.

    Attributes:
        prompt: The first training prompt as the model reads it; untrusted text.
        tokens: Its token ids.
        rewards: What the first made-up completion earned, by reward function; None where it does not apply or failed.
    """

    prompt: str
    tokens: tuple[int, ...]
    rewards: dict[str, float | None]


def tried(
    rewards: Sequence[Reward], answers: Answers, on_error: OnRewardError, runner: Runner
) -> dict[str, float | None]:
    """Return what each reward function gives for the first made-up completion.

    Args:
        rewards: The reward functions.
        answers: The completions.
        on_error: With "exclude" a function may fail, but what it returns has to be a reward all the same.
        runner: Calls them.

    Raises:
        RewardError: If a function fails, or returns something that is no reward.
    """
    earned: dict[str, float | None] = {}
    for reward in rewards:
        try:
            value = float(evaluate([reward], answers, "raise", runner).rewards[0])
        except RewardError as error:
            if on_error == "exclude" and error.__cause__ is not None:
                earned[reward.name] = None
                continue
            text = f"Reward functions are tried on made-up completions before training: {error}"
            raise RewardError(text) from error.__cause__
        earned[reward.name] = None if math.isnan(value) else value
    return earned
