"""Test of the user's functions on made-up completions, before a run starts."""

import math
from dataclasses import dataclass

import numpy as np

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


def sample_rewards(batch: SingleTurnBatch, hint: str) -> dict[str, float | None]:
    """Score sample completions of one prompt, to find errors of user code before training.

    Args:
        batch: Batch of one prompt.
        hint: Sentence about the form of completions, for functions that may take messages for text;
            empty = none.

    Returns:
        Reward of the first sample completion by function; None if it gave none.

    Raises:
        RewardError: If a function fails; with on_reward_error "raise" also if a function of one
            completion returns None for all samples.
    """
    # 1. Two completions; another member's completion is a group of its own.
    ids = batch.tokenizer(list(SAMPLE_COMPLETIONS), add_special_tokens=False)["input_ids"]
    members = [0, 0]
    if any(reward.batched for reward in batch.rewards):
        ids.append(ids[0])
        members.append(1)
    samples = single_turn_conversations([0] * len(ids), ids, members)
    # 2. Replies and environments first, as in a run.
    try:
        batch.respond(samples)
        scores = batch.score(samples)
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        reason = text_of(error)
        if not isinstance(error, RewardError):
            reason = f"{class_name(error)}: {one_line(error)}"
        message = f"Your functions are tested on sample completions before training: {reason}"
        if hint and isinstance(error.__cause__, AttributeError | LookupError | TypeError):
            message = f"{message.removesuffix('.')}. {hint}"
        raise RewardError(message) from (error.__cause__ or error)
    # 3. A function of one completion that returns None for all samples probably lacks a `return`.
    #    In TRL's form None means that the function does not apply.
    rewards: dict[str, float | None] = {}
    for reward in batch.rewards:
        values = scores.components[reward.name]
        required = batch.on_reward_error == "raise" and not reward.batched
        if required and np.isnan(values).all():
            raise RewardError(
                f"Reward function {reward.name!r} must return a number, got None for all samples."
            )
        first = float(values[0])
        rewards[reward.name] = None if math.isnan(first) else first
    return rewards
