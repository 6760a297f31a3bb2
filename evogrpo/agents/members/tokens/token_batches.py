"""From conversations and their rewards to what language models learn from."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.agents.members.tokens.language_settings import LanguageSettings
from evogrpo.agents.rollout.conversing import Conversed
from evogrpo.data import Batch, SamplingBatch, TokenInputs
from evogrpo.envs.groups import Scores
from evogrpo.functional.reward_shaping import overlong_penalty

PENALTY = "overlong_penalty"


def token_batch(
    settings: LanguageSettings, rows: SamplingBatch, conversed: Conversed, scores: Scores, group_ids: Tensor
) -> Batch:
    """Put together what members learn from; the overlong penalty joins the rewards here and nowhere else.

    It is due for every turn by its own length, where the turn ends; a conversation's is the sum.
    """
    rollout = conversed.rollout
    device = rollout.actions.device
    components, weights = dict(scores.components), scores.weights
    rewards = torch.from_numpy(scores.rewards).to(device)
    steps = None if scores.step_rewards is None else _widened(scores.step_rewards, rollout.present)
    buffer = settings.objective.overlong_buffer
    if buffer is not None:
        lengths = conversed.turn_lengths
        by_turn = overlong_penalty(lengths, settings.max_output_tokens, buffer).double()
        penalty = by_turn.sum(1)
        # A penalty alone makes no reward where none applies.
        penalty = torch.where(rewards.isnan(), torch.nan, penalty)
        rewards = rewards + penalty
        components, weights = {**components, PENALTY: penalty.cpu().numpy()}, (*weights, 1.0)
        if steps is not None:
            placed = _at_ends_of_turns(torch.where(rewards.isnan()[:, None], torch.nan, by_turn), conversed)
            steps = torch.where(placed.isnan(), steps, steps.nan_to_num(nan=0.0) + placed)
    mask = rollout.action_mask
    if settings.objective.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]
    return Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=rows.prompt_ids.to(device),
            temperature=rows.temperature.to(device),
            min_new_tokens=rows.min_new_tokens,
            turn_places=conversed.turn_places,
        ),
        actions=rollout.actions,
        present=rollout.present,
        action_mask=mask,
        acted=rollout.action_mask,
        rewards=rewards.float(),
        group_ids=group_ids.to(device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
        exact=rollout.exact,
        step_rewards=None if steps is None else steps.float(),
        reward_components=torch.from_numpy(np.stack(list(components.values()), axis=1)).float().to(device),
        component_weights=weights,
        component_names=tuple(components),
        truncated=rollout.truncated,
    )


def _at_ends_of_turns(penalties: Tensor, conversed: Conversed) -> Tensor:
    """Place `[n, k]` numbers of turns at their last tokens `[n, t]`; NaN elsewhere, and where there was no turn."""
    said = conversed.rollout.action_mask
    ends = said & ~torch.nn.functional.pad(said, (0, 1))[:, 1:]  # a reply holds at least one token
    turn = (ends.cumsum(1) - 1).clamp(min=0, max=penalties.shape[1] - 1)
    return torch.where(ends, penalties.gather(1, turn), torch.nan)


def _widened(table: NDArray[np.float64], present: Tensor) -> Tensor:
    values = torch.from_numpy(table).to(present.device)
    return torch.nn.functional.pad(values, (0, present.shape[1] - values.shape[1]), value=torch.nan)
