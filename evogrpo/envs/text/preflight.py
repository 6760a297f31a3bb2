"""Test of the user's functions on made-up completions, before a run starts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from evogrpo.envs.protocol import Scores
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.records import single_turn_conversations
from evogrpo.text import class_name, one_line, text_of

SAMPLE_COMPLETIONS = ("This is a made-up completion: 42.", "This is another made-up completion.")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Results of testing the reward functions before a run.

    Attributes:
        prompt: First training prompt, rendered; untrusted text.
        tokens: Token ids of the prompt.
        rewards: Reward of the first sample completion by function; None where it does not apply or
            failed.
    """

    prompt: str
    tokens: tuple[int, ...]
    rewards: dict[str, float | None]


def score_samples(batch: SingleTurnBatch, tokenizer: Any, *, batched: bool, hint: str) -> Scores:
    """Score sample completions of one prompt, to find errors of user code before training.

    Args:
        batch: Batch of one prompt.
        tokenizer: Tokenizer of the completions.
        batched: Some reward functions take the completions of several members at once.
        hint: Sentence about the form of completions, for functions that may take messages for text;
            empty = none.

    Raises:
        RewardError: If a function fails.
    """
    ids = tokenizer(list(SAMPLE_COMPLETIONS), add_special_tokens=False)["input_ids"]
    members = [0, 0]
    if batched:
        # Another member's completion is a group of its own.
        ids.append(ids[0])
        members.append(1)
    samples = single_turn_conversations([0] * len(ids), ids, members)
    try:
        # Replies and environments first, as in a run.
        batch.respond(samples)
        return batch.score(samples)
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        reason = text_of(error)
        if not isinstance(error, RewardError):
            reason = f"{class_name(error)}: {one_line(error)}"
        message = f"Your functions are tested on sample completions before training: {reason}"
        if hint and isinstance(error.__cause__, AttributeError | LookupError | TypeError):
            message = f"{message.removesuffix('.')}. {hint}"
        cause: BaseException = error
        if error.__cause__ is not None:
            cause = error.__cause__
        raise RewardError(message) from cause


def first_rewards(
    batch: SingleTurnBatch, scores: Scores, *, must_return: bool
) -> dict[str, float | None]:
    """Return the reward of the first sample completion by function; None if it gave none.

    Args:
        batch: The batch that was scored.
        scores: Result of `score_samples`.
        must_return: Refuse functions of one completion that return None for all samples.

    Raises:
        RewardError: If one does.
    """
    rewards: dict[str, float | None] = {}
    for reward in batch.rewards:
        values = scores.components[reward.name]
        # A function of one completion that returns nothing has no `return`.
        no_value = not reward.batched and bool(np.isnan(values).all())
        if no_value and must_return:
            raise RewardError(
                f"Reward function {reward.name!r} must return a number, got None for all samples."
            )
        rewards[reward.name] = None if np.isnan(values[0]) else float(values[0])
    return rewards
